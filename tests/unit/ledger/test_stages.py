"""Stages of hand-written forwards: where each begins and ends, and its name."""

from __future__ import annotations

import pytest

from memprof.ledger.stages import find_vocabulary_size, format_stage, list_spans
from memprof.trace.events import EventKind, Forward, ModuleRole, PhaseKind, Role
from tests.unit.ledger.forwards import MODULES, VOCABULARY, WIDTH, run_forward
from tests.unit.traces import TraceBuilder


def describe(b: TraceBuilder, kinds: tuple[PhaseKind, ...] = (PhaseKind.FORWARD, PhaseKind.EVALUATION)) -> list[str]:
    """Return each stage as its name and what it allocates and frees, such as "layer 0: 4x64 -"."""
    stages = []
    for span in list_spans(b.trace):
        if span.kind not in kinds:
            continue
        moves = [
            event for event in b.trace.events[span.begin : span.end] if event.kind in (EventKind.ALLOC, EventKind.FREE)
        ]
        words = (
            "x".join(map(str, b.trace.storages[ref].shape)) if kind is EventKind.ALLOC else "-" for kind, ref in moves
        )
        stages.append(f"{span.name}: {' '.join(words)}")
    return stages


def stages_of(code: str, kind: PhaseKind = PhaseKind.FORWARD, step: int = 1, *, trains: bool = True) -> list[str]:
    b = TraceBuilder()
    b.parameter("embedding.weight", VOCABULARY, WIDTH)
    b.phase(kind, step)
    run_forward(b, code)
    if trains:
        b.phase(PhaseKind.BACKWARD, step)
        b.new(1)
    return describe(b)


