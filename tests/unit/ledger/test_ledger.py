"""The ledger on traces written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memprof.allocator import GpuMemory, replay_in_host_memory, replay_on_gpu
from memprof.ledger.categories import Category
from memprof.ledger.caught_errors import CaughtError, list_caught_errors
from memprof.ledger.ledger import Ledger, build_ledger, find_live_storages
from memprof.trace.events import (
    CPU,
    GPU,
    HOST,
    Event,
    EventKind,
    ModuleRole,
    Owner,
    PhaseKind,
    Role,
    Workspace,
)
from memprof.trace.json_values import to_plain

if TYPE_CHECKING:
    from tests.unit.traces import TraceBuilder

KIB = 1024
MIB = 1024 * KIB


def names(ledger: Ledger) -> list[str]:
    return [stage.name for stage in ledger.stages]


def categories(ledger: Ledger, *indices: int) -> list[Category]:
    return [ledger.categories[index] for index in indices]


def training_step(build: TraceBuilder, layers: int = 2) -> dict[str, int]:
    """A model with a stack of layers and a head: one whole step."""
    made: dict[str, int] = {}
    build.phase(PhaseKind.OTHER, 0)
    build.phase(PhaseKind.MODEL, 0)
    for path in ["embedding", *(f"layers.{i}" for i in range(layers)), "head"]:
        made[path] = build.alloc(8 * KIB, owner=(Role.PARAMETER, f"{path}.weight"))
    build.phase(PhaseKind.OTHER, 0)
    build.phase(PhaseKind.INPUTS, 1, 1)
    made["ids"] = build.alloc(512, "aten._to_copy")
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.enter("", role=ModuleRole.ROOT)
    build.enter("embedding", role=ModuleRole.EMBEDDING)
    made["states"] = build.alloc(2 * KIB, "aten.embedding")
    build.leave()
    for index in range(layers):
        build.enter(f"layers.{index}", role=ModuleRole.LAYER)
        made[f"temporary {index}"] = build.alloc(3 * KIB, "aten.mul")
        made[f"saved {index}"] = build.alloc(4 * KIB, "aten.mm")
        build.free(made[f"temporary {index}"])
        build.leave()
    build.enter("norm", role=ModuleRole.NORM)
    made["normed"] = build.alloc(2 * KIB, "aten.native_layer_norm")
    build.leave()
    build.enter("head", role=ModuleRole.HEAD)
    made["forward of the head"] = len(build.trace.events)
    made["logits"] = build.alloc(32 * KIB, "aten.mm")
    build.leave()
    made["log_softmax"] = build.alloc(32 * KIB, "aten._log_softmax")
    build.leave()
    build.phase(PhaseKind.OTHER, 0)
    build.phase(PhaseKind.BACKWARD, 1, 1)
    made["logits gradient"] = build.alloc(32 * KIB, "aten.mm", forward_event=made["forward of the head"])
    build.free(made["log_softmax"])
    made["gradient"] = build.alloc(8 * KIB, "aten.mm", owner=(Role.GRADIENT, "head.weight"))
    build.free(made["logits gradient"])
    build.phase(PhaseKind.OTHER, 0)
    build.free(made["logits"], made["ids"])
    build.phase(PhaseKind.OPTIMIZER_STEP, 1)
    made["exp_avg"] = build.alloc(8 * KIB, "aten.zeros_like", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    made["update"] = build.alloc(1 * KIB, "aten._foreach_sqrt")
    build.free(made["update"])
    build.phase(PhaseKind.ZERO_GRAD, 1)
    build.free(made["gradient"])
    return made


def test_stages_follow_the_model(build: TraceBuilder) -> None:
    training_step(build)
    ledger = build_ledger(build.trace)
    assert names(ledger) == [
        "parameters", "inputs", "embedding", "layer 0", "layer 1", "final norm", "logits", "loss", "backward",
        "optimizer step", "zero_grad",
    ]  # fmt: skip
    layer = ledger.stages[3]
    assert (layer.stack, layer.index, layer.step, layer.micro_batch) == ("layers", 0, 1, 1)
    assert layer.delta_bytes == 4 * KIB
    assert layer.peak_allocated_bytes == layer.allocated_bytes + 3 * KIB
    assert ledger.stages[0].allocated_bytes == 32 * KIB
    assert ledger.stages[0].delta_bytes == 32 * KIB


def test_what_a_return_frees_belongs_to_the_stage_before(build: TraceBuilder) -> None:
    training_step(build)
    ledger = build_ledger(build.trace)
    backward = next(stage for stage in ledger.stages if stage.name == "backward")
    assert backward.delta_bytes == (8 - 32 - 32) * KIB - 512


def test_deltas_chain(build: TraceBuilder) -> None:
    training_step(build)
    ledger = build_ledger(build.trace)
    total = 0
    for stage in ledger.stages:
        total += stage.delta_bytes
        assert stage.allocated_bytes == total <= stage.peak_allocated_bytes
    assert total == ledger.allocated[-1]


def test_categories(build: TraceBuilder) -> None:
    made = training_step(build)
    ledger = build_ledger(build.trace)
    expected = {
        "embedding": Category.PARAMETERS,
        "ids": Category.INPUTS,
        "states": Category.ACTIVATIONS,
        "temporary 0": Category.TEMPORARIES,
        "saved 0": Category.ACTIVATIONS,
        "logits": Category.LOGITS_AND_LOSS,
        "log_softmax": Category.LOGITS_AND_LOSS,
        "logits gradient": Category.LOGITS_AND_LOSS,
        "gradient": Category.GRADIENTS,
        "exp_avg": Category.OPTIMIZER_STATE,
        "update": Category.TEMPORARIES,
    }
    assert {name: ledger.categories[made[name]] for name in expected} == expected


@pytest.mark.parametrize(
    ("role", "category"),
    [
        (Role.PARAMETER, Category.PARAMETERS),
        (Role.BUFFER, Category.BUFFERS),
        (Role.GRADIENT, Category.GRADIENTS),
        (Role.OPTIMIZER_STATE, Category.OPTIMIZER_STATE),
        (Role.INPUT, Category.INPUTS),
        (Role.KV_CACHE, Category.KV_CACHE),
    ],
)
def test_an_owner_decides(build: TraceBuilder, role: Role, category: Category) -> None:
    build.phase(PhaseKind.BACKWARD, 1, 1)
    owned = build.alloc(KIB, owner=(role, "it"))
    assert categories(build_ledger(build.trace), owned) == [category]


def test_copies_of_weights_are_parameters(build: TraceBuilder) -> None:
    """A checkpoint, an average and MAML's fast weights; not a batch that has the shape of one weight."""
    build.phase(PhaseKind.MODEL, 0)
    for name in ("a", "b", "c"):
        build.alloc((ord(name) - 90) * KIB, owner=(Role.PARAMETER, name))
    sizes = [7 * KIB, 8 * KIB, 9 * KIB]
    loaded = [build.alloc(size, "torch.load", line="train.py:1 main") for size in sizes]
    batch = build.alloc(sizes[0], "aten.randn", line="train.py:3 main")
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.alloc(KIB)
    build.phase(PhaseKind.OTHER, 0)
    fast = [build.alloc(size, "aten.sub", line="train.py:4 main") for size in sizes]
    passing = [build.alloc(size, "aten.mul", line="train.py:4 main") for size in sizes]
    build.free(*passing)
    build.phase(PhaseKind.FORWARD, 1, 1)
    ledger = build_ledger(build.trace)
    assert set(categories(ledger, *loaded, *fast)) == {Category.PARAMETERS}
    assert categories(ledger, batch) == [Category.INPUTS]
    assert Category.PARAMETERS not in categories(ledger, *passing)


