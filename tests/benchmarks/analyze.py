"""How fast, and in how much memory, `memprof analyze` reads a large snapshot.

    python -m tests.benchmarks.analyze [--megabytes 100] [--keep FILE]

A training run is recorded by our own allocator, with stacks of the depth that torch records, and written as torch does,
with as many steps as fill the file; it is analysed in a process of its own. The exit code is 1 below the bars: 6
seconds and 410 MiB for 100 MB, in proportion (60 seconds and 4 GiB for 1 GB).
"""

from __future__ import annotations

import argparse
import pickle
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from memprof.report.export.memory_viz import convert_snapshot
from memprof.trace.snapshot import Frame, Snapshot, SnapshotEvent, Stack
from tests.unit.snapshots.builder import CALL, MAIN, MIB, Program

SECONDS_PER_100_MB = 6
MEMORY_PER_100_MB = (4 << 30) // 10
LAYERS = 24
DEPTH = 60  # Frames of a stack: torch keeps about so many with stacks="all".
# Of a block an allocation, and two for its free; as many gradients as blocks that live on.
STEP_EVENTS = LAYERS * (8 * 3 + 6 * 3)


def made(layer: int, line: int) -> Stack:
    """A stack of DEPTH frames."""
    native = [Frame("RegisterCUDA.cpp", 0, f"at::_ops::op{line}_Tensor::call(at::Tensor const&)")]
    native += [
        Frame("??", 0, f"c10::impl::wrap_kernel_functor_unboxed_{i}(at::Tensor const&)") for i in range(DEPTH // 2)
    ]
    python = [Frame("/home/me/model.py", 100 + line, "forward"), CALL]
    python += [Frame(f"/home/me/wrapper{i}.py", 10 + layer, "call") for i in range(DEPTH // 2 - 3)]
    return (*native, *python, MAIN)


def training(steps: int) -> Snapshot:
    """Steps of LAYERS layers, eight activations each, and their backward."""
    program = Program(total_bytes=64 << 30)
    stacks = [[made(layer, line) for line in range(8)] for layer in range(LAYERS)]
    for _ in range(steps):
        live = []
        for layer in range(LAYERS):
            for line in range(8):
                block = program.malloc((1 + line) * MIB + 512 * layer, stacks[layer][line])
                if line % 4 == 3:
                    program.free(block)
                else:
                    live.append(block)
        for number, block in enumerate(reversed(live)):
            gradient = program.malloc(3 * MIB + 512 * number, stacks[number % LAYERS][0])
            program.free(block, gradient)
    return program.snapshot()


def repeated(snapshot: Snapshot, megabytes: int, to: BinaryIO) -> int:
    """Write `snapshot` as torch does, its last step again and again until the file has this size; how many events.

    Every event has a list of frames of its own, as in torch's files; the frames are there once.
    """
    (events,) = snapshot.traces
    step = STEP_EVENTS
    assert [event[:3] for event in events[-step:]] == [event[:3] for event in events[-2 * step : -step]]
    start = to.tell()
    writer = _Writer(to)
    to.write(b"\x80\x04}(")
    writer.text("segments")
    writer.rest(convert_snapshot(snapshot)["segments"])
    writer.text("device_traces")
    to.write(b"](](")
    count = 0
    while count < len(events) or to.tell() - start < megabytes * 1_000_000:
        at = count if count < len(events) else len(events) - step
        for event in events[at : at + step]:
            writer.event(event, 1000 + count)
            count += 1
        to.write(b"e(")
    to.write(b"eeu.")
    return count


class _Writer:
    """Opcodes of a pickle, with texts and frames written once: events as torch writes them, without their objects."""

    def __init__(self, to: BinaryIO) -> None:
        self.to = to
        self.memo = 0
        self.known: dict[object, bytes] = {}

    def rest(self, value: object) -> None:
        """Any value, without sharing."""
        if isinstance(value, dict):
            self.to.write(b"}(")
            for key, own in value.items():
                self.text(key)
                self.rest(own)
            self.to.write(b"u")
        elif isinstance(value, list):
            self.to.write(b"](")
            for own in value:
                self.rest(own)
            self.to.write(b"e")
        elif isinstance(value, str):
            self.text(value)
        else:
            self.to.write(pickle.dumps(value, 3)[2:-1].replace(b"q\0", b""))  # numbers and a pool's pair of them

    def text(self, text: str, *, again: bool = True) -> None:
        if again and self.get(text):
            return
        data = text.encode()
        self.to.write(b"\x8c" + bytes([len(data)]) + data + b"\x94")
        self.keep(text)

    def get(self, what: object) -> bool:
        known = self.known.get(what)
        if known is not None:
            self.to.write(known)
        return known is not None

    def keep(self, what: object) -> None:
        self.known[what] = b"h%c" % self.memo if self.memo < 256 else b"j" + struct.pack("<I", self.memo)
        self.memo += 1

    def event(self, event: SnapshotEvent, time: int) -> None:
        self.to.write(b"}\x94(")
        self.memo += 1
        numbers = {"addr": event.address, "size": event.size, "stream": event.stream, "time_us": time}
        self.text("action")
        self.text(event.action.value)
        for key, number in numbers.items():
            self.text(key)
            self.to.write(pickle.dumps(number, 2)[2:-1])
        self.text("compile_context")
        self.to.write(b"\x8c\x03N/A\x94")
        self.memo += 1
        self.text("frames")
        self.to.write(b"]\x94")
        self.memo += 1
        if event.frames:
            self.to.write(b"(")
            for frame in event.frames:
                if not self.get(frame):
                    self.to.write(b"}\x94(")
                    self.keep(frame)
                    for key, value in frame._asdict().items():
                        self.text(key)
                        self.rest(value)
                    self.to.write(b"u")
            self.to.write(b"e")
        self.to.write(b"u")


def main() -> int:
    """Make the file, analyse it, and print what it took; 1 below the bars."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.analyze")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--keep", type=Path, help="leave the snapshot here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = options.keep or Path(folder) / "large.pickle"
        with file.open("wb") as to:
            events = repeated(training(10), options.megabytes, to)
        size = file.stat().st_size
        begin = time.monotonic()
        subprocess.run([sys.executable, "-m", "memprof", "analyze", str(file)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - begin
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used, user = children.ru_maxrss << 10, children.ru_utime
    share = size / 1e8
    print(
        f"{size / 1e6:.1f} MB, {events:,} events: {seconds:.1f} s, {user:.1f} of a processor "
        f"({events / user:,.0f} events a second), "
        f"{used / 2**30:.2f} GiB at most, {used / size:.1f} bytes of memory per byte of the file"
    )
    return int(seconds > SECONDS_PER_100_MB * share or used > MEMORY_PER_100_MB * share)


if __name__ == "__main__":
    sys.exit(main())