FORWARDS = [
        # A head in the model's own code, known by the rows of the embedding.
        ("root( embedding( 4x64 ) layer0( 4x64 ) layer1( 4x64 ) norm( 4x64 ) 4x1000 ) 4x1000",
         ["embedding: 4x64", "layer 0: 4x64", "layer 1: 4x64", "final norm: 4x64", "logits: 4x1000", "loss: 4x1000"]),
        ("root( embedding( 4x64 ) layer0( 4x64 ) 4x1000 ) 4x1000",
         ["embedding: 4x64", "layer 0: 4x64", "logits: 4x1000", "loss: 4x1000"]),
        ("root( embedding( 4x64 ) layer0( 4x64 ) 4x999 ) 4x1",
         ["embedding: 4x64", "layer 0: 4x64", "own code: 4x999", "loss: 4x1"]),
        ("root( embedding( 4x64 ) layer0( 4x64 ) 1000 ) 4x1",  # a vector: no logits
         ["embedding: 4x64", "layer 0: 4x64", "own code: 1000", "loss: 4x1"]),
        ("root( embedding( 4x64 ) layer0( 4x64 ) norm( 4x64 ) 4x999 ) 4x1",
         ["embedding: 4x64", "layer 0: 4x64", "final norm: 4x64", "own code: 4x999", "loss: 4x1"]),
        ("root( embedding( 4x64 ) layer0( 4x64 ) norm( 4x64 ) - ) 4x1",
         ["embedding: 4x64", "layer 0: 4x64", "final norm: 4x64 -", "loss: 4x1"]),
        ("root( embedding( 4x64 ) layer0( norm( 4x64 ) 4x32 ) 4x1000 ) 4x1",  # the norm is the layer's
         ["embedding: 4x64", "layer 0: 4x64 4x32", "logits: 4x1000", "loss: 4x1"]),
        ("root( embedding( 4x64 ) layer0( 4x64 4x63 ) - ) 4x1",
         ["embedding: 4x64", "layer 0: 4x64 4x63 -", "loss: 4x1"]),
        # A module for the head.
        ("root( embedding( 4x64 ) layer0( 4x64 ) norm( 4x64 ) 4x8 head( 4x1000 ) 4x9 ) 4x1",
         ["embedding: 4x64", "layer 0: 4x64", "final norm: 4x64 4x8", "logits: 4x1000", "loss: 4x9 4x1"]),
        ("root( embedding( 4x64 ) layer0( 4x64 ) 4x8 head( 4x1000 ) ) 4x1",
         ["embedding: 4x64", "layer 0: 4x64", "before the head: 4x8", "logits: 4x1000", "loss: 4x1"]),
        ("root( 4x64 layer0( 4x64 ) head( 4x1000 ) )", ["embedding: 4x64", "layer 0: 4x64", "logits: 4x1000"]),
        # Between two layers the code belongs to the first; a layer may consist of several modules.
        ("root( embedding( 4x64 ) layer0( 4x64 ) 4x7 layer1( 4x64 ) head( 4x9 ) )",
         ["embedding: 4x64", "layer 0: 4x64 4x7", "layer 1: 4x64", "logits: 4x9"]),
        ("root( layer0( 4x64 ) 4x7 layer0.mlp( 4x8 ) layer1( 4x9 ) )", ["layer 0: 4x64 4x7 4x8", "layer 1: 4x9"]),
        ("root( embedding( 4x64 ) layer0( 4x63 ) 4x7 layer0.mlp( 4x8 ) layer1( 4x9 ) )",
         ["embedding: 4x64", "layer 0: 4x63 4x7 4x8", "layer 1: 4x9"]),
        ("root( layer0( part( 4x64 ) 4x7 ) )", ["layer 0: 4x64 4x7"]),
        ("root( layer0( 4x64 layer0.mlp( 4x8 ) 4x9 ) )", ["layer 0: 4x64 4x8 4x9"]),
        # Two stacks: one after the other, with an embedding of its own, or in turns, as attention and MLPs of a loop.
        ("root( embedding( 4x64 ) encoder0( 4x64 ) encoder1( 4x64 ) embedding( 4x32 ) 4x30 decoder0( 4x64 ) )",
         ["embedding: 4x64", "encoder layer 0: 4x64", "encoder layer 1: 4x64", "decoder embedding: 4x32 4x30",
          "decoder layer 0: 4x64"]),
        ("root( embedding( 4x64 ) encoder0( 4x8 ) 4x7 decoder0( 4x6 ) 4x5 encoder1( 4x4 ) 4x3 decoder1( 4x2 ) )",
         ["embedding: 4x64", "encoder layer 0: 4x8 4x7", "decoder layer 0: 4x6 4x5", "encoder layer 1: 4x4 4x3",
          "decoder layer 1: 4x2"]),
        # A model that reads no tokens.
        ("root( 4x64 layer0( 4x64 ) 4x1000 ) 4x1",
         ["own code: 4x64", "layer 0: 4x64", "own code: 4x1000", "loss: 4x1"]),
        # ... and one without layers: its children, and its own code between them, whose frees are the child's.
        ("root( 4x3 conv( 4x8 ) 4x7 pool( 4x6 ) 4x5 ) 4x1",
         ["own code: 4x3", "conv Conv: 4x8", "own code: 4x7", "pool Pool: 4x6", "own code: 4x5", "loss: 4x1"]),
        ("root( conv( 4x8 ) - pool( 4x6 ) - ) 4x1", ["conv Conv: 4x8 -", "pool Pool: 4x6 -", "loss: 4x1"]),
        ("root( conv( 4x8 ) ) -", ["conv Conv: 4x8", "loss: -"]),
        ("root( embedding( 4x64 ) conv( 4x8 ) )", ["own code: 4x64", "conv Conv: 4x8"]),
        ("root( conv( 4x8 ) 4x7 - pool( 4x6 ) )", ["conv Conv: 4x8", "own code: 4x7 -", "pool Pool: 4x6"]),
        ("root( conv( pool( 4x8 ) 4x7 ) )", ["conv Conv: 4x8 4x7"]),
        ("root( conv( 4x8 ) conv( 4x7 ) )", ["conv Conv: 4x8", "conv Conv: 4x7"]),  # called twice: no list
        # A list of modules of several classes, called in a loop of the model, is one stage.
        ("+blocks root( conv( 4x8 ) blocks0( 4x7 ) 4x6 blocks1( 4x5 ) 4x3 pool( 4x4 ) )",
         ["conv Conv: 4x8", "blocks ModuleList: 4x7 4x6 4x5", "own code: 4x3", "pool Pool: 4x4"]),
        ("root( blocks0( 4x7 ) blocks1( 4x5 ) )", ["blocks Block0: 4x7", "blocks Block1: 4x5"]),  # no list
        # Code without a module is what a loss is computed from.
        ("4x64", ["loss: 4x64"]),
        ("layer0( 4x64 ) 4x1", ["layer 0: 4x64", "own code: 4x1"]),
    ]  # fmt: skip


def test_stages_of_a_forward() -> None:
    for code, stages in FORWARDS:
        assert stages_of(code) == stages


def test_stages_begin_and_end_at_events() -> None:
    """A module's stage ends behind its return; the code between two belongs to one of them."""
    b = TraceBuilder(None)
    b.phase(PhaseKind.FORWARD)  # 0; the layer is called at 5, and returns at 7
    run_forward(b, "root( embedding( 4x64 ) layer0( 4x63 ) norm( 4x62 ) 4x61 ) 4x1")
    spans = [(span.name, span.begin, span.end) for span in list_spans(b.trace)]
    assert spans == [
        ("embedding", 0, 5), ("layer 0", 5, 8), ("final norm", 8, 11), ("own code", 11, 13), ("output", 13, 14),
    ]  # fmt: skip


