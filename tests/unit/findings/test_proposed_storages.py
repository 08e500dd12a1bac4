"""Which storages a proposal changes, and by how much, on hand-written traces."""

from __future__ import annotations

import pytest

from memprof.findings import optimizer_state
from memprof.findings.proposals import (
    autocast,
    checkpointing,
    chunked_loss,
    copies,
    data_parallel,
    gradients,
    host_memory,
    micro_batch,
    optimizer,
    pairs,
    vmap,
)
from memprof.ledger.what_if import compute_allocated_peak
from memprof.spec import TargetSpec
from memprof.trace.events import NONE, Caller, Event, EventKind, Forward, ModuleRole, PhaseKind, Role, VmapCall
from memprof.units import GIB, MIB
from tests.unit.findings.proposals.proposed import batch, layers, only
from tests.unit.traces import TraceBuilder

ALLOC, FREE = EventKind.ALLOC, EventKind.FREE


# -- which tensors, and how much --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"), [(name, True) for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")]
    + [("maximum", True), ("minimum", True), ("pow", False), ("where", False)],
)  # fmt: skip
def test_operators_whose_result_is_larger_only_by_broadcasting(name: str, expected: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(512, 8, op="aten.randn")
    b.new(512, 512, 8, op=f"aten.{name}", line="loss.py:3 loss")
    assert bool(list(pairs.propose(b.context()))) == expected


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True),
        ({"shape": (1, 4096, 4096)}, False),
        ({"shape": (4096, 1, 4096)}, False),
        ({"shape": (2, 2, 4096, 1024)}, True),
        ({"shape": (4096 * 4096,)}, False),
        ({"hidden": True}, False),
        ({"phase": PhaseKind.BACKWARD}, False),
        ({"op": "aten.addmm"}, True),
        ({"op": "aten.addmm", "shape": (4096, 4097)}, False),  # no square
        ({"op": "aten.addmm", "shape": (256, 256, 256)}, False),
        ({"other": (4096, 4096)}, False),  # an input may be as large
        ({"other": (4096, 4095)}, True),
    ],
)
def test_pairs_by_their_shape(change: dict[str, object], is_told: bool) -> None:
    settings: dict[str, object] = {"shape": (4096, 4096), "op": "aten.mul", "phase": PhaseKind.FORWARD} | change
    b = TraceBuilder()
    b.parameter("weight", 64, 64)
    b.phase(settings.pop("phase"))  # type: ignore[arg-type]
    b.new(*settings.pop("other", (4096, 8)), op="aten.randn")  # type: ignore[misc]
    b.new(*settings.pop("shape"), line="loss.py:3 loss", **settings)  # type: ignore[misc, arg-type]
    b.alloc(MIB)
    assert bool(list(pairs.propose(b.context()))) == is_told