def test_what_is_made_between_steps_for_the_next(build: TraceBuilder) -> None:
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.alloc(KIB)
    build.phase(PhaseKind.OTHER, 1)
    target, kept = build.alloc(KIB, "aten._to_copy"), build.alloc(KIB, "aten.mul")
    for step in (2, 3):
        build.phase(PhaseKind.FORWARD, step, 1)
        build.phase(PhaseKind.OTHER, step)
        if step == 2:
            build.free(target)
    ledger = build_ledger(build.trace)
    assert categories(ledger, target, kept) == [Category.INPUTS, Category.UNATTRIBUTED]


def test_categories_without_an_owner(build: TraceBuilder) -> None:
    build.phase(PhaseKind.OTHER, 0)
    before = build.alloc(KIB)
    nowhere = build.alloc(KIB, line=None)
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.enter("", role=ModuleRole.ROOT)
    workspace = build.alloc(KIB, hidden=True)
    cache = build.alloc(KIB, line="transformers/cache_utils.py:9 update")
    build.leave()
    build.phase(PhaseKind.OTHER, 0)
    after = build.alloc(KIB)
    ledger = build_ledger(build.trace)
    assert categories(ledger, before, nowhere, workspace, cache, after) == [
        Category.INPUTS,
        Category.UNATTRIBUTED,
        Category.LIBRARY_WORKSPACE,
        Category.KV_CACHE,
        Category.UNATTRIBUTED,
    ]