def test_inference_ends_in_the_output() -> None:
    code = "root( embedding( 4x64 ) layer0( 4x64 ) norm( 4x64 ) head( 4x1000 ) ) 4x1"
    names = ["embedding: 4x64", "layer 0: 4x64", "final norm: 4x64", "logits: 4x1000"]
    assert stages_of(code, step=0, trains=False) == [*names, "output: 4x1"]
    assert stages_of(code, step=0) == [*names, "output: 4x1"]  # outside steps, whatever else trains
    assert stages_of(code, step=1, trains=False) == [*names, "output: 4x1"]
    evaluation = [f"evaluation {name}" for name in names]
    assert stages_of(code, PhaseKind.EVALUATION, 0) == [*evaluation, "evaluation loss: 4x1"]
    assert stages_of(code, PhaseKind.EVALUATION, 0, trains=False) == [*evaluation, "evaluation output: 4x1"]


def test_a_trace_that_trains_without_a_backward_has_a_loss() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.trace.phases[0] = b.trace.phases[0]._replace(step=1)
    run_forward(b, "root( conv( 4x8 ) ) 4x1")
    assert describe(b) == ["conv Conv: 4x8", "output: 4x1"]
    b.trace.trains = True
    assert describe(b) == ["conv Conv: 4x8", "loss: 4x1"]


@pytest.mark.parametrize(
    ("code", "stages"),
    [
        ("+root +layer0 root( 4x64@layer0 4x63@part ) 4x1", ["forward: 4x64 4x63", "loss: 4x1"]),
        ("+root +layer0 +part root( 4x63@part ) 4x1", ["forward: 4x63", "loss: 4x1"]),  # a descendant of a layer
        ("+head root( 4x64@head ) 4x1", ["forward: 4x64", "loss: 4x1"]),
        ("+conv root( 4x64@conv ) 4x1", ["forward: 4x64", "loss: 4x1"]),
        ("+layer0 root( 4x64 ) 4x1", ["own code: 4x64", "loss: 4x1"]),  # no part of it allocates
        ("+norm root( 4x64@norm ) 4x1", ["own code: 4x64", "loss: 4x1"]),
        ("+root +layer0 +norm root( 4x64@norm ) 4x1", ["own code: 4x64", "loss: 4x1"]),  # is not below the layer
        ("+conv root( part( 4x64@conv ) ) 4x1", ["forward: 4x64", "loss: 4x1"]),
        ("+root +layer0 +part root( part( ) 4x64@layer0 ) 4x1", ["own code: 4x64", "loss: 4x1"]),  # one is called
    ],
)
def test_a_compiled_model_calls_no_part(code: str, stages: list[str]) -> None:
    assert stages_of(code) == stages


@pytest.mark.parametrize(
    ("first", "second", "kind", "stages"),
    [
        # An encoder and a decoder, with code of the program between them.
        ("root( conv( 4x8 ) ) 4x7", "other( pool( 4x6 ) ) 4x5", PhaseKind.FORWARD,
         ["conv Conv: 4x8", "own code: 4x7", "pool Pool: 4x6", "loss: 4x5"]),
        ("root( conv( 4x8 ) ) 4x7", "root( conv( 4x6 ) ) 4x5", PhaseKind.FORWARD,
         ["conv Conv: 4x8", "own code: 4x7", "conv Conv: 4x6", "loss: 4x5"]),
        ("root( conv( 4x8 ) head( 4x9 ) ) 4x7", "other( pool( 4x6 ) ) 4x5", PhaseKind.FORWARD,
         ["conv Conv: 4x8", "logits: 4x9", "loss: 4x7", "pool Pool: 4x6", "loss: 4x5"]),
        # The same model's next batch.
        ("root( conv( 4x8 ) ) 4x7", "root( conv( 4x6 ) ) 4x5", PhaseKind.EVALUATION,
         ["evaluation conv Conv: 4x8", "evaluation loss: 4x7", "evaluation conv Conv: 4x6", "evaluation loss: 4x5"]),
        ("root( conv( 4x8 ) ) 4x7", "other( pool( 4x6 ) ) 4x5", PhaseKind.EVALUATION,
         ["evaluation conv Conv: 4x8", "evaluation own code: 4x7", "evaluation pool Pool: 4x6",
          "evaluation loss: 4x5"]),
    ],
)  # fmt: skip
def test_a_forward_of_several_models(first: str, second: str, kind: PhaseKind, stages: list[str]) -> None:
    for micro_batch in (1, 2):  # of another batch nothing is continued
        b = TraceBuilder()
        b.phase(kind)
        run_forward(b, first)
        b.phase(kind, 1, micro_batch)
        run_forward(b, second)
        b.phase(PhaseKind.BACKWARD)
        b.new(1)
        expected = stages if micro_batch == 1 else [stage.replace("own code: 4x7", "loss: 4x7") for stage in stages]
        assert describe(b) == expected