@pytest.mark.parametrize(
    ("op", "dtype", "shape", "is_told"),
    [
        ("aten.zeros", "int64", (640, 8, 100), True),
        ("aten.zeros", "float32", (640, 8, 100), False),
        ("aten.ones", "int64", (640, 8, 100), False),
        ("aten.zeros", "int64", (640, 9, 100), False),
        ("aten.zeros", "int64", (640, 8), False),
    ],
)
def test_a_one_hot_has_a_number_for_each_class_of_each_index(
    op: str, dtype: str, shape: tuple[int, ...], is_told: bool
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(640, 8, dtype="int64", op="aten.topk")
    b.new(*shape, op=op, dtype=dtype)
    assert bool(list(pairs.propose(b.context()))) == is_told


@pytest.mark.parametrize(("other_mib", "is_told"), [(6290, True), (6360, False)])
def test_pairs_are_a_hundredth_of_the_peak(other_mib: int, is_told: bool) -> None:
    """64 MiB of pairs; 100 rows of them for each of the others would be."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(4096, 1, op="aten.randn")
    b.new(4096, 4096, op="aten.sub")
    b.alloc(1)
    b.trace.storages[-1] = b.trace.storages[-1]._replace(num_bytes=other_mib * MIB)
    assert bool(list(pairs.propose(b.context()))) == is_told


def test_chunks_are_as_many_rows_as_take_a_gibibyte_and_all_that_is_computed_of_them() -> None:
    """2.5 GiB: three chunks of 20,480 rows; what was there before, or has fewer numbers, stays."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(20480, 4096, op="aten.randn")
    b.new(20480, 8, op="aten.randn")
    b.new(20480, 16384, op="aten.exp", line="loss.py:1 other")
    alike = b.new(20480, 20000, op="aten.exp", line="loss.py:3 loss")
    b.free(alike)
    first = b.new(20480, 32768, op="aten.sub", line="loss.py:3 loss")
    made = [b.new(20480, 32768, op="aten.exp"), b.new(2, 20480, 16000)]
    b.new(8, 20480, op="aten.sum")
    b.new(2, 2, 20480, 8192)
    b.new(20480, 32768, op="aten.mul", owner=(Role.INPUT, ""))
    found = pairs.find_chunks(b.context())
    assert found is not None and (found.first, found.rows) == (first, 6827)
    assert sorted(found.sizes) == [alike, first, *made]
    assert found.sizes[first] == 20480 * 32768 * 4 * 6827 // 20480


@pytest.mark.parametrize(
    ("op", "shape", "has_cdist"),
    [("aten.sub", (512, 512, 8), True), ("aten.sub", (512, 512), False), ("aten.mul", (512, 512, 8), False)],
)
def test_distances_have_an_operator(op: str, shape: tuple[int, ...], has_cdist: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(512, 8, op="aten.randn")
    b.new(*shape, op=op)
    assert ("torch.cdist" in only(pairs.propose(b.context())).change) == has_cdist


@pytest.mark.parametrize(
    ("shape", "phase", "owner", "is_batched"),
    [
        ((64, 5), PhaseKind.FORWARD, None, True),
        ((128, 5), PhaseKind.DECODE, None, True),
        ((64, 5), PhaseKind.BACKWARD, None, True),
        ((5, 64), PhaseKind.EVALUATION, None, True),
        ((65, 5), PhaseKind.FORWARD, None, False),
        ((64, 5), PhaseKind.INPUTS, None, False),
        ((64, 5), PhaseKind.BACKWARD, (Role.GRADIENT, "a"), False),
        ((64, 5), PhaseKind.FORWARD, (Role.KV_CACHE, ""), True),
        ((256, 100), PhaseKind.FORWARD, None, False),  # of the weight
        ((64, 64), PhaseKind.FORWARD, None, None),  # of all samples with each other
        ((100, 100), PhaseKind.FORWARD, None, False),  # a width of the model
        ((130, 130, 64), PhaseKind.FORWARD, None, False),
    ],
)
def test_what_has_a_row_for_each_sample(
    shape: tuple[int, ...], phase: PhaseKind, owner: tuple[Role, str] | None, is_batched: bool | None
) -> None:
    b = TraceBuilder()
    b.parameter("weight", 256, 100)
    b.phase(PhaseKind.FORWARD)
    b.new(64, 100, owner=(Role.INPUT, ""))
    other = b.new(64, 7)
    b.phase(phase)
    index = b.new(*shape, owner=owner)
    trained = [] if phase is PhaseKind.EVALUATION else [other]  # a training stays as it is
    expected = [] if is_batched is None else [*trained, *[index] * is_batched]
    assert micro_batch._find_batched(b.context(), 64) == expected


@pytest.mark.parametrize(("batch_size", "rows"), [(64, 32), (6, 3), (9, 3), (7, 1), (2, 1)])
def test_a_batch_is_divided_into_equal_ones(batch_size: int, rows: int) -> None:
    assert only(micro_batch.propose_accumulation(batch((batch_size, 256), inputs=(batch_size, 100)))).value == rows


@pytest.mark.parametrize(
    ("shapes", "size"), [(((64, 100),), 64), (((64, 100), (1, 5)), 64), (((1, 100),), None), (((), (8,)), 8)]
)
def test_samples_of_a_batch_are_the_rows_of_its_inputs(shapes: tuple[tuple[int, ...], ...], size: int | None) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    for shape in shapes:
        b.new(*shape, owner=(Role.INPUT, ""))
    b.free(b.new(32, 100, owner=(Role.INPUT, "")))  # of another batch
    b.alloc(MIB)
    assert micro_batch.find_batch_size(b.context()) == size
    assert micro_batch.find_batch_size(b.context(spec=TargetSpec(model="x", batch_size=1))) is None


@pytest.mark.parametrize(("rows", "num_rows", "is_told"), [(2, 1, True), (1, 1, False)])
def test_a_call_for_one_row_has_no_chunks(rows: int, num_rows: int, is_told: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    begin = len(b.trace.events)
    b.free(b.new(rows, 1024))
    b.alloc(MIB)
    b.trace.sources.append("train.py:7 main")
    b.trace.vmaps.append(VmapCall(begin, len(b.trace.events), rows, "jacfwd", len(b.trace.sources) - 1))
    found = list(vmap.propose(b.context()))
    assert [one.change for one in found] == [
        f"pass chunk_size={num_rows} to torch.func.vmap of jvp (jacfwd has none) at train.py:7, "
        f"which takes {rows} rows at once"
    ] * is_told


def test_what_a_call_allocates_with_its_rows() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(10, 5)
    begin = len(b.trace.events)
    shapes = ((10, 5), (20, 5), (5, 10), (15, 5), (), (7, 3))
    made = [b.new(*shape) for shape in shapes]
    b.new(10, 5, hidden=True)
    end = len(b.trace.events)
    b.new(10, 5)
    call = VmapCall(begin, end, 10, "vmap", 0)
    assert vmap._find_batched(b.context(), call) == made[:3]


@pytest.mark.parametrize(
    ("op", "names", "is_new", "is_state"),
    [
        ("aten.zeros_like", None, True, True),
        ("aten.sqrt", None, True, False),
        ("aten.zeros_like", None, False, False),
        ("aten.empty", (Role.OPTIMIZER_STATE, "exp_avg"), False, True),
        ("aten.empty", (Role.BUFFER, "exp_avg"), False, False),
    ],
)
@pytest.mark.parametrize("shape", [(8, 4), (8, 5)])
def test_state_has_the_shape_of_a_parameter(
    op: str, names: tuple[Role, str] | None, is_new: bool, is_state: bool, shape: tuple[int, int]
) -> None:
    b = TraceBuilder()
    b.parameter("weight", 8, 4)
    b.phase(PhaseKind.OPTIMIZER_STEP if is_new else PhaseKind.MODEL)
    index = b.new(*shape, op=op, owner=names)
    assert optimizer_state.find_state(b.context()) == ({index: 32} if is_state and shape == (8, 4) else {})


@pytest.mark.parametrize(
    ("elements", "bytes_of_each"), [(4096, 4096 + 16 * 4), (4095, 4095 * 4), (4097, 4097 + 17 * 4)]
)
def test_states_of_4096_elements_are_in_8_bits(elements: int, bytes_of_each: int) -> None:
    b = TraceBuilder()
    b.parameter("weight", elements)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    for name in ("exp_avg", "exp_avg_sq"):
        b.new(elements, owner=(Role.OPTIMIZER_STATE, name))
    sizes = [one.num_bytes for one in only(optimizer.propose_8_bit(b.context())).trace.storages]
    assert sizes[1:] == [bytes_of_each] * 2


def test_temporaries_are_what_a_step_makes_for_itself() -> None:
    b = TraceBuilder()
    b.parameter("weight", 8)
    b.new(4)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    own = b.new(4)
    b.new(4, hidden=True)
    b.new(8, op="aten.zeros_like")
    b.new(4, owner=(Role.BUFFER, "a"))
    assert optimizer_state.find_temporaries(b.context()) == [own]


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True),
        ({"owner": (Role.BUFFER, "a")}, False),
        ({"line": None}, False),
        ({"hidden": True}, False),
        ({"in_module": True}, False),
        *(({"op": f"aten.{name}"}, True) for name in ("ones", "full", "new_zeros", "new_ones", "new_full")),
        ({"op": "aten.empty"}, False),
        ({"phase": PhaseKind.MODEL}, True),
        ({"phase": PhaseKind.INPUTS}, True),
        ({"phase": PhaseKind.BACKWARD}, False),
        ({"phase": PhaseKind.FORWARD}, False),
        ({"phase": PhaseKind.FORWARD, "infers": True}, True),
        ({"mib": 20}, True),
        ({"mib": 18}, False),
    ],
)
def test_a_buffer_is_created_by_a_line_of_the_program_outside_of_modules(
    change: dict[str, object], is_told: bool
) -> None:
    """20 MiB are a quarter of 80, and 18 are less of 78."""
    settings: dict[str, object] = {"op": "aten.zeros", "line": "slide.py:7 run"} | change
    b = TraceBuilder()
    infers = settings.pop("infers", False)
    b.alloc(60 * MIB)
    b.phase(settings.pop("phase", PhaseKind.OTHER))  # type: ignore[arg-type]
    if settings.pop("in_module", False):
        b.enter("net")
    b.alloc(settings.pop("mib", 20) * MIB, **settings)  # type: ignore[operator, arg-type]
    b.phase(PhaseKind.OTHER if infers else PhaseKind.BACKWARD)
    assert bool(list(host_memory.propose(b.context()))) == is_told


