"""What real loops do beside a plain step: adapters, frozen parameters, evaluation, zeroed gradients, optimizers."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from pathlib import Path

import pytest

from memprof.allocator.rounding import round_size
from memprof.errors import UsageError
from memprof.findings import Context
from memprof.findings.evidence import is_applicable
from memprof.fixes.catalog import FIXES
from memprof.flows import profile as flow
from memprof.ledger.ledger import build_ledger
from memprof.report.documents.report import Report
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import Role, Trace
from memprof.workload.models import find_source
from tests.lanes import by_day

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"],
}
HIDDEN, KV, LAYERS = 64, 32, 3


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    return str(file)


def run(model: str, **changes: object) -> tuple[Trace, Report]:
    spec = TargetSpec(model=model, context_length=16, batch_size=2, dtype="bfloat16", gpu="a100-80gb")
    return flow.profile(spec.edit(**changes))


def owned(trace: Trace, role: Role) -> dict[str, list[int]]:
    """Indices of the storages with this role, by name; scalars (the optimizer's step counters) left out."""
    found: dict[str, list[int]] = {}
    for index, owner in trace.owners.items():
        if owner.role is role and trace.storages[index].shape:
            found.setdefault(owner.name, []).append(index)
    return found


def stage(document: Report, name: str, step: int = 2):
    return next(row for row in document.stages if row.name == name and row.step == step)


# -- adapters -----------------------------------------------------------------------------------------------------


def lora_parameters(rank: int) -> int:
    """Of q_proj and v_proj, PEFT's targets for a Llama: A is (rank, inputs), B is (outputs, rank)."""
    return LAYERS * rank * ((HIDDEN + HIDDEN) + (HIDDEN + KV))


@pytest.mark.parametrize("checkpointing", by_day([False, True], True))
def test_lora_trains_the_adapter_alone(config, checkpointing):
    trace, document = run(config, adapter="lora", lora_rank=4, activation_checkpointing=checkpointing)
    count = lora_parameters(4)
    target = document.target
    assert target.num_trainable_parameters == count
    assert target.asked.adapter == "lora" and target.asked.lora_rank == 4
    plain = run(config)[1].target
    assert target.num_parameters == plain.num_parameters + count
    assert plain.num_trainable_parameters == plain.num_parameters
    parameters = owned(trace, Role.PARAMETER)
    adapters = {name for name in parameters if "lora_" in name}
    assert len(adapters) == LAYERS * 2 * 2
    # PEFT keeps them in float32 beside a bfloat16 model.
    assert sum(trace.storages[parameters[name][-1]].num_bytes for name in adapters) == 4 * count
    assert {trace.storages[parameters[name][-1]].dtype for name in parameters if name not in adapters} == {"bfloat16"}
    # Each adapter has a gradient in each step, and nothing else has one.
    gradients = owned(trace, Role.GRADIENT)
    assert set(gradients) == adapters
    assert all(len(indices) == 2 for indices in gradients.values())
    state = owned(trace, Role.OPTIMIZER_STATE)
    assert sum(trace.storages[index].num_bytes for index in state["exp_avg"] + state["exp_avg_sq"]) == 2 * 4 * count
    assert "LoRA of rank 4" in to_text(render(document))


def test_lora_targets_rank_and_dropout(config):
    trace, document = run(config, adapter="lora", lora_targets="gate_proj, down_proj")
    assert document.target.asked.lora_rank == 8
    assert document.target.num_trainable_parameters == 2 * LAYERS * 8 * (64 + 128)
    names = owned(trace, Role.PARAMETER)
    assert {name.split(".")[-4] for name in names if "lora_" in name} == {"gate_proj", "down_proj"}
    everything = run(config, adapter="lora", lora_targets="all-linear")[1].target.num_trainable_parameters
    assert everything > document.target.num_trainable_parameters
    # Dropout keeps a mask, and makes a scaled copy of each target's input.
    peaks = [
        stage(run(config, adapter="lora", lora_dropout=dropout, steps=2)[1], "layer 1").delta_bytes
        for dropout in (0.0, 0.1)
    ]
    assert peaks[1] > peaks[0]


def test_lora_in_inference(config):
    document = run(config, adapter="lora", mode=Mode.INFERENCE, new_tokens=4)[1]
    assert "decode" in {row.name for row in document.stages}
    assert document.target.asked.adapter == "lora"
    assert "LoRA of rank 8, inference" in " ".join(to_text(render(document)).split())


def test_lora_of_a_transposed_layer():
    document = run("gpt2", adapter="lora", lora_rank=8)[1]
    assert document.target.num_trainable_parameters == 12 * 8 * (768 + 3 * 768)


def test_lora_is_no_fix_for_itself(config):
    for adapter in (None, "lora"):
        trace, document = run(config, adapter=adapter)
        context = Context(build_ledger(trace), None, spec=document.target.asked)
        assert is_applicable(context, FIXES["lora"]) == (adapter is None)


def test_lora_needs_known_targets(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(FACTORIES)
    with pytest.raises(UsageError, match="PEFT cannot adapt") as refused:
        run(f"{file}:model", adapter="lora")
    assert "--lora-targets" in str(refused.value)
    with pytest.raises(UsageError, match="PEFT cannot adapt"):
        run(f"{file}:model", adapter="lora", lora_targets="no_such_layer")
    document = run(f"{file}:model", adapter="lora", lora_targets="first,second", lora_rank=2)[1]
    assert document.target.num_trainable_parameters == 2 * 2 * (32 + 32)


def test_without_peft(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match="--adapter needs PEFT") as refused:
        run(config, adapter="lora")
    assert "pip install 'peft>=" in str(refused.value)


# -- what is not trained --------------------------------------------------------------------------------------------

FACTORIES = textwrap.dedent(
    """
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(100, 32)
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            self.head = nn.Linear(32, 100)

        def forward(self, ids):
            return self.head(self.second(self.first(self.embed(ids)).relu()))

    def model(): return Model()

    def half_frozen():
        model = Model()
        model.embed.requires_grad_(False)
        model.first.requires_grad_(False)
        return model

    def frozen(): return Model().requires_grad_(False)
    """
)


def test_parameters_that_the_factory_froze(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(FACTORIES)
    trace, document = run(f"{file}:half_frozen", dtype="float32")
    trained = {"second.weight", "second.bias", "head.weight", "head.bias"}
    assert set(owned(trace, Role.GRADIENT)) == trained
    count = 32 * 32 + 32 + 32 * 100 + 100
    assert document.target.num_trainable_parameters == count
    assert f"{count:,} trained" in to_text(render(document))
    state = owned(trace, Role.OPTIMIZER_STATE)
    assert sum(trace.storages[index].num_bytes for index in state["exp_avg"]) == 4 * count
    with pytest.raises(UsageError, match="nothing is trained"):
        run(f"{file}:frozen")
    assert run(f"{file}:frozen", mode=Mode.INFERENCE)[1].stages


def test_freeze(config):
    trace, document = run(config, freeze="model.embed_tokens.*, model.layers.[01].*")
    gradients = set(owned(trace, Role.GRADIENT))
    assert gradients == {
        name
        for name in owned(trace, Role.PARAMETER)
        if not name.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1."))
    }
    assert "model.layers.2.mlp.up_proj.weight" in gradients
    # What lies below the first trained layer keeps nothing for a backward.
    assert stage(document, "layer 1").delta_bytes < stage(document, "layer 2").delta_bytes
    with pytest.raises(UsageError, match="--freeze names no parameter") as refused:
        run(config, freeze="model.nothing.*")
    assert "model.embed_tokens.weight" in str(refused.value)


# -- the loop -----------------------------------------------------------------------------------------------------


def test_zeroed_gradients_stay(config):
    freed, zeroed = (run(config, zero_grad=choice) for choice in ("none", "zero"))
    gradients = sum(freed[0].storages[indices[-1]].num_bytes for indices in owned(freed[0], Role.GRADIENT).values())
    # The optimizer's state stays, also after the last step.
    assert gradients <= -stage(freed[1], "zero_grad").delta_bytes < 1.05 * gradients
    assert not any(row.name == "zero_grad" and row.delta_bytes for row in zeroed[1].stages)
    # They are made once and live on.
    counts = [{len(indices) for indices in owned(trace, Role.GRADIENT).values()} for trace, _ in (freed, zeroed)]
    assert counts == [{2}, {1}]
    assert zeroed[1].peak.allocated_bytes >= freed[1].peak.allocated_bytes
    assert "gradients zeroed, not freed" in " ".join(to_text(render(zeroed[1])).split())


def test_evaluation_leaves_nothing_behind(config):
    document = run(config, evaluate=True)[1]
    names = [row.name for row in document.stages if row.step == 2]
    begin = names.index("evaluation embedding")
    assert names[begin - 1] == "zero_grad"
    assert {"evaluation layer 0", "evaluation layer 2", "evaluation logits", "evaluation loss"} <= set(names)
    rows = [row for row in document.stages if row.step == 2 and row.name.startswith("evaluation")]
    assert sum(row.delta_bytes for row in rows) == 0
    # Without gradients a layer keeps nothing but its output, which replaces the one before.
    assert stage(document, "evaluation layer 1").delta_bytes == 0
    assert stage(document, "layer 1").delta_bytes > 0
    # And it makes the logits again.
    assert stage(document, "evaluation logits").delta_bytes == round_size(2 * 16 * 300 * 2)
    plain = run(config)[1]
    assert plain.peak.allocated_bytes == document.peak.allocated_bytes


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        ("adamw", {"exp_avg": 1, "exp_avg_sq": 1}),
        ("adam", {"exp_avg": 1, "exp_avg_sq": 1}),
        ("sgd", {}),
        ("sgd-momentum", {"momentum_buffer": 1}),
        ("adagrad", {"sum": 1}),
        ("rmsprop", {"square_avg": 1}),
        ("none", {}),
    ],
)
def test_optimizer_state(config, optimizer, state):
    trace, document = run(config, optimizer=optimizer)
    found = {
        name: sum(trace.storages[index].num_bytes for index in indices)
        for name, indices in owned(trace, Role.OPTIMIZER_STATE).items()
    }
    assert found == {name: copies * 2 * document.target.num_parameters for name, copies in state.items()}


def test_adafactor_factors_its_state(config):
    trace, document = run(config, optimizer="adafactor")
    total = sum(
        trace.storages[index].num_bytes for indices in owned(trace, Role.OPTIMIZER_STATE).values() for index in indices
    )
    assert 0 < total < 0.1 * 2 * document.target.num_parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 8}, "--lora-rank needs an adapter"),
        ({"lora_targets": "q_proj"}, "--lora-targets needs an adapter"),
        ({"lora_dropout": 0.1}, "--lora-dropout needs an adapter"),
        ({"adapter": "lora", "lora_rank": 0}, "--lora-rank must be at least 1"),
        ({"adapter": "lora", "lora_dropout": 1.0}, "--lora-dropout must be"),
        ({"adapter": "lora", "lora_targets": "q_proj,"}, "--lora-targets has an empty name"),
        ({"adapter": "lora", "freeze": "*"}, "freezes the whole model already"),
        ({"adapter": "dora"}, "unknown --adapter"),
        ({"zero_grad": "nil"}, "unknown --zero-grad"),
        ({"mode": Mode.INFERENCE, "evaluate": True}, "--evaluate is for training"),
        ({"mode": Mode.INFERENCE, "freeze": "*"}, "--freeze is for training"),
        ({"optimizer": "rmsprop", "optimizer_impl": "fused"}, "no fused implementation"),
        ({"optimizer": "adagrad", "optimizer_impl": "fused"}, "no fused implementation"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        TargetSpec(model="gpt2", **changes)


@pytest.mark.parametrize("model", ["olmo-2-1b", "vit-base"])
def test_what_peft_does_not_know_is_not_built_first(model, monkeypatch):
    spec = TargetSpec(model=model, adapter="lora", context_length=16)
    source, built = find_source(spec), []

    def build():
        built.append(model)
        return source.build()

    monkeypatch.setattr("memprof.flows.profile.find_source", lambda spec: dataclasses.replace(source, build=build))
    said = []
    for checked in (True, False):
        if not checked:
            monkeypatch.setattr("memprof.workload.adapters.check_targets", lambda spec, source: None)
        with pytest.raises(UsageError) as refused:
            flow.capture_trace(spec)
        said.append((str(refused.value), bool(built)))
    assert said == [(said[0][0], False), (said[0][0], True)]