def test_each_models_first_code_is_named_by_what_it_reads() -> None:
    """A model of tokens before one of images: whether a model reads tokens is asked of its own modules."""
    b = TraceBuilder()
    b.trace.modules += [MODULES[name] for name in ("root", "embedding", "layer0", "other", "encoder0")]
    b.phase(PhaseKind.FORWARD)
    run_forward(b, "root( 4x64 layer0( 4x63 ) )")
    b.phase(PhaseKind.FORWARD)
    run_forward(b, "other( 4x62 encoder0( 4x61 ) )")
    assert describe(b) == ["embedding: 4x64", "layers layer 0: 4x63", "own code: 4x62", "net layer 0: 4x61"]


@pytest.mark.parametrize(
    ("stacks", "names"),
    [
        (["layers"], ["layer 0"]),
        (["net.encoder", "net.decoder"], ["encoder layer 0", "decoder layer 0"]),
        # A part that some of the others have tells it apart from the rest.
        (["a.blocks", "a.layers", "b.layers"], ["a layer 0", "a layer 0", "b layer 0"]),
        (["towers.0.blocks", "towers.1.blocks"], ["towers.0.blocks layer 0", "towers.1.blocks layer 0"]),
    ],
)
def test_stacks_are_told_apart_by_a_part_of_their_path(stacks: list[str], names: list[str]) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    for stack in stacks:
        b.enter(f"{stack}.0", role=ModuleRole.LAYER)
        b.new(1)
        b.leave()
    assert [span.name for span in list_spans(b.trace)] == names


def test_stages_of_the_other_phases() -> None:
    b = TraceBuilder(None)
    for number, kind in enumerate(PhaseKind):
        b.phase(kind, number, 2)
        b.new(number + 1)
    spans = list_spans(b.trace)
    assert [(span.name, span.kind, span.step, span.micro_batch) for span in spans] == [
        ("parameters", PhaseKind.MODEL, 0, 2),
        ("optimizer", PhaseKind.OPTIMIZER, 1, 2),
        ("inputs", PhaseKind.INPUTS, 2, 2),
        ("loss", PhaseKind.FORWARD, 3, 2),
        ("decode", PhaseKind.DECODE, 4, 2),
        ("backward", PhaseKind.BACKWARD, 5, 2),
        ("optimizer step", PhaseKind.OPTIMIZER_STEP, 6, 2),
        ("zero_grad", PhaseKind.ZERO_GRAD, 7, 2),
        ("evaluation loss", PhaseKind.EVALUATION, 8, 2),
        ("checkpoint", PhaseKind.CHECKPOINT, 9, 2),
        ("other", PhaseKind.OTHER, 10, 2),
    ]


def test_what_joins_the_stage_before() -> None:
    b = TraceBuilder(PhaseKind.OTHER)  # frees nothing and is no stage
    b.phase(PhaseKind.MODEL, 0)
    weight = b.new(1)
    b.phase(PhaseKind.OTHER, 0)
    b.phase(PhaseKind.MODEL, 0)  # the model moves to the GPU
    b.new(2)
    b.phase(PhaseKind.MODEL, 1)  # another one, within a step
    b.new(3)
    b.phase(PhaseKind.OPTIMIZER, 1)
    b.new(5)
    b.phase(PhaseKind.MODEL, 1)
    b.new(6)
    b.phase(PhaseKind.OTHER, 1)
    b.free(weight)  # at a return
    b.phase(PhaseKind.OTHER, 1)
    b.new(4)
    names = [(span.name, span.step, span.begin, span.end) for span in list_spans(b.trace)]
    assert names == [
        ("parameters", 0, 1, 6), ("parameters", 1, 6, 8), ("optimizer", 1, 8, 10), ("parameters", 1, 10, 14),
        ("other", 1, 14, 16),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "step", "micro_batch", "text"),
    [
        ("loss", 0, 0, "loss"),
        ("loss", 1, 1, "loss of step 1"),
        ("loss", 2, 2, "loss of step 2, micro-batch 2"),
        ("loss", 0, 3, "loss, micro-batch 3"),
    ],
)
def test_format_stage(name: str, step: int, micro_batch: int, text: str) -> None:
    assert format_stage(name, step, micro_batch) == text
    if not micro_batch:
        assert format_stage(name, step) == text