def test_recomputed_activations(build: TraceBuilder) -> None:
    """A module that runs inside a backward pass leaves activations behind; what dies inside it is a temporary."""
    build.phase(PhaseKind.BACKWARD, 1, 1)
    build.enter("layers.0", role=ModuleRole.LAYER)
    temporary = build.alloc(KIB)
    kept = build.alloc(KIB)
    build.free(temporary)
    build.leave()
    build.free(kept)
    assert categories(build_ledger(build.trace), temporary, kept) == [Category.TEMPORARIES, Category.ACTIVATIONS]


def test_a_call_that_the_run_ended_in(build: TraceBuilder) -> None:
    """What it made is what the same line made in other layers, although the error let go of it."""
    build.phase(PhaseKind.FORWARD, 1, 1)
    made = []
    for layer in range(2):
        build.enter(f"layers.{layer}", role=ModuleRole.LAYER)
        made.append(build.alloc(KIB))
        if layer == 0:
            build.leave()
    refused = build.alloc(KIB)
    build.free(refused)
    build.free(made[1])
    build.leave()
    build.trace.ended_out_of_memory = True
    assert set(categories(build_ledger(build.trace), *made)) == {Category.ACTIVATIONS}


def test_peak_and_what_was_alive(build: TraceBuilder) -> None:
    made = training_step(build)
    ledger = build_ledger(build.trace)
    alive = [made[n] for n in made if n in {"embedding", "layers.0", "layers.1", "head", "ids", "states", "normed"}]
    alive += [made[n] for n in ("saved 0", "saved 1", "logits", "log_softmax", "logits gradient")]
    assert sorted(i for tensor in ledger.live for i in tensor.storages) == sorted(alive)
    assert ledger.peak_bytes == (32 + 2 + 8 + 2 + 96) * KIB + 512
    assert ledger.peak_stage.name == "backward"
    assert ledger.sum_by_category() == {
        Category.LOGITS_AND_LOSS: 96 * KIB,
        Category.PARAMETERS: 32 * KIB,
        Category.ACTIVATIONS: 12 * KIB,
        Category.INPUTS: 512,
    }


def test_equal_tensors_of_a_stack_are_one_line(build: TraceBuilder) -> None:
    training_step(build, layers=4)
    ledger = build_ledger(build.trace)
    (saved,) = [tensor for tensor in ledger.live if tensor.op == "aten.mm" and tensor.num_bytes == 4 * KIB]
    assert (saved.count, saved.module, saved.allocated_bytes) == (4, "layers.*", 16 * KIB)
    (weights,) = [tensor for tensor in ledger.live if tensor.name == "layers.*.weight"]
    assert weights.count == 4
    (embedding,) = [tensor for tensor in ledger.live if tensor.name == "embedding.weight"]
    assert embedding.count == 1


def test_a_single_layer_keeps_its_number(build: TraceBuilder) -> None:
    training_step(build, layers=1)
    ledger = build_ledger(build.trace)
    (saved,) = [tensor for tensor in ledger.live if tensor.op == "aten.mm" and tensor.num_bytes == 4 * KIB]
    assert (saved.count, saved.module) == (1, "layers.0")


def test_largest_first(build: TraceBuilder) -> None:
    training_step(build)
    sizes = [tensor.num_bytes for tensor in build_ledger(build.trace).live]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 2


def test_two_stacks_are_told_apart(build: TraceBuilder) -> None:
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.enter("", role=ModuleRole.ROOT)
    for stack in ("encoder.block", "decoder.block"):
        for index in range(2):
            build.enter(f"{stack}.{index}", role=ModuleRole.LAYER)
            build.alloc(KIB)
            build.leave()
    build.leave()
    found = names(build_ledger(build.trace))
    assert found == ["encoder layer 0", "encoder layer 1", "decoder layer 0", "decoder layer 1"]


def test_memory_between_layers_belongs_to_the_layer_before(build: TraceBuilder) -> None:
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.enter("", role=ModuleRole.ROOT)
    for index in range(2):
        build.enter(f"layers.{index}", role=ModuleRole.LAYER)
        build.alloc(KIB)
        build.leave()
        build.alloc(2 * KIB) if index == 0 else None
    build.leave()
    ledger = build_ledger(build.trace)
    assert [(s.name, s.delta_bytes) for s in ledger.stages] == [("layer 0", 3 * KIB), ("layer 1", KIB)]


