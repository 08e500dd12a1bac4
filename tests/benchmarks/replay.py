"""How fast the caching allocator is replayed, and in how much memory.

    python -m tests.benchmarks.replay [--quick]

Every line is measured in a process of its own, on one core, in processor time, as the median of three repetitions (one
with --quick). Exit code 1 if a bar is missed: 200,000 events per second; 1,000,000 events in 10 s and 2 GiB.

The stream has two shapes: a training step's (long-lived parameters, activations that go in the reverse order of their
making, temporaries) and a random one with hundreds of live blocks of many sizes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from memprof.allocator import parse_config
from tests.unit.allocator.replaying import replay

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
EVENTS_PER_SECOND = 200_000
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
    """Seconds and peak resident bytes of one replay in this process."""
    requests = SHAPES[shape](events)
    config = parse_config(text)
    begin = time.process_time()
    replay(requests, config)
    seconds = time.process_time() - begin
    return {
        "events": len(requests),
        "seconds": seconds,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _apart(shape: str, events: int, text: str) -> dict[str, float]:
    arguments = f"{shape!r}, {events}, {text!r}"
    call = f"import json; from tests.benchmarks.replay import measure; print(json.dumps(measure({arguments})))"
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
    print(f"{'stream':<10} {'settings':<28} {'events':>9} {'seconds':>8} {'events/s':>10} {'MiB':>6}")
    for shape in SHAPES:
        for text in SETTINGS:
            for events in (200_000, 1_000_000):
                if events == 1_000_000 and text:
                    continue
                runs = [_apart(shape, events, text) for _ in range(repetitions)]
                seconds = statistics.median(run["seconds"] for run in runs)
                count, size = runs[0]["events"], max(run["bytes"] for run in runs)
                ok = count / seconds >= EVENTS_PER_SECOND and (
                    events < 1_000_000 or (seconds < SECONDS and size < BYTES)
                )
                missed |= not ok
                print(
                    f"{shape:<10} {text or 'default':<28} {count:>9,} {seconds:>8.2f} {count / seconds:>10,.0f} "
                    f"{size / MIB:>6.0f}{'' if ok else '   bar missed'}"
                )
    print("time goes to: " + ", ".join(_what_limits(50_000)))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
