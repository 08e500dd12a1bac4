"""Small recordings with stacks, made by an allocator of our own and known by hand."""

from __future__ import annotations

from memprof.allocator import AllocatorConfig, Block, Completion, parse_config
from memprof.trace.snapshot import Frame, Snapshot, Stack
from tests.unit.allocator.recorder import Recorder

MIB = 1 << 20
MAIN = Frame("/home/me/train.py", 90, "<module>")
CALL = Frame("/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", 1750, "_call_impl")


def stack(*lines: str, op: str = "", main: bool = True) -> Stack:
    """Frames, innermost first, of lines such as "model.py:12 forward"; "call" is a module's call."""
    frames = [Frame("", 0, f"at::_ops::{op}::call(at::Tensor const&)")] if op else []
    for line in lines:
        if line == "call":
            frames.append(CALL)
            continue
        place, _, name = line.partition(" ")
        file, _, number = place.rpartition(":")
        frames.append(Frame(file if file.startswith(("/", "C:", "<")) else f"/home/me/{file}", int(number), name))
    return (*frames, MAIN) if main else tuple(frames)


class Program:
    def __init__(self, settings: str = "", total_bytes: int = 4096 * MIB) -> None:
        config = parse_config(settings) if settings else AllocatorConfig()
        self.recorder = Recorder(config, total_bytes, Completion.IMMEDIATE)
        self.stacks: dict[int, Stack] = {}
        self.live: dict[int, Stack] = {}

    def malloc(self, num_bytes: int, frames: Stack = (), stream: int = 0) -> Block | None:
        block = self.recorder.malloc(num_bytes, stream)
        self.stacks[len(self.recorder.events) - 1] = frames
        if block is not None:
            self.live[block.address] = frames
        return block

    def free(self, *blocks: Block | None) -> None:
        for block in blocks:
            assert block is not None
            self.recorder.free(block)

    def snapshot(self, last: int | None = None) -> Snapshot:
        """The recording of the `last` events, or of all."""
        found = self.recorder.snapshot(last)
        first = len(self.recorder.events) - len(found.traces[0])
        found.traces[0] = [
            event._replace(frames=self.stacks.get(first + index, ()), time_us=1000 + first + index)
            for index, event in enumerate(found.traces[0])
        ]
        found.segments = [
            segment._replace(
                blocks=tuple(
                    block._replace(frames=self.live.get(block.address, ()) if block.state != "inactive" else ())
                    for block in segment.blocks
                )
            )
            for segment in found.segments
        ]
        return found


WEIGHT = stack("model.py:5 __init__", op="empty_memory_format")
INPUT = stack("train.py:40 train", op="to_dtype_layout")
ACTIVATION = stack("model.py:12 forward", "call", op="mul_Tensor")
SAVED = stack("train.py:44 train", op="mean")
OPTIMIZER = stack(
    "/venv/lib/python3.12/site-packages/torch/optim/adamw.py:120 _init_group", "train.py:50 train", op="zeros_like"
)
GRADIENT: Stack = (
    Frame("", 0, "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"),
    Frame("", 0, "torch::autograd::Engine::evaluate_function()"),
)


def training(steps: int = 4, *, leak: bool = False, settings: str = "") -> Program:
    """A model of 30 MiB, trained: 40 MiB of activations, gradients, AdamW's state; a leak of 3 MiB per step."""
    program = Program(settings)
    weight = program.malloc(30 * MIB, WEIGHT)
    state: list[Block | None] = []
    assert weight is not None
    for _ in range(steps):
        inputs = program.malloc(2 * MIB, INPUT)
        activations = [program.malloc(20 * MIB, ACTIVATION) for _ in range(2)]
        if leak:
            program.malloc(3 * MIB, SAVED)
        gradient = program.malloc(30 * MIB, GRADIENT)
        program.free(*activations)
        if not state:
            state = [program.malloc(30 * MIB, OPTIMIZER) for _ in range(2)]
        program.free(gradient, inputs)
    return program
