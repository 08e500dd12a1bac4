"""Training steps at which a program's loops do something for the first time."""

from __future__ import annotations

import contextlib
import linecache
import sys
import textwrap
import threading

import pytest

from memprof.script.first_rounds import FirstRounds


def count_to_come(text: str, stop: int) -> int | None:
    """Return how many steps are to come at step `stop` of a program until its loops do something new."""
    rounds, steps = FirstRounds(), 0

    def step() -> None:
        nonlocal steps
        steps += 1
        rounds.record_step(steps, sys._getframe(1))
        if steps == stop:
            raise KeyboardInterrupt

    text = textwrap.dedent(text)
    name = "a program with loops"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names = {
        "step": step,
        "loader": [0] * 40,
        "generate": int,
        "log": int,
        "images": [],
        "unknown": lambda: iter([0] * 40),
    }

    def run() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            exec(compile(text, name, "exec"), names)

    thread = threading.Thread(target=run)  # whose stack has none of pytest's loops
    thread.start()
    thread.join()
    assert steps == stop
    return rounds.count_steps_to_come(steps)


@pytest.mark.parametrize(
    ("text", "stop", "to_come"),
    [
        ("for batch in loader:\n    step()", 3, 38),  # what follows the training
        ("for epoch in range(3):\n  for batch in loader:\n    step()", 5, 41),  # the second epoch
        ("for epoch in range(3):\n  for batch in loader:\n    step()", 46, 75),  # then the end
        ("for epoch in range(3):\n  for i, batch in enumerate(loader):\n    step()", 45, 1),
        ("for epoch in range(3):\n  for batch in unknown():\n    step()", 5, 1),  # at any time
        ("while True:\n  step()", 70, 1),
        ("for batch in range(1000):\n  step()\n  if batch % 90 == 0:\n    generate()", 8, 83),
        ("for batch in range(1000):\n  step()\n  if batch % 90 == 0:\n    log()", 8, 993),
        ("for batch in range(1000):\n  step()\n  if batch % 90 == 0:\n    images.append(1)", 8, 263),
        # Two optimizers: twice as many steps as rounds; estimated in step 32, of round 16, from step 1 on.
        ("for batch in range(100):\n  step()\n  step()", 60, 32 + 174 - 60 + 1),
    ],
)
def test_what_loops_do_for_the_first_time(text: str, stop: int, to_come: int) -> None:
    assert count_to_come(text, stop) == to_come


def test_nothing_new_is_to_come_in_later_rounds() -> None:
    rounds = FirstRounds()
    rounds.record_step(1, None)
    assert rounds.count_steps_to_come(1) is None
