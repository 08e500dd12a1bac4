"""Every fix: what it changes it restores, exact ones change no number, and each makes the peak smaller."""

from __future__ import annotations

import collections
import copy
import importlib.util
import sys
import types

import pytest
import torch
import torch._inductor.config as inductor
from torch.utils._python_dispatch import TorchDispatchMode

import memprof
from memprof.errors import MemprofError, UsageError
from memprof.fixes.catalog import FIXES, Numerics, find_fixes
from memprof.flows.verify.kernels import compile_kernels_together
from memprof.spec import TargetSpec
from memprof.workload.npt_layers import add_npt
from tests.lanes import by_day
from tests.unit.fixes import models


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


OPTIONS = {
    "vocabulary-cap": {"vocab_size": 50},
    "freeze": {"frozen": "*embed_tokens*"},
    "lora": {"lora_rank": 2},
    "qlora": {"lora_rank": 2},
    "chunked-loss": {"chunk_size": 4},
    "optimizer-in-backward": {"optimizer": adamw},
    "fused-optimizer": {"optimizer": adamw},
    "cpu-offload-optimizer": {"optimizer": adamw, "offload_gradients": True},
}
# What these make or change is not in the model.
OUTSIDE = {"micro-batch", "streamed-batches", "fused-optimizer", "expandable-segments"}
NPT = {"low-rank-npt", "cpu-offload-npt-delta"}
# All that change the model, and whose packages are installed.
HERE = [
    name
    for name, fix in FIXES.items()
    if name not in {"8-bit-optimizer", *OUTSIDE}
    and ("bitsandbytes" not in fix.packages or importlib.util.find_spec("bitsandbytes"))
]
EXACT = [
    name
    for name, fix in FIXES.items()
    if fix.numerics is Numerics.EXACT and name not in {"micro-batch", "streamed-batches", "expandable-segments"}
]


def options(*names):
    return {key: value for name in names for key, value in OPTIONS.get(name, {}).items()}


def llama(**config):
    return models.llama(attn_implementation="eager", **config)


def model_for(name, **config):
    """The fixes of NPT need components."""
    model = llama(**config)
    if name in NPT:
        add_npt(model, TargetSpec(model="llama", npt="dense", npt_rank=2))
    return model


