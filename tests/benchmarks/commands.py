"""How long whole commands take, beside their bars; with another checkout, both in turn in one run.

    python -m tests.benchmarks.commands [--repeat 3] [--before CHECKOUT] [--only NAME ...]

Each is a process of its own that begins with nothing kept, but for the line of the cache, which asks a second time. Two
figures each: seconds that pass, which are those of this machine at this hour, and seconds of a processor, with all
processes that were forked. Exit code 1 if a bar is missed (seconds that pass, on two idle cores).

`torch` is what importing it alone takes; `libraries` what every run of a model of transformers imports.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_4B = "profile --model-size 4B --context-length 131072"
_ANSWERS = (0, 3, 4)
"""Exit codes of an answer; the others are errors."""


@dataclass(frozen=True)
class Command:
    """Words for `memprof`, or code for Python; the bar in seconds, None where there is none."""

    words: str
    bar: float | None
    code: bool = False
    again: bool = False
    """The second call counts, with what the first has kept."""


COMMANDS = {
    "help": Command("--help", 0.3),
    "estimate": Command("estimate --params 1.2B", 0.4),
    "torch": Command("import torch", None, code=True),
    "libraries": Command(
        "import torch, torch._dynamo; import transformers.models.qwen3.modeling_qwen3, transformers.generation",
        None,
        code=True,
    ),
    "profile": Command(_4B, 2.5),
    "cached": Command(_4B, 0.4, again=True),
    "deepseek": Command("profile --model deepseek-v3", 4.0),
    "ladder": Command(f"{_4B} --ladder", 10.0),
    "auto": Command(f"{_4B} --fix auto", 15.0),
    "card": Command("recommend --gpu-vram 8", 10.0),
    "lora": Command("recommend --model llama-3.1-8b --adapter lora", 25.0),
    "chunked": Command("verify chunked-loss", 10.0),
    "verify": Command("verify", 60.0),
}


@dataclass(frozen=True)
class Took:
    """A process that ended."""

    seconds: float
    processor_seconds: float
    peak_bytes: int
    """Of the largest of its processes."""


def took(command: Command, checkout: Path, cache: str) -> Took:
    """Run it from `checkout`, with its own package and the environment of this Python."""
    arguments = ["-c", command.words] if command.code else ["-m", "memprof", *command.words.split()]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "MEMPROF_CACHE": cache}
    measure = (
        "import json, resource, subprocess, sys, time\n"
        "begin = time.perf_counter()\n"
        "code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(code, time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", measure, sys.executable, *arguments],
        cwd=checkout, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    code, seconds, processor, kib = done.stdout.split()
    if int(code) not in _ANSWERS:
        raise SystemExit(f"{command.words} failed with {code}")
    return Took(float(seconds), float(processor), int(kib) * 1024)


def measured(command: Command, checkout: Path) -> Took:
    """Once, with a cache of its own where the second call counts."""
    if not command.again:
        return took(command, checkout, "off")
    with tempfile.TemporaryDirectory() as folder:
        took(command, checkout, folder)
        return took(command, checkout, folder)


def main() -> int:
    """Print a line for each command; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.commands")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--only", choices=COMMANDS, nargs="+", default=list(COMMANDS))
    options = parser.parse_args()
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "?"
    print(f"{os.cpu_count()} CPUs, load {load}, median of {options.repeat}, python {sys.version.split()[0]}")
    print(f"{'':10}{'seconds':>9}{'processor':>11}{'GiB':>6}{'before':>9}{'processor':>11}{'ratio':>7}{'bar':>7}")
    missed = False
    for name in options.only:
        command = COMMANDS[name]
        now, before = [], []
        for _ in range(options.repeat):
            if options.before is not None:
                before.append(measured(command, options.before.resolve()))
            now.append(measured(command, ROOT))
        seconds = statistics.median(one.seconds for one in now)
        processor = statistics.median(one.processor_seconds for one in now)
        peak = max(one.peak_bytes for one in now)
        line = f"{name:10}{seconds:>9.2f}{processor:>11.2f}{peak / (1 << 30):>6.2f}"
        if before:
            then = statistics.median(one.processor_seconds for one in before)
            line += f"{statistics.median(one.seconds for one in before):>9.2f}{then:>11.2f}{processor / then:>7.2f}"
        else:
            line += " " * 27
        if command.bar is not None:
            line += f"{command.bar:>7.1f}  {'pass' if seconds < command.bar else 'FAIL'}"
            missed |= seconds >= command.bar
        print(line, flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