def test_a_model_without_a_stack_is_shown_by_its_children(build: TraceBuilder) -> None:
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.enter("", role=ModuleRole.ROOT)
    for child in ("conv", "pool"):
        build.enter(child, role=ModuleRole.CHILD)
        build.alloc(KIB)
        build.leave()
    build.leave()
    assert names(build_ledger(build.trace)) == ["conv Module", "pool Module"]


def test_nested_layers_count_once(build: TraceBuilder) -> None:
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.enter("layers.0", role=ModuleRole.LAYER)
    build.enter("layers.0.inner.0", role=ModuleRole.LAYER)
    build.alloc(KIB)
    build.leave()
    build.alloc(KIB)
    build.leave()
    ledger = build_ledger(build.trace)
    assert [stage.delta_bytes for stage in ledger.stages] == [2 * KIB]


def test_rounding_and_requested_bytes(build: TraceBuilder) -> None:
    build.phase(PhaseKind.OTHER, 0)
    build.alloc(513)
    build.alloc(1)
    ledger = build_ledger(build.trace)
    assert ledger.peak_bytes == 1024 + 512
    assert ledger.stages[-1].requested_bytes == 514
    assert sum(row.allocated_bytes for row in ledger.rows) == 1536


def test_host_memory_is_counted_apart(build: TraceBuilder) -> None:
    build.phase(PhaseKind.OTHER, 0)
    host = build.alloc(5000, device=HOST)
    build.alloc(512)
    build.free(host)
    build.alloc(100, device=HOST)
    ledger = build_ledger(build.trace)
    assert (ledger.peak_bytes, ledger.host_peak_bytes) == (512, 5000)
    assert [i for tensor in ledger.live for i in tensor.storages] == [1]


def test_host_memory_by_stage(build):
    build.phase(PhaseKind.MODEL, 0)
    weight = build.alloc(3000, device="cpu")
    build.alloc(1024)
    build.free(weight)
    build.phase(PhaseKind.INPUTS, 1, 1)
    build.alloc(100, device="cpu")
    build.alloc(512)
    temporary = build.alloc(700, device="cpu")
    build.free(temporary)
    ledger = build_ledger(build.trace)
    assert [(stage.host_allocated_bytes, stage.peak_host_bytes) for stage in ledger.stages] == [(0, 3000), (100, 800)]
    assert ledger.host_peak_bytes == 3000 and ledger.host[ledger.peak_event] == 100
    assert ledger.peak_bytes == 1536


def test_the_last_of_equal_peaks(build: TraceBuilder) -> None:
    build.phase(PhaseKind.OTHER, 0)
    first = build.alloc(KIB)
    build.free(first)
    build.alloc(KIB, "aten.ones")
    ledger = build_ledger(build.trace)
    assert ledger.peak_event == 3 and [tensor.op for tensor in ledger.live] == ["aten.ones"]


def test_out_of_memory(build: TraceBuilder) -> None:
    """A GPU of 100 MiB with a context of 20: the third tensor of 30 MiB is refused, at the driver's granularity."""
    build.phase(PhaseKind.MODEL, 0)
    weight = build.alloc(30 * MIB)
    build.phase(PhaseKind.FORWARD, 1, 1)
    first = build.alloc(30 * MIB + 7)
    last = build.alloc(30 * MIB + 7, "aten.last")
    build.free(last)
    build.free(first)
    trace = build.trace
    assert build_ledger(trace).out_of_memory is None
    fits = build_ledger(trace, replay_on_gpu(trace, GpuMemory(114 * MIB, 20 * MIB)))
    assert fits.out_of_memory is None and fits.run.retries == 0
    ledger = build_ledger(trace, replay_on_gpu(trace, GpuMemory(113 * MIB, 20 * MIB)))
    found = ledger.out_of_memory
    assert found is not None
    assert found.storage == last and found.stage.step == 1 and trace.events[found.event].ref == last
    assert (found.tried_bytes, found.limit_bytes) == (32 * MIB, 93 * MIB)
    assert (found.in_use_bytes, found.reserved_bytes, found.free_bytes) == (60 * MIB + 512, 62 * MIB, 31 * MIB)
    assert "this process has 82.00 MiB memory in use" in found.message
    assert ledger.run.required_reserved_bytes == ledger.peak_reserved_bytes == 94 * MIB
    assert ledger.peak_bytes == 90 * MIB + 2 * 512  # rests of more than 1 MiB are split off
    early = build_ledger(trace, replay_on_gpu(trace, GpuMemory(49 * MIB, 20 * MIB))).out_of_memory
    assert early is not None and early.storage == weight and early.stage.name == "parameters"