def train(model, steps=3, optimizer=None):
    """Losses of a few steps."""
    optimizer = optimizer or adamw([p for p in model.parameters() if p.requires_grad])
    losses = []
    for _ in range(steps):
        loss = model(**models.batch(vocab=50)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


# What is compiled has its own tests (test_compiled.py); here C++ is compiled for the CPU, a third of a minute.
@pytest.mark.parametrize("name", by_day(HERE, *(name for name in HERE if name != "compile")))
def test_undo_restores_everything(name):
    model = model_for(name)
    before, wanted = models.state(model), model(**models.batch(vocab=50)).logits.detach()
    applied = memprof.apply(model, [name], **options(name))
    assert applied.changes
    assert all(change.fix == name for change in applied.changes)
    assert name in str(applied)
    assert models.state(model) != before
    if name != "optimizer-in-backward":  # which would train
        model(**models.batch(vocab=50)).loss.backward()
    applied.undo()
    model.zero_grad()
    assert models.state(model) == before
    assert torch.equal(model(**models.batch(vocab=50)).logits, wanted)
    applied.undo()
    assert models.state(model) == before


@pytest.mark.parametrize("name", by_day(EXACT, *(name for name in EXACT if name != "compile")))
def test_exact_fixes_train_alike(name):
    torch.manual_seed(5)
    # Of a layer of its own C++ is compiled, and layers are alike.
    model = model_for(name, **({"num_hidden_layers": 2} if name == "compile" else {}))
    wanted = train(copy.deepcopy(model))
    applied = memprof.apply(model, [name], **options(name))
    with inductor.patch(compile_threads=1), compile_kernels_together():
        torch.testing.assert_close(train(model, optimizer=applied.results.get(name)), wanted, rtol=2e-6, atol=0)


def test_exact_fixes_together():
    names = ["chunked-loss", "activation-checkpointing", "cpu-offload-activations", "sdpa-attention"]
    model = llama()
    memprof.apply(model, names, chunk_size=4)
    torch.testing.assert_close(train(model), train(llama()), rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", [*EXACT, "lora", "freeze"])
def test_with_dropout_and_a_cache(name):
    """A layer that runs again drops the same, and fills no key-value cache twice."""

    def losses(model, optimizer=None):
        torch.manual_seed(3)
        return train(model, optimizer=optimizer)

    def make():
        return model_for(name, attention_dropout=0.3, use_cache=True).train()

    if name in ("sdpa-attention", "compile"):
        pytest.skip("another kernel draws other numbers")
    model = make()
    original = copy.deepcopy(model)
    extra = {"frozen": "model.norm*"} if name == "freeze" else options(name)
    applied = memprof.apply(model, [name], **extra)
    found = losses(model, applied.results.get(name))
    if name in EXACT:
        torch.testing.assert_close(found, losses(original), rtol=2e-6, atol=0)
    assert found[-1] < found[0]


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_tied_weights_stay_tied(name):
    model = models.MODELS[name]()
    applied = memprof.apply(model, ["bfloat16", "vocabulary-cap"], vocab_size=50)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == 50
    assert model(**models.batch(vocab=50)).logits.shape[-1] == 50
    applied.undo()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model(**models.batch()).logits.shape[-1] == models.VOCAB


def test_vocabulary_cap_keeps_the_first_rows():
    model = llama()
    wanted = model(**models.batch(vocab=50)).logits[..., :50]
    memprof.apply(model, "vocabulary-cap", vocab_size=50)
    torch.testing.assert_close(model(**models.batch(vocab=50)).logits, wanted)


def test_vocabulary_cap_keeps_the_padding_token():
    model = llama()
    model.model.embed_tokens.padding_idx = 49
    memprof.apply(model, "vocabulary-cap", vocab_size=50).undo()
    with pytest.raises(UsageError, match="no room for the padding token") as raised:
        memprof.apply(model, "vocabulary-cap", vocab_size=49)
    assert raised.value.hint == "at least 50"


@pytest.mark.parametrize(("every", "again"), [(1, 4), (2, 2), (4, 1)])
def test_every_nth_layer_runs_again(every, again):
    model, calls = llama(), []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: calls.append(module))
    memprof.apply(model, "activation-checkpointing", every=every)
    model(**models.batch()).loss.backward()
    assert len(calls) == 4 + again


def test_selective_checkpointing_keeps_products():
    """Norms run again, matrix products do not; the numbers are the same."""

    class Products(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.counts = collections.Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.counts[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    def counted(policy):
        model = llama()
        if policy:
            memprof.apply(model, "activation-checkpointing", policy=policy)
        loss = model(**models.batch()).loss
        with Products() as products:
            loss.backward()
        return products.counts, [p.grad for p in model.parameters()]

    (plain, wanted), (selective, found), (full, _) = counted(None), counted("selective"), counted("full")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert selective["mm"] == plain["mm"] < full["mm"]
    assert selective["bmm"] == plain["bmm"] < full["bmm"]
    assert selective["rsqrt"] == full["rsqrt"] > plain["rsqrt"]


@pytest.mark.parametrize("name", ["amp-bfloat16", "amp-float16"])
def test_autocast(name):
    """Products in half precision, masters and their gradients in float32."""
    dtype = getattr(torch, name.removeprefix("amp-"))
    model, seen = llama().to(torch.bfloat16), []
    original = copy.deepcopy(model).float()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    applied = memprof.apply(model, name)
    scaler = applied.results.get(name)
    assert isinstance(scaler, torch.amp.GradScaler) == (name == "amp-float16")
    loss = model(**models.batch()).loss
    (loss if scaler is None else scaler.scale(loss) / scaler.get_scale()).backward()
    assert seen == [dtype] and all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
    wanted = original(**models.batch()).loss
    assert loss != wanted
    torch.testing.assert_close(loss, wanted, rtol=torch.finfo(dtype).eps, atol=0)
    applied.undo()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_autocast_follows_the_model_to_the_gpu():
    def dtypes(amp):
        found = []
        with memprof.virtual_gpu("h100-80gb"):
            model = llama()
            model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: found.append(output.dtype))
            if amp:
                memprof.apply(model, "amp-bfloat16")
            model.to("cuda")
            model(input_ids=torch.zeros(1, 8, dtype=torch.int64, device="cuda"))
        return found

    assert dtypes(True) == [torch.bfloat16] and dtypes(False) == [torch.float32]


def test_checkpointing_by_name():
    model, calls = llama(), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: calls.append("mlp"))
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda module, args: calls.append("attention"))
    memprof.apply(model, "activation-checkpointing", modules="mlp")
    model(**models.batch()).loss.backward()
    assert calls == ["attention", "mlp"]  # hooks are outside of what runs again
    applied_to = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert applied_to == [f"model.layers.{index}.mlp" for index in range(4)]


