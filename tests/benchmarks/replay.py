"""How fast the caching allocator is replayed, and in how much memory.

    python -m tests.benchmarks.replay [--quick]

Every line is measured in a process of its own, on one core, in processor time, as the median of three repetitions (one
with --quick): by plain Python, and by the compiled rules where numba is installed, without and with the time to import
it and to load them. Exit code 1 if a bar is missed: 200,000 events per second, and 2,000,000 compiled (1,000,000 with
settings); 1,000,000 events in 10 s and 2 GiB.

The stream has two shapes: a training step's (long-lived parameters, activations that go in the reverse order of their
making, temporaries) and a random one with hundreds of live blocks of many sizes.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import itertools
import json
import os
import pstats
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memprof.allocator import TraceReplay, parse_config
from memprof.allocator.compiled import loading
from tests.unit.allocator.replaying import replay
from tests.unit.allocator.traces import Script

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
EVENTS_PER_SECOND = 200_000
COMPILED_PER_SECOND = 2_000_000
COMPILED_WITH_SETTINGS = 1_000_000
"""Segments that grow, and requests that no cached block may serve, are plain Python's."""
SECONDS, BYTES = 10, 2 << 30
SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:8")

Requests = list[tuple[int, int]]


def training(events: int) -> Requests:
    """Steps of a model of 24 layers: what lives for a step, for a layer, for a moment."""
    requests: Requests = []
    name = 0

    def take(size: int) -> int:
        nonlocal name
        name += 1
        requests.append((name, size))
        return name

    for _ in range(24 * 12):
        take(4 * MIB + 512)
    while len(requests) < events:
        kept = []
        for _ in range(24):
            for size in (8 * MIB, 24 * MIB, 8 * MIB, 65_536, 2 * MIB + 100):
                temporary = take(size * 2)
                kept.append(take(size))
                requests.append((temporary, 0))
        while kept:
            gradient, temporary = take(12 * MIB), take(4096)
            requests += [(kept.pop(), 0), (temporary, 0), (gradient, 0)]
    return requests


def scattered(events: int) -> Requests:
    """Random sizes, random lives, up to 400 blocks at a time."""
    r = random.Random(0)
    sizes = [r.choice((512, 4096, 65_536, MIB, 3 * MIB, 16 * MIB, r.randrange(1, 200 * MIB))) for _ in range(60)]
    requests: Requests = []
    live: list[int] = []
    while len(requests) < events:
        if live and (len(live) >= 400 or r.random() < 0.45):
            requests.append((live.pop(r.randrange(len(live))), 0))
        else:
            live.append(len(requests))
            requests.append((len(requests), r.choice(sizes)))
    return requests


SHAPES = {"training": training, "scattered": scattered}


def measure(shape: str, events: int, text: str) -> dict[str, float]:
    """Seconds and peak resident bytes of one replay in this process, by plain Python."""
    requests = SHAPES[shape](events)
    config = parse_config(text)
    begin = time.process_time()
    replay(requests, config)
    return _measured(len(requests), time.process_time() - begin)


def measure_compiled(shape: str, events: int, text: str, folder: str) -> dict[str, float]:
    """The same by the compiled rules, which are kept in `folder`, of a trace of these requests.

    Raises:
        RuntimeError: there is no numba that works.
    """
    script, names = Script(), dict[int, int]()
    for name, num_bytes in SHAPES[shape](events):
        if num_bytes:
            names[name] = script.new(num_bytes)
        else:
            script.free(names.pop(name))
    os.environ["MEMPROF_CACHE"] = folder
    begin = time.process_time()
    loading._loaded.append(loading.load())
    loaded = time.process_time()
    if loading._loaded == [None]:
        raise RuntimeError("numba is not installed, or does not work")
    player = TraceReplay(script.trace, None, parse_config(text))
    player.advance()
    player.finish()
    return _measured(player.event, time.process_time() - loaded) | {"loading": loaded - begin}


def _measured(events: int, seconds: float) -> dict[str, float]:
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"events": events, "seconds": seconds, "bytes": resident, "loading": 0.0}


def _apart(function: str, *arguments: object) -> dict[str, float]:
    call = f"import json; from tests.benchmarks.replay import {function}; print(json.dumps({function}(*{arguments!r})))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def _what_limits(events: int) -> list[str]:
    """The functions where the time goes, by share of it."""
    requests = scattered(events)
    profile = cProfile.Profile()
    profile.runcall(replay, requests)
    stats = pstats.Stats(profile)
    total = sum(entry[2] for entry in stats.stats.values())  # type: ignore[attr-defined]
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:4]  # type: ignore[attr-defined]
    return [f"{name[2]} {entry[2] / total:.0%}" for name, entry in rows]


def main() -> int:
    """Print the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repetition")
    repetitions = 1 if parser.parse_args().quick else 3
    missed = False
    print(
        f"{'stream':<10} {'settings':<28} {'by':<8} {'events':>9} {'seconds':>8} {'events/s':>10} "
        f"{'with loading':>12} {'MiB':>6}"
    )
    for shape, text, events in itertools.product(SHAPES, SETTINGS, (200_000, 1_000_000)):
        if events == 200_000 or not text:
            runs = [_apart("measure", shape, events, text) for _ in range(repetitions)]
            missed |= _show(f"{shape:<10} {text or 'default':<28} Python  ", EVENTS_PER_SECOND, runs)
    if importlib.util.find_spec("numba") is not None:
        with tempfile.TemporaryDirectory() as folder:
            _apart("measure_compiled", "training", 1, "", folder)  # compiles, and keeps it
            for shape, text in itertools.product(SHAPES, SETTINGS):
                bar = COMPILED_WITH_SETTINGS if text else COMPILED_PER_SECOND
                runs = [_apart("measure_compiled", shape, 1_000_000, text, folder) for _ in range(repetitions)]
                missed |= _show(f"{shape:<10} {text or 'default':<28} compiled", bar, runs)
    print("time of plain Python goes to: " + ", ".join(_what_limits(50_000)))
    return int(missed)


def _show(what: str, bar: int, runs: list[dict[str, float]]) -> bool:
    """A line of the table; whether a bar is missed."""
    seconds, loaded = (statistics.median(run[name] for run in runs) for name in ("seconds", "loading"))
    events, size = int(runs[0]["events"]), max(run["bytes"] for run in runs)
    ok = events / seconds >= bar
    ok &= events < 1_000_000 or (seconds < SECONDS and size < BYTES)
    print(
        f"{what} {events:>9,} {seconds:>8.2f} {events / seconds:>10,.0f} {events / (seconds + loaded):>12,.0f} "
        f"{size / MIB:>6.0f}{'' if ok else '   bar missed'}"
    )
    return not ok


if __name__ == "__main__":
    sys.exit(main())