def test_unsplit_rests_are_a_line_of_their_own(build: TraceBuilder) -> None:
    build.phase(PhaseKind.OTHER, 0)
    build.alloc(45 * MIB + 7)  # a segment of 46 MiB, of which 1,048,064 bytes are too few to split off
    ledger = build_ledger(build.trace)
    assert ledger.peak_bytes == 46 * MIB == ledger.peak_reserved_bytes
    assert ledger.sum_by_category()[Category.FRAGMENTATION] == 1_048_064
    assert ledger.stages[0].allocated_bytes == 46 * MIB and ledger.stages[0].requested_bytes == 45 * MIB + 7


def test_reserved_outlives_what_is_freed_until_the_cache_is_emptied(build: TraceBuilder) -> None:
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.free(build.alloc(30 * MIB))
    build.phase(PhaseKind.OPTIMIZER_STEP, 1)
    build.trace.events.append(Event(EventKind.EMPTY_CACHE, 0))
    build.free(build.alloc(KIB))
    stages = build_ledger(build.trace).stages
    assert [(stage.reserved_bytes, stage.peak_reserved_bytes) for stage in stages] == [
        (30 * MIB, 30 * MIB),
        (2 * MIB, 30 * MIB),
    ]


def test_no_allocation_at_all(build: TraceBuilder) -> None:
    build.phase(PhaseKind.OTHER, 0)
    build.alloc(KIB, device=HOST)
    with pytest.raises(ValueError, match="no allocation"):
        build_ledger(build.trace)


def test_a_failed_allocation_is_not_the_peak(build: TraceBuilder) -> None:
    """As much is allocated at a request that fails, at a free in host memory and at a return."""
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.enter("layers.0", role=ModuleRole.LAYER)
    kept = build.alloc(KIB, "aten.mm")
    peak_event = len(build.trace.events) - 1
    failed = build.alloc(90 * MIB)
    build.free(failed)
    build.trace.refused.append(failed)
    build.alloc(KIB, device=HOST)
    build.alloc(KIB, device="cuda:1")
    build.leave()
    ledger = build_ledger(build.trace, replay_on_gpu(build.trace, GpuMemory(80 * MIB, 0)))
    assert (ledger.peak_event, ledger.peak_bytes, ledger.peak_stage.name) == (peak_event, KIB, "layer 0")
    assert [tensor.storages for tensor in ledger.live] == [(kept,)]
    assert find_live_storages(build.trace, peak_event + 1, frozenset()) == [kept, failed]
    assert find_live_storages(build.trace, peak_event + 1, frozenset({failed})) == [kept]
    assert find_live_storages(build.trace, peak_event - 1, frozenset()) == []


def test_a_stage_begins_with_its_first_event(build: TraceBuilder) -> None:
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.enter("", role=ModuleRole.ROOT)
    build.alloc(KIB)
    build.leave()
    build.alloc(KIB)
    ledger = build_ledger(build.trace)
    assert (ledger.peak_stage.name, ledger.span_at(2).name) == ("output", "own code")
    assert (ledger.span_at(3).name, ledger.span_at(4).name) == ("own code", "output")
    assert [(stage.delta_bytes, stage.requested_delta_bytes) for stage in ledger.stages] == [(KIB, KIB), (KIB, KIB)]


def test_errors_that_the_program_caught(build: TraceBuilder) -> None:
    """Those of a library's workspace are none of its errors."""
    build.phase(PhaseKind.FORWARD, 2, 1)
    build.enter("layers.0", role=ModuleRole.LAYER)
    build.alloc(30 * MIB)
    workspace, failed = build.alloc(80 * MIB), build.new(10, 1024, 1024, line="model.py:3 forward")
    build.trace.workspaces.append(Workspace(len(build.trace.events) - 2, GPU, 80 * MIB, 80 * MIB))
    failed_event = len(build.trace.events) - 1
    build.free(workspace, failed)
    build.leave()
    build.trace.refused += [workspace, failed]
    ledger = build_ledger(build.trace, replay_on_gpu(build.trace, GpuMemory(64 * MIB, 0)))
    caught = list_caught_errors(ledger)
    assert caught == [
        CaughtError(
            stage="layer 0",
            step=2,
            num_bytes=40 * MIB,
            shape=(10, 1024, 1024),
            dtype="float32",
            op="aten.mm",
            module="layers.0",
            source="model.py:3 forward",
            in_use_bytes=30 * MIB,
            event=failed_event,
        )
    ]
    assert to_plain(caught)[0].keys() & {"bytes", "num_bytes", "event"} == {"bytes"}


