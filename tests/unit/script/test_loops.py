"""How many steps a program makes, by its loops: of each way to write them, stopped in its fourth step."""

from __future__ import annotations

import argparse
import linecache
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest

from memprof.script.loops import (
    Bound,
    Loop,
    Position,
    count_loops_that_repeat,
    count_rounds_left,
    estimate_total_steps,
    find_position,
    is_last_round,
)

BEFORE = "i = 0\nargs = Namespace(steps=50, epochs=3)\nloader = [0] * 40\nconfig = {'steps': 60}\n"


def planned(text: str, stop: int = 4, **given: object) -> int | None:
    """What is known when a program has called `step()` so often."""
    found: list[Position] = []

    class Stop(Exception):
        pass

    def step() -> None:
        found.append(find_position(len(found) + 1, sys._getframe(1)))
        if len(found) == stop:
            raise Stop

    text = BEFORE + textwrap.dedent(text)
    linecache.cache["a program"] = (len(text), None, text.splitlines(keepends=True), "a program")
    names = {"step": step, "Namespace": argparse.Namespace, "tqdm": lambda it, **_: it, **given}
    ended: list[BaseException] = []

    def run() -> None:
        try:
            exec(compile(text, "a program", "exec"), names)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)  # whose stack has none of pytest's loops
    thread.start()
    thread.join()
    assert isinstance(ended[0], Stop), ended
    return estimate_total_steps(found[1:-1], found[-1])


@pytest.mark.parametrize(
    ("loops", "step", "rounds"),
    [
        ((), 5, None),
        ((Loop(("a.py", 1)),), 5, None),  # of no known bounds
        ((Loop(("a.py", 1), (Bound(10, 5, is_counter=True),)),), 5, None),
        ((Loop(("a.py", 1), (Bound(None, 5),)),), 5, None),
        ((Loop(("a.py", 1), (Bound(10, 3),)),), 9, (4, 6)),  # with this one
        ((Loop(("a.py", 1), (Bound(10, 9),)),), 9, (10, 0)),
        ((Loop(("a.py", 1), (Bound(10),)),), 4, (4, 6)),  # steps count the iterations
        ((Loop(("a.py", 1), (Bound(10),)),), 10, (10, 0)),
        ((Loop(("a.py", 1), (Bound(10),)),), 11, None),  # but not in a second pass
        ((Loop(("a.py", 1), (Bound(10, 9),)), Loop(("a.py", 2), (Bound(10, 0),))), 9, (1, 9)),  # the innermost counts
    ],
)
def test_the_rounds_of_a_loop(loops, step, rounds):
    assert count_rounds_left(Position(step, loops)) == rounds


@pytest.mark.parametrize(
    ("bounds", "is_last"),
    [
        ((), False),
        ((Bound(None, 3),), False),
        ((Bound(3, 1),), False),
        ((Bound(3, 2),), True),
        ((Bound(3, 5, is_counter=True),), False),
        ((Bound(1),), True),
        ((Bound(2),), False),  # where it is, is not known
    ],
)
def test_the_last_round_of_a_loop(bounds, is_last):
    assert is_last_round(Loop(("a.py", 1), bounds)) == is_last


RUN = "def run(model):\n    for epoch in range(2):\n        for batch in range(3):\n            step()\n"
BUILD_AND_RUN = "def run():\n    model = 1\n    for epoch in range(2):\n        step()\n"


@pytest.mark.parametrize(
    ("text", "line", "count"),
    [
        ("model = 1\nfor epoch in range(2):\n    step()\n", 1, 0),  # built once
        ("for fold in range(2):\n    model = 1\n    for batch in range(3):\n        step()\n", 2, 1),
        ("for rate in range(2):\n  for fold in range(2):\n    model = 1\n    for b in range(3):\n      step()\n", 3, 2),
        ("for batch in range(3):\n    model = 1\n    step()\n", 2, 1),
        (f"{RUN}for fold in range(2):\n    model = 1\n    run(model)\n", 6, 1),  # the loops of `run` are of one model
        (f"{RUN}model = 1\nfor again in range(2):\n    run(model)\n", 5, 0),
        (f"{BUILD_AND_RUN}for fold in range(2):\n    run()\n", 2, 1),  # built in the function that the loop calls
        (f"{BUILD_AND_RUN}run()\n", 2, 0),
    ],
)
def test_loops_that_build_again(text, line, count):
    counts: list[int] = []
    linecache.cache["folds"] = (len(text), None, text.splitlines(keepends=True), "folds")
    names = {"step": lambda: counts.append(count_loops_that_repeat(sys._getframe(1), {("folds", line), ("else", 1)}))}
    thread = threading.Thread(target=exec, args=(compile(text, "folds", "exec"), names))
    thread.start()
    thread.join()
    assert set(counts) == {count}


def function(text: str) -> str:
    return "def train():\n" + textwrap.indent(textwrap.dedent(text), "    ") + "\ntrain()\n"


