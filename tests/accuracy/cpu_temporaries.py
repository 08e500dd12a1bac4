"""What the CPU's kernels allocate and CUDA's do not: operator -> what it is, and how many bytes.

A block is left out only if it is made and released inside one call of the operator, with exactly these bytes. Beside
them only numbers are: blocks of at most 8 bytes that a program on a GPU keeps on the host, so that its GPU has none.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.accuracy.cpu_events import BEFORE, Call, Change, Program, on_cpu, on_virtual_gpu

FLOAT, INT64 = 4, 8
NUMBER_BYTES = 8
# State of the host's random number generator, which checkpointing keeps (CPUGeneratorImpl.cpp, get_state).
RNG_STATE_BYTES = 5056
# Operators whose memory that no tensor shows (copies of their inputs) is the same on both devices.
SHARED = frozenset(
    {
        "aten.cumsum", "aten.embedding", "aten.native_layer_norm", "aten.native_layer_norm_backward", "aten.roll",
        "aten.upsample_nearest2d_backward",
    }
)  # fmt: skip


def is_shared(op: str, dtype: str) -> bool:
    """Whether both devices take this; sums of real numbers are made from a contiguous copy on CUDA alone."""
    return op in SHARED and (op != "aten.cumsum" or dtype == "int64")


class Temporary(NamedTuple):
    what: str
    # Bytes that a temporary of this call may have, given the bytes of the blocks that the call leaves behind.
    sizes: Callable[[Call, list[int]], set[int]]
    through: str = ""  # The operator that the call uses to make it, where there is one.


def _elements(shape: tuple[int, ...] | None) -> int:
    return math.prod(shape) if shape is not None else 0


def _convolution(data: tuple[int, ...], weight: tuple[int, ...], pixels: int) -> set[int]:
    """Columns and contiguous copies of all tensors, whole or one group of them (native/ConvolutionMM2d.cpp)."""
    batch, channels = data[0], data[1]
    groups = channels // weight[1]
    columns = batch * math.prod(weight[1:]) * pixels
    whole = [math.prod(data), math.prod(weight), weight[0], batch * weight[0] * pixels]
    return {FLOAT * size for size in (columns, *whole, *(size // groups for size in whole))}


def _forward(call: Call, made: list[int]) -> set[int]:
    data, weight = call.shapes[:2]
    assert data is not None and weight is not None
    return _convolution(data, weight, made[-1] // (FLOAT * data[0] * weight[0])) if made else set()


def _backward(call: Call, made: list[int]) -> set[int]:
    gradient, data, weight = call.shapes[:3]
    assert gradient is not None and data is not None and weight is not None
    return _convolution(data, weight, math.prod(gradient[2:]))


def _like(*arguments: int, times: int = 1) -> Callable[[Call, list[int]], set[int]]:
    """As many bytes as these arguments have in float32."""
    return lambda call, made: {times * FLOAT * _elements(call.shapes[argument]) for argument in arguments}


def _cast(call: Call, made: list[int]) -> set[int]:
    return {FLOAT * _elements(shape) for shape in call.shapes[:2] if shape is not None}


_CAST = Temporary("an argument of another dtype, cast (TensorIterator.cpp)", _cast, through="aten::_to_copy")
TEMPORARIES: dict[str, Temporary] = {
    "aten::_convolution": Temporary("columns; copies of its tensors or of one group", _forward),
    "aten::convolution_backward": Temporary("columns; copies of its tensors or of one group", _backward),
    "aten::native_layer_norm_backward": Temporary(
        "sums of weight's and bias's gradients, in their dtype",
        lambda call, made: {FLOAT * _elements(call.shapes[5]) * times for times in (1, 2)},
    ),
    "aten::native_group_norm_backward": Temporary(
        "two sums per sample and channel",
        lambda call, made: {FLOAT * math.prod((call.shapes[1] or ())[:2])},
    ),
    "aten::native_batch_norm": Temporary("mean and variance, made twice", _like(1)),
    "aten::native_batch_norm_backward": Temporary("the input's gradient, made twice", _like(0)),
    "aten::upsample_nearest2d": Temporary(
        "input and output with channels last",
        lambda call, made: {FLOAT * _elements(call.shapes[0]), *made},
    ),
    "aten::repeat": Temporary(
        "the order of dimensions, computed in tensors on the host",
        lambda call, made: {INT64 * n for d in [len(call.shapes[0] or ())] for n in (d, 2 * d)},
    ),
    "aten::embedding_dense_backward": Temporary(
        "contiguous copies of gradient and indices (on CUDA before the output, here after it)",
        lambda call, made: {FLOAT * _elements(call.shapes[0]), INT64 * _elements(call.shapes[1])},
    ),
    "aten::bitwise_and": Temporary(
        "a boolean argument, cast to integers (TensorIterator.cpp)",
        lambda call, made: {INT64 * _elements(shape) for shape in call.shapes[:2]},
        through="aten::_to_copy",
    ),
    "aten::mul": _CAST,
    "aten::add": _CAST,
}  # fmt: skip


class Comparison(NamedTuple):
    """Both sides of one program, without what is named in this file."""

    virtual: list[Change]
    cpu: list[Change]
    left_out: Counter[str]  # Blocks left out on the CPU's side, by operator.
    numbers: int  # ... and those of numbers that a program on a GPU keeps on the host.


def compared(program: Program, beyond: Callable[[list[Change]], set[int]] = lambda cpu: set()) -> Comparison:
    """Run `program` on both sides; leave out what is named in this file, and the CPU's blocks that `beyond` gives."""
    virtual, cpu = on_virtual_gpu(program, is_shared), on_cpu(program)
    return laid_beside(virtual, cpu, beyond(cpu))