def test_what_is_said_of_a_live_tensor(build: TraceBuilder) -> None:
    build.phase(PhaseKind.MODEL, 0)
    build.new(100, 3, dtype="bfloat16", op="aten.ones", line="model.py:7 build", owner=(Role.BUFFER, "blocks.3.mask"))
    build.phase(PhaseKind.BACKWARD, 1, 1)
    build.enter("blocks.3")
    build.new(9, line=None)
    build.leave()
    mask, other = build_ledger(build.trace).live
    assert (mask.num_bytes, mask.count, mask.allocated_bytes, mask.shape) == (600, 1, 1024, (100, 3))
    assert (mask.dtype, mask.category, mask.op, mask.source) == ("bfloat16", "buffers", "aten.ones", "model.py:7 build")
    assert (mask.module, mask.name, mask.phase, mask.storages) == (None, "blocks.3.mask", "model", (0,))
    assert (other.module, other.name, other.phase, other.source) == ("blocks.3", None, "backward", None)
    build.trace.owners[0] = Owner(Role.BUFFER, "")
    assert build_ledger(build.trace).live[0].name is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "int32"},
        {"shape": (16, 8)},
        {"op": 1},
        {"source": 1},
        {"num_bytes": 1024},
        {"phase": 1},
        {"module": 1},
        {"hidden": True},  # a library has it
    ],
)
def test_tensors_are_alike_in_all_that_is_said_of_them(build: TraceBuilder, changes: dict[str, object]) -> None:
    build.phase(PhaseKind.FORWARD, 1, 1)
    for number in range(2):
        build.enter(f"net{number}")
        build.leave()
    build.trace.ops += ["aten.mm", "aten.add"]
    build.trace.sources += ["a.py:1 f", "a.py:2 f"]
    first, second = (build.new(8, 16, module=0, line="a.py:1 f") for _ in range(2))
    build.phase(PhaseKind.DECODE, 1, 1)
    build.trace.storages[second] = build.trace.storages[first]._replace(**changes)
    groups = [(tensor.count, tensor.storages) for tensor in build_ledger(build.trace).live]
    assert groups in ([(2, (first, second))], [(1, (first,)), (1, (second,))], [(1, (second,)), (1, (first,))])
    assert (len(groups) == 1) == (not changes)


def test_of_equal_tensors_the_larger_group_comes_first(build: TraceBuilder) -> None:
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.alloc(KIB, "aten.one")
    for _ in range(2):
        build.alloc(KIB, "aten.two")
    build.alloc(2 * KIB, "aten.large")
    assert [tensor.op for tensor in build_ledger(build.trace).live] == ["aten.large", "aten.two", "aten.one"]


def test_rows_are_the_categories_of_a_module_in_a_phase(build: TraceBuilder) -> None:
    build.phase(PhaseKind.MODEL, 0)
    for number in range(2):
        build.alloc(KIB, owner=(Role.PARAMETER, f"{number}.weight"))
        build.alloc(513, owner=(Role.PARAMETER, f"{number}.bias"))
    build.phase(PhaseKind.FORWARD, 1, 1)
    build.enter("net")
    build.alloc(45 * MIB + 7)
    build.leave()
    rows = [(row.category, row.module, row.phase, row.allocated_bytes) for row in build_ledger(build.trace).rows]
    assert rows == [
        ("activations", "net", "forward", 45 * MIB + 512),
        ("fragmentation", "", "", 1_048_064),
        ("parameters", "", "model", 4096),
    ]


def test_nothing_is_rounded_in_host_memory(build: TraceBuilder) -> None:
    build.phase(PhaseKind.MODEL, 0)
    build.alloc(700, device=CPU)
    build.alloc(1, device=CPU)
    build.trace.device = CPU
    ledger = build_ledger(build.trace, replay_in_host_memory(build.trace))
    assert [tensor.allocated_bytes for tensor in ledger.live] == [700, 1] and ledger.peak_bytes == 701
    assert ledger.host_peak_bytes == 0 and ledger.peak_reserved_bytes == 701