@pytest.mark.parametrize("wrap", [str, function], ids=["module", "function"])
@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("for _ in range(20_000): step()", 20_000),
        ("for i in range(10, 110, 2):\n    step()", 50),
        ("for i in range(args.steps * 2 - 1):\n    step()", 99),
        ("for i in range(config['steps'] // 2):\n    step()", 30),
        ("argv = ['a.py', '70']\nfor i in range(int(argv[1])):\n    step()", 70),
        ("for i in tqdm(range(int(70.0)), desc='x'):\n    step()", 70),
        ("for _ in range(args.epochs):\n    for batch in loader:\n        step()", 120),
        ("for _ in range(args.epochs):\n    for i, batch in enumerate(tqdm(loader), start=1):\n        step()", 120),
        ("for a, b in zip(loader, range(30)):\n    step()", 30),
        ("for i in range(len(loader) + 1):\n    step()", 41),
        # Every second round ends a step.
        ("for i in range(200):\n    if i % 2:\n        step()", 100),
        ("for i in range(90):\n    for part in range(3):\n        pass\n    step()", 90),
        # A counter with a limit.
        ("n = 0\nwhile n < args.steps:\n    step()\n    n += 1", 50),
        ("n = 0\nwhile True:\n    n += 1\n    if n >= args.steps:\n        break\n    step()", 50),
        ("n = 0\nwhile 1:\n    if n > 50: break\n    n += 1\n    step()", 51),
        ("n = 0\nfor _ in range(9):\n  for b in loader:\n    n += 1\n    if 50 <= n: break\n    step()", 360),
        ("n = 0\nwhile True:\n    step()\n    n += 2\n    if n == 80 or False:\n        exit()", 40),
        ("for i in range(400):\n    if i == 25:\n        break\n    step()", 25),
    ],
)  # fmt: skip
def test_its_own_number(text: str, steps: int, wrap) -> None:
    assert planned(wrap(text)) == pytest.approx(steps, abs=2)


@pytest.mark.parametrize(
    "text",
    [
        "while True:\n    step()",
        "for batch in iter(lambda: 0, 1):\n    step()",
        "for _ in range(3):\n    for batch in iter(lambda: 0, 1):\n        step()",
        "while True:\n    for batch in loader:\n        step()",
        # A counter that does not move may count anything; so may one in a condition that is not looked into.
        "bad = 0\nwhile bad < 3:\n    step()",
        "n = 0\nwhile True:\n    n += 1\n    if args.epochs == 9:\n        if n > 6:\n            break\n    step()",
        "n = 0\nwhile True:\n    n += 1\n    if n > 6 and args.epochs == 9:\n        break\n    step()",
        "n = 1.0\nwhile n > 0.1:\n    n /= 2\n    step()",
        "[step() for _ in range(50)]",
        "list(map(lambda _: step(), range(50)))",
        "step()\nstep()\nstep()\nstep()\nstep()",
        # More than one step in a round, where no variable tells how far it is.
        "for _ in [1, 2]:\n    step()\n    step()\n    step()",
    ],
)
def test_where_the_loops_do_not_tell(text: str) -> None:
    assert planned(text) is None


def test_a_counter_beside_a_loop_that_ends_before() -> None:
    """Patience that does not move, and a limit that comes later."""
    text = "n = 0\nbad = 0\nfor i in range(30):\n    step()\n    n += 1\n    if n > 99: break\n    if bad > 2: break"
    assert planned(text) == 30


def test_a_loop_without_source_code_is_not_known() -> None:
    frame = SimpleNamespace(
        f_code=compile("pass", "nowhere to be found", "exec"), f_lineno=1, f_globals={}, f_locals={}, f_back=None
    )
    assert find_position(1, frame).loops == (Loop(("nowhere to be found", 1)),)  # type: ignore[arg-type]


def test_a_length_that_raises_is_not_known() -> None:
    class Stream:
        def __len__(self) -> int:
            raise TypeError("it goes on for ever")

        def __iter__(self):
            return iter([0] * 9)

    assert planned("for batch in stream:\n    step()", stream=Stream()) is None


def test_positions_of_other_loops_tell_nothing() -> None:
    """A warm-up before the loop proper."""
    text = "for _ in range(3):\n    step()\nfor _ in range(70):\n    step()"
    assert planned(text, stop=4) is None
    assert planned(text, stop=6) == pytest.approx(73, abs=3)


def test_what_the_program_lets_go_of_is_not_kept() -> None:
    gone: list[str] = []

    class Big:
        def __del__(self) -> None:
            gone.append("gone")

    text = "for i in range(9):\n    big = Big()\n    step()\n    del big\n    assert gone.pop() == 'gone'"
    planned(function(text), Big=Big, gone=gone)


def test_another_file_of_the_same_name_is_read_anew(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for steps in (30, 700):
        text = f"# {steps}\nfor i in range({steps}):\n  found.append(position(i, sys._getframe()))\n  if i > 3: break\n"
        (tmp_path / "train.py").write_text(text)
        found: list[Position] = []
        exec(compile(text, "train.py", "exec"), {"found": found, "position": find_position, "sys": sys})
        loop = found[-1].loops[-1]
        assert loop.location == ("train.py", 2) and loop.bounds[0].total == steps
