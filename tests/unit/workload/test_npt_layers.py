"""NPT components in real models: put where they belong, fed by their layer's attention, alone trained."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from memprof.errors import UsageError  # noqa: E402
from memprof.flows import profile as flow  # noqa: E402
from memprof.spec import NPT_MODES, TargetSpec, parse_layers  # noqa: E402
from memprof.trace.events import Role  # noqa: E402
from memprof.workload.npt import NptComponent  # noqa: E402
from memprof.workload.npt_layers import add_npt  # noqa: E402

COMMON = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA = {**COMMON, "model_type": "llama", "intermediate_size": 128, "num_key_value_heads": 2}
CONFIGS = {
    "llama": (LLAMA, "model.layers.{}.mlp.gate_proj"),
    "qwen3": ({**LLAMA, "model_type": "qwen3", "head_dim": 16}, "model.layers.{}.mlp.gate_proj"),
    "gemma2": ({**LLAMA, "model_type": "gemma2", "head_dim": 16}, "model.layers.{}.mlp.gate_proj"),
    "phi3": ({**LLAMA, "model_type": "phi3", "pad_token_id": 0}, "model.layers.{}.mlp.gate_up_proj"),
    "gpt2": (
        {"model_type": "gpt2", "vocab_size": 300, "n_embd": 64, "n_head": 4, "n_layer": 2},
        "transformer.h.{}.mlp.c_fc",
    ),
    "gpt_neox": (
        {**COMMON, "model_type": "gpt_neox", "intermediate_size": 128},
        "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    ),
    "opt": (
        {**COMMON, "model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64},
        "model.decoder.layers.{}.fc1",
    ),
    "falcon": ({**COMMON, "model_type": "falcon"}, "transformer.h.{}.mlp.dense_h_to_4h"),
    "phi": ({**COMMON, "model_type": "phi", "intermediate_size": 128}, "model.layers.{}.mlp.fc1"),
    "bloom": (
        {"model_type": "bloom", "vocab_size": 300, "hidden_size": 64, "n_head": 4, "n_layer": 2},
        "transformer.h.{}.mlp.dense_h_to_4h",
    ),
}


def build(config: dict[str, object]) -> torch.nn.Module:
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**config)
    return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float64).eval()


def spec(**changes: object) -> TargetSpec:
    return TargetSpec(model="m", **{"npt": "low-rank", "npt_rank": 4, **changes})


def components(model: torch.nn.Module) -> list[NptComponent]:
    return [module for module in model.modules() if isinstance(module, NptComponent)]


@pytest.mark.parametrize(
    ("name", "num_ranks"), [*((name, None) for name in CONFIGS), ("llama", 3), ("gpt2", 3)], ids=str
)
def test_every_architecture(name, num_ranks):
    config, projection = CONFIGS[name]
    model = build(config)
    ids = torch.randint(300, (2, 7))
    with torch.no_grad():
        plain = model(ids).logits
    layers = add_npt(model, spec(npt_num_ranks=num_ranks))
    assert layers == [projection.format(number) for number in range(2)]
    with torch.no_grad():
        for made in components(model):
            for parameter in made.parameters():
                parameter.normal_()
    # Alone trained, all of them, and by every mode to the same loss and gradients.
    results = []
    for mode in NPT_MODES:
        for made in components(model):
            made.mode = mode
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        trained = {path: p.grad for path, p in model.named_parameters() if p.requires_grad}
        assert trained and all(".npt." in path for path in trained)
        assert all(grad is not None and grad.abs().max() > 0 for grad in trained.values())
        assert all(p.grad is None for path, p in model.named_parameters() if ".npt." not in path)
        results.append([loss.detach(), *(grad.clone() for grad in trained.values())])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)
    # It changes what the model says, and a delta of zero does not.
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, plain)
        for made in components(model):
            (made.B if num_ranks is None else made.up_ffn).zero_()
        assert torch.equal(model(ids).logits, plain)


def test_it_is_the_delta_of_the_projection():
    """A hand-made layer: the component sees the MLP's input and its own layer's attention output."""
    model = build(LLAMA)
    add_npt(model, spec(npt_layers="1"))
    (made,) = components(model)
    layer = model.model.layers[1]
    seen: dict[str, torch.Tensor] = {}
    layer.self_attn.register_forward_hook(lambda module, inputs, output: seen.update(attention=output[0]))
    layer.mlp.register_forward_hook(lambda module, inputs, output: seen.update(hidden=inputs[0], output=output))
    with torch.no_grad():
        model(torch.randint(300, (2, 5)))
        hidden, attention = seen["hidden"], seen["attention"]
        delta = torch.einsum("bsr,dr,rf->bsdf", attention @ made.A, made.A, made.B)
        weight = layer.mlp.gate_proj.base.weight.T + delta
        gate = torch.einsum("bsd,bsdf->bsf", hidden, weight)
        wanted = layer.mlp.down_proj(torch.nn.functional.silu(gate) * layer.mlp.up_proj(hidden))
        torch.testing.assert_close(seen["output"], wanted)


@pytest.mark.parametrize(
    ("config", "changes", "problem"),
    [
        (LLAMA, {"npt_layers": "0,2"}, "names no layer"),
        (LLAMA, {"npt_layers": "1-0"}, "range that is empty"),
        ({"model_type": "mamba", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2}, {}, "stack of layers"),
        (
            {**LLAMA, "model_type": "mixtral", "num_local_experts": 2},
            {},
            "no MLP",
        ),
    ],
    ids=["layer", "range", "mamba", "experts"],
)
def test_what_cannot_be_changed_is_left_as_it_was(config, changes, problem):
    model = build(config)
    before = [path for path, _ in model.named_modules()]
    with pytest.raises(UsageError, match=problem):
        add_npt(model, spec(**changes))
    assert [path for path, _ in model.named_modules()] == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_two_stacks_are_ambiguous():
    config = transformers.T5Config(vocab_size=300, d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16)
    with pytest.raises(UsageError, match="which stack"):
        add_npt(transformers.T5ForConditionalGeneration(config), spec())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0", [0]), ("-1", [9]), ("0,4-6,9", [0, 4, 5, 6, 9]), ("5,3-5", [3, 4, 5]), ("-3--1", [7, 8, 9])],
)
def test_layers_are_named_by_numbers_and_ranges(text, wanted):
    assert parse_layers(text, 10) == wanted


@pytest.mark.parametrize(
    "wrong",
    [
        {"npt": "sparse"},
        {"npt": None, "npt_rank": 8},
        {"npt": None, "npt_layers": "0"},
        {"npt_rank": 0},
        {"npt_num_ranks": 0},
        {"npt_num_ranks": 2, "npt_combine": "loop"},
        {"npt_combine": "batched"},
        {"npt_init": "eye"},
        {"npt_layers": "all"},
        {"npt_layers": "0,,1"},
        {"adapter": "lora"},
        {"freeze": "*"},
    ],
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(UsageError):
        TargetSpec(model="gpt2", **{"npt": "low-rank", **wrong})


# -- on the virtual GPU -----------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    return str(file)


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        *((mode, {}) for mode in NPT_MODES),
        ("chunked", {"activation_checkpointing": True}),
        ("per-token", {"amp": "bfloat16"}),
        ("dense", {"mode": "inference"}),
    ],
)
def test_profiled(tiny, mode, changes):
    base = TargetSpec(model=tiny, context_length=16, batch_size=2, dtype="float32", gpu="a100-80gb", steps=1)
    trace, document = flow.profile(base.edit(npt=mode, npt_rank=4, npt_layers="0,-1", **changes))
    target = document.target
    assert (target.asked.npt, target.asked.npt_rank, target.asked.npt_layers) == (mode, 4, "0,-1")
    assert target.num_trainable_parameters == 2 * 4 * (64 + 128)
    gradients = {owner.name for owner in trace.owners.values() if owner.role is Role.GRADIENT}
    trained = {f"model.layers.{number}.mlp.gate_proj.npt.{name}" for number in (0, 1) for name in "AB"}
    assert gradients == (set() if changes.get("mode") else trained)