# -- a model without a module for its head -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "op", "stages"),
    [
        *(
            ("other( 4x1000 ) 4x1", f"aten.{op}", ["logits: 4x1000", "loss: 4x1"])
            for op in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
        ),
        ("other( 4x1000 ) 4x1", "aten.mul", ["loss: 4x1000 4x1"]),
        ("other( 4x999 ) 4x1", "aten.mm", ["loss: 4x999 4x1"]),  # no column for each token
        ("other( 1000 ) 4x1", "aten.mm", ["loss: 1000 4x1"]),
        ("other( conv( 4x8 ) 4x1000 ) 4x1", "aten.mm", ["conv Conv: 4x8", "loss: 4x1000 4x1"]),  # a model
    ],
)
def test_a_head_that_the_program_calls(code: str, op: str, stages: list[str]) -> None:
    """A root module without children whose product has one column per token: a loop over chunks calls it."""
    b = TraceBuilder()
    b.parameter("embedding.weight", VOCABULARY, WIDTH)
    b.phase(PhaseKind.FORWARD)
    run_forward(b, f"root( embedding( 4x64 ) layer0( 4x63 ) ) {code}")
    b.phase(PhaseKind.BACKWARD)
    b.new(1)
    b.trace.ops[b.trace.ops.index("aten.mm")] = op
    assert describe(b) == ["embedding: 4x64", "layer 0: 4x63", *stages]


def vocabulary_of(
    *, rows: int | None = None, losses: tuple[tuple[int, ...], ...] = (), head: bool = False
) -> int | None:
    b = TraceBuilder()
    if rows is not None:
        b.enter("embedding", "Embedding", ModuleRole.EMBEDDING)
        b.parameter("embedding.weight", rows, 64)
        b.leave()
    if head:
        b.enter("head", "Linear", ModuleRole.HEAD)
        b.leave()
    # One weight with 256 input features; a buffer and a gradient are none.
    b.parameter("up.weight", 8, 256)
    b.new(8, 256, owner=(Role.BUFFER, "table"))
    b.new(8, 256, owner=(Role.GRADIENT, "down.weight"))
    for shape in losses:
        b.new(*shape, op="aten._log_softmax")
    b.new(64, 77, op="aten.mm")
    return find_vocabulary_size(b.trace)


def test_the_vocabulary_is_the_rows_of_the_embedding_or_the_classes_of_the_last_loss() -> None:
    assert vocabulary_of(rows=1000) == vocabulary_of(rows=1000, losses=((64, 10),)) == 1000
    assert vocabulary_of(losses=((64, 10), (64, 20))) == 20
    assert vocabulary_of(losses=((64, 10), (64, 256))) == 256
    assert vocabulary_of(losses=((2, 64, 10),)) is None  # over pixels, or positions
    assert vocabulary_of() is None
    assert vocabulary_of(rows=1000, losses=((64, 10),), head=True) is None


def call(b: TraceBuilder, step: int, line: int, *, training: bool) -> None:
    """Call the model with gradients, and record the call."""
    b.phase(PhaseKind.FORWARD, step)
    begin = len(b.trace.events)
    run_forward(b, "root( conv( 4x8 ) )")
    b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, line, training, 1, ()))


@pytest.mark.parametrize(
    ("training", "line", "then", "is_evaluation"),
    [
        (False, 2, None, True),
        (False, 2, PhaseKind.OPTIMIZER_STEP, True),  # of another model
        (True, 2, None, False),
        (False, 1, None, False),  # where it is trained: the backward may still come
        (False, 2, PhaseKind.BACKWARD, False),
    ],
)
def test_an_evaluation_with_gradients(training: bool, line: int, then: PhaseKind | None, is_evaluation: bool) -> None:
    b = TraceBuilder()
    call(b, 1, 1, training=True)
    b.phase(PhaseKind.BACKWARD, 1)
    b.new(1)
    call(b, 2, line, training=training)
    if then is not None:
        b.phase(then, 2)
        b.new(1)
    call(b, 2, 1, training=True)
    b.phase(PhaseKind.BACKWARD, 2)
    conv = [(span.name, span.step) for span in list_spans(b.trace) if "conv" in span.name]
    other = ("evaluation conv Conv", 0) if is_evaluation else ("conv Conv", 2)
    assert conv == [("conv Conv", 1), other, ("conv Conv", 2)]