def test_an_optimizer_of_8_bit_comes_from_its_package(monkeypatch):
    made = []
    package = types.ModuleType("bitsandbytes")
    package.optim = types.ModuleType("bitsandbytes.optim")
    package.optim.AdamW8bit = lambda parameters, lr: made.append((len(parameters), lr)) or "the optimizer"
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, package if name == "bitsandbytes" else package.optim)
    applied = memprof.apply(llama(), "8-bit-optimizer", learning_rate=0.5)
    assert applied.results["8-bit-optimizer"] == "the optimizer"
    assert made == [(len(list(llama().parameters())), 0.5)]


# -- what cannot be done -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "given", "problem", "hint"),
    [
        (["chunked-los"], {}, "unknown fix", "did you mean 'chunked-loss'"),
        ([], {}, "no fix is named", "chunked-loss"),
        (["freeze", "freeze"], {"frozen": "*"}, "named twice", ""),
        (["bfloat16", "float16"], {}, "do not go together", "a model has one dtype"),
        (["chunked-loss"], {"chunk_sise": 4}, "unknown option", "did you mean 'chunk_size'"),
        (["chunked-loss"], {"every": 2}, "a fix that is not named", "activation-checkpointing"),
        (["vocabulary-cap"], {}, "needs an option", "vocab_size="),
        (["vocabulary-cap"], {"vocab_size": 97}, "out of range", "1 to 96"),
        (["vocabulary-cap"], {"vocab_size": 0}, "out of range", "1 to 96"),
        (["activation-checkpointing"], {"policy": "selectiv"}, "unknown policy", "did you mean 'selective'"),
        (["amp-bfloat16", "bfloat16"], {}, "do not go together", "float32"),
        (["amp-bfloat16", "amp-float16"], {}, "do not go together", "one dtype"),
        (["amp-float16", "optimizer-in-backward"], {"optimizer": adamw}, "do not go together", "scaled"),
        (["activation-checkpointing"], {"every": 0}, "out of range", "1 to 4"),
        (["activation-checkpointing"], {"every": 5}, "out of range", "1 to 4"),
        (["activation-checkpointing"], {"modules": "nothing*"}, "names no module", "named like"),
        (["activation-checkpointing"], {"modules": "model.layers.0,*mlp"}, "inside another", ""),
        (["freeze"], {"frozen": "nothing*"}, "names no parameter", "named like"),
        (["lora"], {"lora_rank": 0}, "at least 1", ""),
        (["lora"], {"lora_targets": "nothing"}, "cannot adapt", "lora_targets="),
        (["optimizer-in-backward"], {"optimizer": "adamw"}, "must make a torch optimizer", "AdamW"),
        (["optimizer-in-backward"], {"optimizer": len}, "must make a torch optimizer", "AdamW"),
        (["8-bit-optimizer"], {}, "needs bitsandbytes or torchao", "pip install"),
    ],
)
def test_wrong_use(monkeypatch, names, given, problem, hint):
    for package in ("bitsandbytes.optim", "torchao.optim"):
        monkeypatch.setitem(sys.modules, package, None)
    model = llama()
    before = models.state(model)
    with pytest.raises(UsageError) as raised:
        memprof.apply(model, names, **given)
    assert problem in str(raised.value)
    assert hint in str(raised.value)
    assert models.state(model) == before


def test_all_or_nothing():
    """The last of three cannot be applied: the first two are taken back."""
    model = llama()
    model.lm_head.register_forward_hook(lambda module, args, output: None)
    before = models.state(model)
    with pytest.raises(UsageError, match="has hooks"):
        memprof.apply(model, ["bfloat16", "lora", "sdpa-attention", "chunked-loss"])
    assert models.state(model) == before