def laid_beside(virtual: list[Change], cpu: list[Change], left_out: set[int]) -> Comparison:
    """Both sides; of the CPU's without what is named in this file and the blocks `left_out`."""
    cpu = [change for change in cpu if change.block not in left_out]
    temporaries = _temporaries(cpu)
    cpu = [change for change in cpu if change.block not in temporaries]
    numbers = _numbers(cpu, virtual)
    cpu = [change for change in cpu if change.block not in numbers]
    return Comparison(virtual, _renumbered(_in_order(cpu)), Counter(temporaries.values()), len(numbers))


def _temporaries(changes: list[Change]) -> dict[int, str]:
    """The blocks of CPU kernels' temporaries, each with its operator."""
    births = {change.block: change for change in changes if not change.free}
    outlived = _calls_at_death(changes)
    made: defaultdict[int, list[int]] = defaultdict(list)
    for block, birth in births.items():
        for call in birth.calls:
            if call.number not in outlived[block]:
                made[call.number].append(birth.num_bytes)
    found = {}
    for block, birth in births.items():
        if not birth.calls and birth.num_bytes == RNG_STATE_BYTES:
            found[block] = "torch.get_rng_state"
        for call in birth.calls:
            temporary = TEMPORARIES.get(call.name)
            if temporary is None or call.number not in outlived[block] or birth.num_bytes <= NUMBER_BYTES:
                continue
            if temporary.through and all(inner.name != temporary.through for inner in birth.calls):
                continue
            if birth.num_bytes in temporary.sizes(call, made[call.number]):
                found[block] = call.name
                break
    return found


def _calls_at_death(changes: list[Change]) -> defaultdict[int, set[int]]:
    """For each block the operator calls inside which it was freed."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for change in changes:
        if change.free:
            found[change.block] = {call.number for call in change.calls}
    return found


def _numbers(cpu: list[Change], virtual: list[Change]) -> set[int]:
    """The CPU's blocks of one number for which the virtual GPU has none.

    One that it has is made by the same operator, which leaves it behind, between the same larger allocations and frees.
    """
    at_death = _calls_at_death(cpu)
    waiting: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for position, change in _small(virtual):
        waiting[position, change.num_bytes].append(change.op.replace(".", "::"))
    surplus = set()
    for position, change in _small(cpu):
        here = waiting[position, change.num_bytes]
        left_by = {call.name for call in change.calls if call.number not in at_death[change.block]}
        op = next((op for op in here if op in left_by), None)
        if op is None:
            surplus.add(change.block)
        else:
            here.remove(op)
    return surplus


def _small(changes: list[Change]) -> Iterator[tuple[int, Change]]:
    """Allocations of one number, each with how many larger changes came before it."""
    position = 0
    for change in changes:
        if change.num_bytes > NUMBER_BYTES:
            position += 1
        elif not change.free:
            yield position, change


def _renumbered(changes: list[Change]) -> list[Change]:
    """`changes`, of which some were taken out or moved, with their blocks counted again."""
    numbers = {BEFORE: BEFORE}
    for change in changes:
        if not change.free:
            numbers[change.block] = len(numbers) - 1
    return [change._replace(block=numbers[change.block]) for change in changes]


# Operators whose CPU kernel makes its outputs in another order: positions of the input and the weight.
_GRADIENTS = {"aten::convolution_backward": (1, 2), "aten::native_batch_norm_backward": (1, 2)}


def _is_depthwise(call: Call) -> bool:
    """Filters for each channel alone: the kernels are torch's own on CUDA, but for channels-last (Convolution.cpp)."""
    data, weight, strides = call.shapes[1], call.shapes[2], call.strides[1]
    if call.name != "aten::convolution_backward" or data is None or weight is None or strides is None:
        return False
    channels_last = len(data) == 4 and strides[1] == 1
    return weight[1] == 1 and data[1] > 1 and weight[0] % data[1] == 0 and not channels_last


def _in_order(changes: list[Change]) -> list[Change]:
    """These operators' gradients in CUDA's order: input, weight, bias (depthwise: weight before input)."""
    positions: defaultdict[int, list[int]] = defaultdict(list)
    calls: dict[int, Call] = {}
    for position, change in enumerate(changes):
        for call in change.calls:
            if call.name in _GRADIENTS and not change.free:
                positions[call.number].append(position)
                calls[call.number] = call
    result = list(changes)
    for number, found in positions.items():
        call = calls[number]
        data, weight = (call.shapes[argument] for argument in _GRADIENTS[call.name])
        order = [FLOAT * _elements(data), FLOAT * _elements(weight), FLOAT * (weight or (0,))[0]]
        if _is_depthwise(call):
            order[:2] = reversed(order[:2])
        ordered = sorted((changes[position] for position in found), key=lambda change: order.index(change.num_bytes))
        for position, change in zip(found, ordered, strict=True):
            result[position] = change
    return result
