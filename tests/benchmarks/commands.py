"""How long whole commands take, as multiples of `import torch`, beside their bars.

    python -m tests.benchmarks.commands [--repeat 5] [--before CHECKOUT] [--only NAME ...]

Each is a process of its own that begins with nothing cached, but for the line of the cache, which asks a second time.
In turn with each, `import torch` runs alone in the same environment: the ratio is that of the two medians, because a
machine's speed changes from one minute to the next. Byte code is on disk before the first.

A bar that is not met is printed as missed. Exit code 1 if one of those that were met when they were last measured
(docs/performance-tables.md has the figures) is exceeded by more than noise.

`libraries` is what every run of a model of transformers imports, memprof or not.
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_4B = "profile --model-size 4B --context-length 131072"
_ANSWERS = (0, 3, 4)  # exit codes; the others are errors
_REFUSED = (2,)
# A command until the first line of its progress stands, as on a terminal.
_FIRST_LINE = """
import os
from memprof.cli import progress
progress.Progress.shows_estimates = True
progress.Progress.show_estimate = lambda *arguments: os._exit(0)
from memprof.cli.main import run
run("{}".split())
"""
NOISE = 1.15  # medians of five of one command, minutes apart, differ by a tenth


@dataclass(frozen=True)
class Bar:
    """The most that a command may take, as a multiple of `import torch`."""

    ratio: float
    is_met: bool = True  # when it was last measured

    def judge(self, ratio: float) -> str:
        """Return how a measured ratio is to be printed: `met`, `missed`, or `FAIL` where that is news."""
        if ratio <= self.ratio:
            return "met"
        return "FAIL" if self.is_met and ratio > NOISE * self.ratio else "missed"


@dataclass(frozen=True)
class Command:
    """Words for `memprof`, or code for Python."""

    words: str
    bar: Bar | None = None
    code: bool = False
    again: bool = False  # the second call counts, with what the first has cached
    exit_codes: tuple[int, ...] = _ANSWERS


TORCH = Command("import torch", code=True)
COMMANDS = {
    "help": Command("--help", Bar(0.1)),
    "estimate": Command("estimate --params 1.2B", Bar(0.15, is_met=False)),  # Typer imports pydantic
    "wrong": Command("run nosuch.py", Bar(0.3), exit_codes=_REFUSED),
    "wrong-model": Command("profile --model nosuch --gpu h100-80gb", Bar(0.3), exit_codes=_REFUSED),
    "first": Command(_FIRST_LINE.format(_4B), Bar(0.45), code=True),
    "first-auto": Command(_FIRST_LINE.format(f"{_4B} --fix auto"), Bar(0.45), code=True),
    "first-search": Command(_FIRST_LINE.format("recommend --model llama-3.1-8b"), Bar(0.45), code=True),
    "libraries": Command(
        "import torch, torch._dynamo; import transformers.models.qwen3.modeling_qwen3, transformers.generation",
        code=True,
    ),
    "profile": Command(_4B, Bar(2.2, is_met=False)),
    "cached": Command(_4B, again=True),
    "deepseek": Command("profile --model deepseek-v3 --context-length 4096", Bar(5.0, is_met=False)),
    "script": Command("run --gpu h100-80gb tests/scripts/programs/llama_8b.py", Bar(4.0, is_met=False)),
    "auto": Command(f"{_4B} --fix auto", Bar(10.0, is_met=False)),
    "gpu": Command("recommend --gpu-vram 8", Bar(12.0, is_met=False)),
    "ladder": Command(f"{_4B} --ladder"),
    "lora": Command("recommend --model llama-3.1-8b --adapter lora"),
    "chunked": Command("verify chunked-loss"),
    "verify": Command("verify"),
}
BARRED = [name for name, command in COMMANDS.items() if command.bar is not None]


@dataclass(frozen=True)
class Took:
    seconds: float
    processor_seconds: float
    peak_bytes: int  # Of the largest of its processes.


def took(command: Command, checkout: Path, cache: str) -> Took:
    """Run it from `checkout`, with its own package and the environment of this Python, byte code apart."""
    arguments = ["-c", command.words] if command.code else ["-m", "memprof", *command.words.split()]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "MEMPROF_CACHE": cache}
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        environment.pop(name, None)
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
    if int(code) not in command.exit_codes:
        raise SystemExit(f"{command.words.strip()} failed with {code}")
    return Took(float(seconds), float(processor), int(kib) * 1024)


def measured(command: Command, checkout: Path) -> Took:
    """Once, with a cache of its own where the second call counts."""
    if not command.again:
        return took(command, checkout, "off")
    with tempfile.TemporaryDirectory() as folder:
        took(command, checkout, folder)
        return took(command, checkout, folder)


def main() -> int:
    """Print a line for each command; 1 if a bar that was met is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.commands")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--only", choices=COMMANDS, nargs="+", default=["libraries", *BARRED])
    options = parser.parse_args()
    checkouts = [ROOT] if options.before is None else [options.before.resolve(), ROOT]
    for checkout in checkouts:
        compileall.compile_dir(checkout / "memprof", quiet=2)
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "?"
    print(f"{os.cpu_count()} CPUs, load {load}, medians of {options.repeat}, python {sys.version.split()[0]}")
    print(f"{'':12}{'seconds':>9}{'processor':>11}{'GiB':>6}{'torch':>7}{'ratio':>7}{'before':>8}{'bar':>6}")
    failed = False
    for name in options.only:
        command = COMMANDS[name]
        torch: list[float] = []
        runs: dict[Path, list[Took]] = {checkout: [] for checkout in checkouts}
        for _ in range(options.repeat):
            torch.append(took(TORCH, ROOT, "off").seconds)
            for checkout in checkouts:
                runs[checkout].append(measured(command, checkout))
        alone = statistics.median(torch)
        *before, now = (statistics.median(one.seconds for one in runs[checkout]) for checkout in checkouts)
        processor = statistics.median(one.processor_seconds for one in runs[ROOT])
        peak = max(one.peak_bytes for one in runs[ROOT])
        line = f"{name:12}{now:>9.2f}{processor:>11.2f}{peak / (1 << 30):>6.2f}{alone:>7.2f}{now / alone:>7.2f}"
        line += f"{before[0] / alone:>8.2f}" if before else " " * 8
        if command.bar is not None:
            verdict = command.bar.judge(now / alone)
            line += f"{command.bar.ratio:>6.2f}  {verdict}"
            failed |= verdict == "FAIL"
        print(line.rstrip(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