def test_already_on():
    model = llama()
    applied = memprof.apply(model, "chunked-loss")
    with pytest.raises(UsageError, match="already on"):
        memprof.apply(model, ["bfloat16", "chunked-loss"])
    assert model.lm_head.weight.dtype == torch.float32
    with memprof.apply(model, "bfloat16"):
        with pytest.raises(UsageError, match="do not go together"):
            memprof.apply(model, "float16")
        with pytest.raises(MemprofError, match="last first"):
            applied.undo()
    with pytest.raises(UsageError, match="already on"):
        memprof.apply(models.llama(attn_implementation="sdpa"), "sdpa-attention")
    model.gradient_checkpointing_enable()
    with pytest.raises(UsageError, match="already on"):
        memprof.apply(model, "activation-checkpointing")


def test_gradients_stub_the_way():
    model = llama()
    model(**models.batch()).loss.backward()
    with pytest.raises(UsageError, match="there are gradients"):
        memprof.apply(model, "cpu-offload-optimizer", offload_gradients=True)
    for name in ("bfloat16", "optimizer-in-backward", "cpu-offload-weights"):
        with pytest.raises(UsageError, match="there are gradients"):
            memprof.apply(model, name, **options(name))


def test_originals_need_not_be_kept():
    model = llama()
    applied = memprof.apply(model, "bfloat16", undoable=False)
    with pytest.raises(MemprofError, match="cannot be undone"):
        applied.undo()
    assert next(model.parameters()).dtype == torch.bfloat16


def test_not_a_model():
    with pytest.raises(UsageError, match=r"torch\.nn\.Module"):
        memprof.apply("llama", "bfloat16")


def test_conflicts_name_fixes_that_exist():
    assert all(other in FIXES for fix in FIXES.values() for other in fix.conflicts)
    assert [fix.name for fix in find_fixes("chunked-loss, bfloat16")] == ["bfloat16", "chunked-loss"]


def test_a_deep_copy_runs_its_own_layers():
    model = llama()
    memprof.apply(model, ["activation-checkpointing", "cpu-offload-activations"])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.model.layers.parameters():
            parameter.fill_(float("nan"))
    assert twin(**models.batch()).loss.isnan()
    assert not model(**models.batch()).loss.isnan()


# -- quantized weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "bytes_per_weight", "largest"),
    [
        ("8-bit-weights", {}, 1, 0.02),
        ("4-bit-weights", {}, 0.5, 0.4),
        ("4-bit-weights", {"quant_type": "fp4", "double_quant": False}, 0.5, 0.5),
        ("qlora", {"lora_rank": 2}, 0.5, 0.4),
    ],
)
@pytest.mark.parametrize("build", [llama, models.gpt2])
def test_quantized_weights_compute_nearly_the_same(build, name, given, bytes_per_weight, largest):
    """With the library's own kernels on the CPU: of gpt2, whose layers keep their weights transposed, too."""
    pytest.importorskip("bitsandbytes")
    model = build()
    head = model.get_output_embeddings().weight
    # What the embedding and a head of its own have is not quantized, nor are vectors.
    kept = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()} | {id(head)}
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in kept)
    wanted = model(**models.batch(vocab=50)).logits.detach()
    memprof.apply(model, [name], **given)
    found = model(**models.batch(vocab=50)).logits.detach()
    assert 0 < (found - wanted).norm() / wanted.norm() < largest
    assert model.get_output_embeddings().weight is head
    quantized = [p for p in model.parameters() if p.dtype in (torch.int8, torch.uint8)]
    assert sum(p.nbytes for p in quantized) == matrices * bytes_per_weight
    model(**models.batch(vocab=50)).loss.backward()
    assert all(p.grad is None for p in quantized)
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("names", "given", "problem"),
    [
        ("4-bit-weights", {"quant_type": "nf3"}, "unknown quant_type"),
        ("8-bit-weights,4-bit-weights", {}, "do not go together"),
        ("qlora,lora", {}, "do not go together"),
        ("qlora", {"lora_rank": 0}, "lora_rank must be at least 1"),
    ],
)
def test_wrong_use_of_quantized_weights(names, given, problem):
    pytest.importorskip("bitsandbytes")
    model = llama()
    before = models.state(model)
    with pytest.raises(UsageError, match=problem):
        memprof.apply(model, names, **given)
    assert models.state(model) == before


def test_quantized_weights_need_their_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UsageError, match="needs bitsandbytes"):
        memprof.apply(llama(), "4-bit-weights")