@pytest.mark.parametrize(("shape", "is_told"), [((4, 8), False), ((8, 4), True)])
def test_a_buffer_that_is_used_as_a_whole_stays_on_the_gpu(shape: tuple[int, int], is_told: bool) -> None:
    """As `torch.scatter(zeros, ...)` does, which makes another one of its shape; what came before does not."""
    b = TraceBuilder(PhaseKind.OTHER)
    b.free(b.new(4, 8, op="aten.scatter", line="a.py:2 f"))
    b.new(4, 8, op="aten.zeros", line="a.py:1 f")
    b.new(*shape, op="aten.scatter", line="a.py:2 f")
    assert bool(list(host_memory.propose(b.context()))) == is_told


@pytest.mark.parametrize(("mib", "is_told"), [(19, False), (20, True), (21, True)])
def test_buffers_between_parameters_are_of_layers(mib: int, is_told: bool) -> None:
    """Those of a shape, together a quarter of the peak, become smaller; one alone is none of each layer."""
    b = TraceBuilder()
    made: list[int] = []
    for _ in range(2):  # layers
        lines = ("a.py:1 f", "a.py:2 f")
        made += [b.new(8, mib * MIB // 32, op="aten.zeros", line=line, dtype="uint8") for line in lines]
        b.alloc(30 * MIB, owner=(Role.PARAMETER, "weight"))
    found = list(host_memory.propose(b.context()))
    assert bool(found) == is_told
    if is_told:
        shape, start = (
            f"[8 x {mib * MIB // 32}]",
            "reduce the first dimension (batch or length) of the buffer of each layer",
        )
        assert found[0].change == f"{start}, {shape} at a.py:1: 1 instead of 8"
        assert {found[0].trace.storages[index].num_bytes for index in made} == {mib * MIB // 32}


def test_buffers_of_one_line_are_one() -> None:
    b = TraceBuilder(PhaseKind.OTHER)
    made = [
        b.alloc(mib * MIB, op="aten.zeros", line=line)
        for mib, line in ((10, "a.py:1 f"), (30, "a.py:2 f"), (4, "a.py:2 f"))
    ]
    found = only(host_memory.propose(b.context()))
    assert [found.trace.storages[index].num_bytes // MIB for index in made] == [10, 0, 0]
    assert (
        found.change == f'create [{30 * MIB}] at a.py:2 in host memory (device="cpu"), and copy parts of it to the GPU'
    )


@pytest.mark.parametrize(("num_gpus", "rows", "is_told"), [(2, 16, True), (1, 16, False), (2, 15, False)])
def test_gathered_outputs_are_of_several_gpus_and_of_the_rows_of_the_largest(
    num_gpus: int, rows: int, is_told: bool
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("", "DataParallel")
    before = b.new(16, 100)
    b.new(8, 100, device="cuda:1")
    gathered = b.new(16, 100, op="aten.empty")
    b.leave()
    b.trace.gpus = {f"cuda:{number}": True for number in range(num_gpus)}
    b.trace.forwards.append(Forward(0, len(b.trace.events), 0, NONE, training=True, nodes=1, outputs=(gathered,)))
    owned = b.new(16, 3, owner=(Role.BUFFER, "a"))
    loss = b.new(rows, 201, op="aten._log_softmax", line="train.py:7 main")
    found = list(data_parallel.propose(b.context()))
    assert bool(found) == is_told
    for one in found:
        sizes = [one.trace.storages[index].num_bytes for index in (before, owned, gathered, loss)]
        assert sizes == [6400, 192, 3200, 16 * 201 * 2]
        assert "[16 x 201] at train.py:7" in one.change


@pytest.mark.parametrize(
    ("dtypes", "tokens", "share"),
    [
        (("float32", "float32"), 8192, 1 / 4),  # 1 of 4 GiB
        (("bfloat16", "float32"), 8192, 1 / 2),  # 1.5 of 3 GiB
        (("float32", "float32"), 1024, 1 / 2),  # 256 of 512 MiB, which are no chunk
    ],
)
def test_a_chunk_has_a_copy_in_float32_and_one_in_the_precision_of_the_head(
    dtypes: tuple[str, str], tokens: int, share: float
) -> None:
    b = TraceBuilder()
    b.parameter("embed.weight", 65536, 512)
    b.inputs(1, tokens)
    made = [b.new(tokens, 65536, dtype=dtype) for dtype in dtypes]
    b.phase(PhaseKind.BACKWARD)
    changed = only(chunked_loss.propose(b.context(spec=TargetSpec(model="x"))))
    assert changed.change == ""
    for index in made:
        assert changed.trace.storages[index].num_bytes == b.trace.storages[index].num_bytes * share


@pytest.mark.parametrize(("op", "peak"), [("native_group_norm", 4 + 8 + 8), ("gelu", 4 + 4)])
def test_an_operator_in_float32_copies_a_halved_input(op: str, peak: int) -> None:
    """8 MiB tensors: the product in half, and then a copy of it and a result in float32, or a result in half."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("net")
    b.new(2 * MIB, op="aten.convolution")
    b.new(2 * MIB, op=f"aten.{op}")
    assert compute_allocated_peak(only(autocast.propose_bfloat16(b.context())).trace) == peak * MIB


# -- what autocast and checkpointing leave ----------------------------------------------------------------------------


HALF = ("convolution", "mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention")
FLOAT32 = (
    "native_layer_norm", "native_group_norm", "rms_norm", "linalg_vector_norm", "_softmax", "mse_loss",
    "upsample_nearest2d", "exp", "log", "pow", "rsqrt", "sum", "prod", "cumsum",
)  # fmt: skip


@pytest.mark.parametrize("op", [*HALF, *FLOAT32, "gelu", "expand"])
def test_what_autocast_runs_in_half_precision_and_what_in_float32(op: str) -> None:
    """What is neither has the data type of its input, a product that was halved."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("net")
    product, index = b.new(64, 32), b.new(64, 32, op=f"aten.{op}")
    halved, copied = autocast._find_halved(b.trace)
    assert halved == [product, *[index] * (op not in FLOAT32)]
    assert [b.trace.events[time].ref for time in copied] == [index] * (op in FLOAT32)
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("net")
    alone = b.new(64, 32, op=f"aten.{op}")
    assert autocast._find_halved(b.trace)[0] == [alone] * (op in HALF)


@pytest.mark.parametrize(
    ("change", "is_halved"),
    [
        ({}, True),
        ({"dtype": "int64"}, False),
        ({"device": "cpu"}, False),
        ({"owner": (Role.BUFFER, "a")}, False),
        ({"hidden": True}, False),
        ({"module": NONE}, False),
        ({"phase": PhaseKind.MODEL}, False),
        ({"phase": PhaseKind.BACKWARD}, False),  # where a product follows from halved ones
    ],
)
def test_products_in_the_forward_of_a_module_are_halved(change: dict[str, object], is_halved: bool) -> None:
    settings = {"phase": PhaseKind.FORWARD} | change
    b = TraceBuilder()
    b.phase(settings.pop("phase"))  # type: ignore[arg-type]
    b.enter("net")
    index = b.new(64, 32, **settings)  # type: ignore[arg-type]
    assert autocast._find_halved(b.trace)[0] == [index] * is_halved


@pytest.mark.parametrize(
    ("phase", "frees", "is_halved"),
    [(PhaseKind.FORWARD, (), True), (PhaseKind.BACKWARD, (), True), (PhaseKind.FORWARD, (0,), False)],
)
def test_results_follow_from_halved_tensors_that_are_live(
    phase: PhaseKind, frees: tuple[int, ...], is_halved: bool
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("net")
    product = b.new(64, 32)
    b.phase(phase)
    b.free(*frees)
    index = b.new(32, 64, op="aten.mul")
    assert autocast._find_halved(b.trace)[0] == [product, *[index] * is_halved]


def test_results_follow_from_halved_tensors_once_those_in_float32_are_freed() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("net")
    full = [b.new(64, 32, op="aten._softmax") for _ in range(2)]
    b.new(64, 32)
    for number in range(3):
        index = b.new(64, 32, op="aten.mul")
        assert (index in autocast._find_halved(b.trace)[0]) == (number == 2)
        b.free(index, *full[number : number + 1])


def test_weights_have_a_copy_in_half_precision_but_for_vectors_and_embeddings() -> None:
    b = TraceBuilder()
    for path, role in (("embed", ModuleRole.EMBEDDING), ("head", ModuleRole.HEAD)):
        b.enter(path, role=role)
        b.leave()
    for name, shape in (("embed.weight", (8, 4)), ("head.weight", (8, 4)), ("head.bias", (8,))):
        b.parameter(name, *shape)
    b.phase(PhaseKind.FORWARD)
    b.enter("net")
    b.new(64, 32)
    sizes = [storage.num_bytes for storage in only(autocast.propose_bfloat16(b.context())).trace.storages]
    assert sizes == [128, 192, 32, 64 * 32 * 2]


def test_what_has_a_role_or_is_hidden_is_not_computed_again() -> None:
    b = layers(backward=True)
    for index in (0, 1):
        b.trace.storages[index] = b.trace.storages[index]._replace(hidden=True)
    events = only(checkpointing.propose(b.context())).trace.events
    assert events.count(Event(ALLOC, 0)) == events.count(Event(ALLOC, 1)) == 1
    assert events.count(Event(ALLOC, 4)) == 2


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True),
        ({"op": "aten.empty"}, False),
        ({"shape": (512, 1024)}, False),
        ({"phase": PhaseKind.BACKWARD}, False),
    ],
)
def test_the_failed_copy_is_of_a_parameter_outside_of_passes(change: dict[str, object], is_told: bool) -> None:
    settings: dict[str, object] = {"op": "aten.clone", "shape": (10240, 1024), "phase": PhaseKind.OTHER} | change
    b = TraceBuilder()
    b.parameter("weight", 10240, 1024)
    b.phase(settings.pop("phase"))  # type: ignore[arg-type]
    other = b.alloc(18 * MIB, line="ema.py:1 other")
    copy = b.new(*settings.pop("shape"), line="ema.py:7 save", **settings)  # type: ignore[misc, arg-type]
    found = list(copies.propose(b.context(70 * MIB)))
    assert bool(found) == is_told
    for one in found:
        assert [one.trace.storages[index].num_bytes // MIB for index in (other, copy)] == [18, 0]


def test_what_is_gathered_comes_after_the_first_output_and_is_on_the_gpu() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("", "DataParallel")
    b.new(8, 100, device="cuda:1")
    outputs = (b.new(16, 100), b.new(), b.new(16, 4))
    b.leave()
    b.trace.gpus = {"cuda:0": True, "cuda:1": True}
    b.trace.forwards.append(Forward(0, len(b.trace.events), 0, NONE, training=True, nodes=1, outputs=outputs))
    other = b.new(16, 100, device="cuda:1")
    largest = b.new(16, 200)
    found = only(data_parallel.propose(b.context()))
    sizes = [found.trace.storages[index].num_bytes for index in (*outputs, other, largest)]
    assert sizes == [3200, 4, 128, 6400, 6400]


@pytest.mark.parametrize("at", ["begin", "end"])
def test_what_a_vmap_makes_ends_with_it(at: str) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.alloc(MIB)
    saved = b.alloc(100 * MIB)
    b.trace.vmaps.append(VmapCall(2, 9, 4, "vmap", 0) if at == "begin" else VmapCall(0, 2, 4, "vmap", 0))
    b.trace.callers = [Caller(saved, 0, "torch.func.grad")]
    b.phase(PhaseKind.BACKWARD)
    b.alloc(MIB)
    b.trace.last_uses = [NONE, len(b.trace.events), NONE]
    b.alloc(200 * MIB)
    assert bool(list(gradients.propose(b.context()))) == (at == "end")


def test_the_largest_logits_say_how_large_a_chunk_is() -> None:
    """512 MiB and 2 GiB: a chunk of 1 GiB in float32 is 2 fifths of both."""
    b = TraceBuilder()
    b.parameter("embed.weight", 65536, 512)
    b.inputs(1, 8192)
    small, large = b.new(2048, 65536), b.new(8192, 65536)
    b.phase(PhaseKind.BACKWARD)
    found = only(chunked_loss.propose(b.context()))
    assert found.change == ""  # no loss was seen, that could be the program's own
    assert [found.trace.storages[index].num_bytes for index in (small, large)] == [GIB // 5, 4 * GIB // 5]


def test_without_a_vocabulary_there_is_no_loss_in_chunks() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.alloc(MIB)
    b.phase(PhaseKind.BACKWARD)
    assert not list(chunked_loss.propose(b.context()))


def test_all_that_a_layer_has_saved_is_freed_but_for_its_result() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("layers.0", "Layer", ModuleRole.LAYER)
    saved = [b.alloc(MIB) for _ in range(3)]
    b.alloc(MIB)
    b.leave()
    b.phase(PhaseKind.OTHER)
    events = only(checkpointing.propose(b.context())).trace.events
    assert [event.ref for event in events if event.kind is FREE] == saved


@pytest.mark.parametrize(("begin", "is_own"), [(5, False), (6, True)])
def test_a_loss_of_a_module_that_is_called_after_the_model_is_the_programs_own(begin: int, is_own: bool) -> None:
    """`criterion(model(x), labels)`: the call of the model ends before that of the loss, or is the same."""
    b = TraceBuilder()
    b.parameter("embed.weight", 65536, 512)
    b.inputs(1, 1024)
    b.new(1024, 65536, op="aten.addmm")  # event 5
    b.enter("", "CrossEntropyLoss", ModuleRole.ROOT)
    b.new(1024, 65536, op="aten._log_softmax")
    b.leave()
    b.trace.forwards = [Forward(begin, len(b.trace.events), 0, NONE, True, 2, ())]
    b.phase(PhaseKind.BACKWARD)
    assert ("in the program's own code" in only(chunked_loss.propose(b.context())).change) is is_own


def test_logits_that_are_no_chunk_stay_as_they_are() -> None:
    b = TraceBuilder()
    b.parameter("embed.weight", 65536, 512)
    b.inputs(1, 1024)
    b.new(1024, 65536)
    b.phase(PhaseKind.BACKWARD)
    assert only(chunked_loss.propose(b.context())).trace.storages[2].num_bytes == 1024 * 65536 * 4


@pytest.mark.parametrize("in_module", [True, False])
def test_a_loss_is_the_programs_own_if_no_module_computes_any(in_module: bool) -> None:
    b = TraceBuilder()
    b.parameter("embed.weight", 65536, 512)
    b.inputs(1, 1024)
    b.new(1024, 65536, op="aten._log_softmax")
    if in_module:
        b.enter("loss")
    b.new(1024, 65536, op="aten._log_softmax")
    b.phase(PhaseKind.BACKWARD)
    assert ("in the program's own code" in only(chunked_loss.propose(b.context())).change) is not in_module


def test_each_line_that_calls_torch_func_grad_has_its_tensors() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    made = [b.alloc(50 * MIB) for _ in range(4)]
    functions = ("torch.func.vmap", "torch.func.grad", "torch.func.grad_and_value", "torch.func.grad")
    b.trace.callers = [Caller(index, 0, by) for index, by in zip(made, functions, strict=True)]
    b.phase(PhaseKind.BACKWARD)
    b.alloc(MIB)
    used = len(b.trace.events)
    b.alloc(200 * MIB)
    b.trace.last_uses = [used] * 4 + [NONE] * 2
    found = list(gradients.propose(b.context()))
    assert ["grad_and_value" in one.change for one in found] == [False, True]
    freed = [[event.ref for event in one.trace.events if event.kind is FREE] for one in found]
    assert freed == [[1, 3], [2]]


def test_pairs_of_a_program_that_trains_are_checkpointed() -> None:
    """What has a backward trains, though its calls are not known."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(4096, 8, op="aten.randn")
    b.new(4096, 4096, 8, op="aten.sub")
    b.phase(PhaseKind.BACKWARD)
    b.alloc(MIB)
    assert "checkpoint" in only(pairs.propose(b.context())).change
