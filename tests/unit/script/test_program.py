from __future__ import annotations

import os
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from memprof.errors import UsageError
from memprof.flows.script import run_script
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, StopRule, capture, read_program, stop
from memprof.script.program import print_error
from memprof.script.stop import (
    MAX_CHEAP_EVENTS,
    MAX_CHEAP_SECONDS,
    MAX_GROWING_EVENTS,
    MAX_GROWING_SECONDS,
    MAX_SLOW_EVENTS,
    MIN_GROWTH_BYTES,
    NUM_EXTRA_STEPS,
    RunProgress,
    StopRun,
)


@pytest.fixture
def script(tmp_path):
    def write(text: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return str(path)

    return write


def test_it_is_main_and_finds_its_arguments_and_its_folder(script, capsys):
    script("VALUE = 7\n", "beside.py")
    name = script(
        """
        import pickle, sys
        import beside
        class Point: pass
        print(__name__, sys.argv[1:], beside.VALUE, __file__, type(pickle.loads(pickle.dumps(Point()))) is Point)
        """
    )
    before = sys.argv, sys.path[:], os._exit, sys.modules["__main__"]
    outcome = Program(name, ("--lr", "1e-3")).run(StopRule())
    assert outcome.ended is EndReason.EXIT and outcome.exit_code == 0
    assert capsys.readouterr().out == f"__main__ ['--lr', '1e-3'] 7 {name} True\n"
    assert (sys.argv, sys.path, os._exit, sys.modules["__main__"]) == before


def test_a_module(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "package").mkdir()
    script("", "package/__init__.py")
    script("import sys; from . import other; print(__name__, sys.argv[1:], other.X)", "package/train.py")
    script("X = 3", "package/other.py")
    monkeypatch.chdir(tmp_path)
    program = Program("package.train", ("a",), is_module=True)
    program.check()
    assert program.run(StopRule()).ended is EndReason.EXIT
    assert capsys.readouterr().out == "__main__ ['a'] 3\n"
    assert program.command == ["-m", "package.train", "a"]


def test_a_command_that_a_package_has_installed(script, tmp_path, monkeypatch, capsys):
    command = script("#!/usr/bin/env python3\nimport sys; print(sys.argv)", "serve-model")
    script("#!/bin/sh\necho", "shell-script")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    program = Program("serve-model", ("--port", "1"))
    program.check()
    assert program.run(StopRule()).ended is EndReason.EXIT
    assert capsys.readouterr().out == f"['{command}', '--port', '1']\n"
    assert program.command == ["serve-model", "--port", "1"]
    with pytest.raises(UsageError, match="no such script"):
        Program("shell-script").check()


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("train.py -m 3", Program("train.py", ("-m", "3"))),
        ("python train.py -u", Program("train.py", ("-u",))),
        ("/usr/bin/python3.12 -u -m package.train a", Program("package.train", ("a",), is_module=True)),
        ("pythonic", Program("pythonic")),
    ],
)
def test_python_before_a_script_or_a_module(words, program):
    assert read_program(words.split(), is_module=False) == program


@pytest.mark.parametrize("words", ["python", "python -m", "python -c print()", "python3 -X dev train.py"])
def test_python_without_a_program_to_run(words):
    with pytest.raises(UsageError, match="runs no program"):
        read_program(words.split(), is_module=False)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("import os; os._exit(5)", 5, ""),
    ],
)
def test_ways_out(script, capsys, text, code, said):
    outcome = Program(script(text)).run(StopRule())
    assert (outcome.ended, outcome.exit_code) == (EndReason.EXIT, code)
    assert capsys.readouterr().err == said


def test_its_own_error_is_shown_without_what_ran_it(script, capsys):
    name = script(
        """
        def inner():
            raise KeyError("x")
        try:
            inner()
        except KeyError as error:
            raise ValueError("bad") from error
        """
    )
    outcome = Program(name).run(StopRule())
    assert (outcome.ended, outcome.exit_code) == (EndReason.ERROR, 1)
    print_error(outcome.error)
    shown = capsys.readouterr().err
    assert shown.count(f'File "{name}"') == 3
    assert "runpy" not in shown and "memprof" not in shown
    assert shown.endswith("ValueError: bad\n") and "direct cause" in shown


@pytest.mark.parametrize(("error", "has_library"), [("torch.OutOfMemoryError", False), ("ValueError", True)])
def test_where_memory_runs_out_the_frames_of_libraries_are_left_out(script, capsys, error, has_library):
    """The report names the operator and its line."""
    name = script(
        f"""
        import torch
        def fail(module, arguments):
            raise {error}("full")
        layer = torch.nn.Linear(1, 1)
        layer.register_forward_pre_hook(fail)
        layer(torch.ones(1))
        """
    )
    print_error(Program(name).run(StopRule()).error)
    shown = capsys.readouterr().err
    assert shown.count(f'File "{name}"') == 2 and ("torch/nn/modules" in shown) == has_library
    assert shown.endswith("Error: full\n")


def test_a_syntax_error(script, capsys):
    outcome = Program(script("x = = 1")).run(StopRule())
    assert (outcome.ended, outcome.exit_code) == (EndReason.ERROR, 1)
    print_error(outcome.error)
    shown = capsys.readouterr().err
    assert "SyntaxError" in shown and "x = = 1" in shown and "runpy" not in shown


def test_an_interrupt(script):
    outcome = Program(script("raise KeyboardInterrupt")).run(StopRule())
    assert (outcome.ended, outcome.exit_code) == (EndReason.INTERRUPTED, 130)


def test_a_script_that_survives_its_errors_does_not_survive_the_clock(script):
    name = script(
        """
        import time
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                pass
        """
    )
    began = time.monotonic()
    outcome = Program(name).run(StopRule(seconds=0.2))
    assert (outcome.ended, outcome.exit_code) == (EndReason.TIMEOUT, 0)
    assert time.monotonic() - began < 30


def test_what_a_script_holds_outlives_it(script):
    name = script(
        """
        import weakref, builtins
        class Thing: pass
        thing = Thing()
        builtins._thing = weakref.ref(thing)
        """
    )
    import builtins

    outcome = Program(name).run(StopRule())
    thing = builtins._thing
    del builtins._thing
    assert thing() is not None
    del outcome
    assert thing() is None


def goes_on(rule: StopRule, progress: RunProgress, check=StopRule.check_step) -> bool:
    try:
        check(rule, progress)
    except StopRun as stop:
        return stop.reason is not EndReason.STEPS
    return True


def test_the_stop_is_no_error_that_a_script_may_survive():
    assert not issubclass(StopRun, Exception)


def test_steps():
    assert goes_on(StopRule(steps=None), RunProgress(100, [0] * 100))
    assert goes_on(StopRule(steps=3), RunProgress(2, [0] * 2))
    assert not goes_on(StopRule(steps=3), RunProgress(3, [0] * 3))


def test_a_package_without_main_is_no_program(script, tmp_path, monkeypatch):
    for folder in ("without_main", "without_init", "with_main"):
        (tmp_path / folder).mkdir()
    for folder in ("without_main", "with_main"):
        script("raise AssertionError('it is imported to look at it')", f"{folder}/__init__.py")
    script("", "with_main/__main__.py")
    monkeypatch.chdir(tmp_path)
    for name in ("without_main", "without_init"):
        with pytest.raises(UsageError, match="this package is no program"):
            Program(name, is_module=True).check()
    Program("with_main", is_module=True).check()


def test_no_such_program(tmp_path, script):
    with pytest.raises(UsageError, match="no such script"):
        Program(str(tmp_path / "none.py")).check()
    with pytest.raises(UsageError, match="options of memprof stand before it"):
        Program("--steps").check()
    with pytest.raises(UsageError, match="no program"):
        Program(str(tmp_path)).check()
    for name in ("no_such_module_at_all", "json.nothing.below", "."):
        with pytest.raises(UsageError, match="no such module"):
            Program(name, is_module=True).check()
    Program(script("pass")).check()
    Program("json.tool", is_module=True).check()


RULE = StopRule(2, continues_past_steps=True)


def test_a_run_goes_on_while_that_is_cheap():
    assert goes_on(RULE, RunProgress(2, [5, 5], MAX_CHEAP_EVENTS - 1, MAX_CHEAP_SECONDS - 1))
    assert not goes_on(RULE, RunProgress(2, [5, 5], MAX_CHEAP_EVENTS, MAX_CHEAP_SECONDS - 1))
    assert not goes_on(RULE, RunProgress(2, [5, 5], MAX_CHEAP_EVENTS - 1, MAX_CHEAP_SECONDS))
    assert not goes_on(StopRule(2), RunProgress(2, [5, 5], 1))  # so many were requested


@pytest.mark.parametrize("nears", [True, False])
def test_a_run_goes_on_to_an_evaluation_that_is_near(nears):
    assert goes_on(RULE, RunProgress(2, [5, 5], MAX_CHEAP_EVENTS, nears_end=lambda: nears)) == nears
    assert not goes_on(StopRule(2), RunProgress(2, [5, 5], MAX_CHEAP_EVENTS, nears_end=lambda: nears))


def test_a_run_goes_on_to_what_its_loops_do_soon_for_the_first_time():
    def progress(events, to_come, seconds=0.0):
        return RunProgress(2, [5, 5], events, seconds, count_events_to_new_code=lambda: to_come)

    assert goes_on(RULE, progress(10_000, 39_999))
    assert not goes_on(RULE, progress(10_000, 40_000))
    assert not goes_on(RULE, progress(10_000, 1, 15.0))
    assert not goes_on(RULE, progress(10_000, None))


@pytest.mark.parametrize(("num_steps", "made", "ended"), [(4, 4, "exit"), (5, 2, "steps")])
def test_a_run_goes_on_to_the_end_of_a_program_of_which_half_is_done(script, monkeypatch, num_steps, made, ended):
    monkeypatch.setattr(stop, "MAX_CHEAP_EVENTS", 0)
    monkeypatch.setattr(stop, "MAX_SLOW_EVENTS", 0)
    name = script(
        f"""
        import torch
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for step in range({num_steps}):
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()
        """
    )
    program = run_script(Program(name), RULE, RunSpec()).document.program
    assert (program.steps, program.ended) == (made, ended)


def test_a_run_goes_on_to_the_next_model_if_that_is_near():
    def progress(events, to_come, seconds=0.0):
        return RunProgress(2, [5, 5], events, seconds, count_events_to_next_model=lambda: to_come)

    assert goes_on(RULE, progress(MAX_CHEAP_EVENTS, MAX_GROWING_EVENTS - MAX_CHEAP_EVENTS - 1))
    assert not goes_on(RULE, progress(MAX_CHEAP_EVENTS, MAX_GROWING_EVENTS - MAX_CHEAP_EVENTS))
    assert not goes_on(RULE, progress(MAX_CHEAP_EVENTS, 1, MAX_GROWING_SECONDS))
    assert not goes_on(RULE, progress(MAX_CHEAP_EVENTS, None))


@pytest.mark.parametrize(("batches", "made", "misses"), [(4, 5, False), (1000, 2, True)])
def test_a_run_comes_to_the_next_model_of_a_loop_or_tells_that_it_has_not(script, monkeypatch, batches, made, misses):
    monkeypatch.setattr(stop, "MAX_CHEAP_EVENTS", 0)
    monkeypatch.setattr(stop, "MAX_SLOW_EVENTS", 0)
    monkeypatch.setattr(stop, "MAX_GROWING_EVENTS", 1000)
    name = script(
        f"""
        import torch
        for fold in range(9):
            model = torch.nn.Linear(8, 8).cuda()
            optimizer = torch.optim.SGD(model.parameters())
            for batch in range({batches}):
                model(torch.ones(2, 8, device="cuda")).sum().backward()
                optimizer.step()
        """
    )
    program = run_script(Program(name), RULE, RunSpec()).document.program
    assert (program.steps, program.ended, program.misses_model) == (made, "steps", misses)


def test_a_run_goes_on_until_each_optimizer_has_made_a_step():
    waiting = {"awaits_optimizer": True}
    assert goes_on(RULE, RunProgress(2, [5, 5], MAX_SLOW_EVENTS - 1, MAX_CHEAP_SECONDS - 1, **waiting))
    assert not goes_on(RULE, RunProgress(2, [5, 5], MAX_SLOW_EVENTS, MAX_CHEAP_SECONDS - 1, **waiting))
    assert not goes_on(RULE, RunProgress(2, [5, 5], MAX_SLOW_EVENTS - 1, MAX_CHEAP_SECONDS, **waiting))
    assert not goes_on(RULE, RunProgress(2, [5, 5], MAX_SLOW_EVENTS - 1, 0.0))


@pytest.mark.parametrize(("every", "made", "idle"), [(3, 4, 0), (9, 3, 1)])
def test_optimizers_that_have_made_no_step_are_counted(script, monkeypatch, every, made, idle):
    """A critic steps each time, and a generator every third or ninth; the run may go on for 150 events."""
    monkeypatch.setattr(stop, "MAX_CHEAP_EVENTS", 0)
    monkeypatch.setattr(stop, "MAX_SLOW_EVENTS", 150 if not idle else 0)
    name = script(
        f"""
        import torch
        generator, critic = (torch.nn.Linear(8, 8).cuda() for _ in range(2))
        first, second = (torch.optim.SGD(model.parameters()) for model in (critic, generator))
        for step in range(1000):
            critic(generator(torch.ones(2, 8, device="cuda"))).sum().backward()
            first.step()
            if step % {every} == {every} - 1:
                second.step()
        """
    )
    program = run_script(Program(name), RULE, RunSpec()).document.program
    assert (program.idle_optimizers, program.ended) == (idle, "steps") and program.steps <= made


def test_a_run_goes_on_while_memory_grows():
    grown = [0, MIN_GROWTH_BYTES]
    assert goes_on(RULE, RunProgress(2, grown, MAX_GROWING_EVENTS - 1, MAX_GROWING_SECONDS - 1))
    assert not goes_on(RULE, RunProgress(2, grown, MAX_GROWING_EVENTS, MAX_GROWING_SECONDS - 1))
    assert not goes_on(RULE, RunProgress(2, grown, MAX_GROWING_EVENTS - 1, MAX_GROWING_SECONDS))
    slow, fast = 10_000 * MIN_GROWTH_BYTES + 1, 10_000 * MIN_GROWTH_BYTES
    assert goes_on(RULE, RunProgress(2, grown, MAX_SLOW_EVENTS - 1, room_bytes=slow))
    assert not goes_on(RULE, RunProgress(2, grown, MAX_SLOW_EVENTS, room_bytes=slow))
    assert goes_on(RULE, RunProgress(2, grown, MAX_SLOW_EVENTS, room_bytes=fast))
    many = [MIN_GROWTH_BYTES * step for step in range(100)]
    assert goes_on(RULE, RunProgress(100, many, MAX_CHEAP_EVENTS))
    assert not goes_on(RULE, RunProgress(100, [one - step for step, one in enumerate(many)], MAX_CHEAP_EVENTS))
    assert not goes_on(RULE, RunProgress(3, [9, 8, 7], MAX_CHEAP_EVENTS))


def test_patience_where_memory_grows_by_little_or_events_are_not_counted():
    for events in (None, MAX_CHEAP_EVENTS):
        assert goes_on(RULE, RunProgress(1 + NUM_EXTRA_STEPS, list(range(1 + NUM_EXTRA_STEPS)), events))
        assert not goes_on(RULE, RunProgress(2 + NUM_EXTRA_STEPS, list(range(2 + NUM_EXTRA_STEPS)), events))


def test_calls_of_a_model_behind_the_steps_have_an_end():
    def goes_on_calling(rule, *progress):
        return goes_on(rule, RunProgress(2, *progress), StopRule.check_call)

    grown = [0, MIN_GROWTH_BYTES]
    assert goes_on_calling(RULE, [5, 5], MAX_SLOW_EVENTS - 1, MAX_CHEAP_SECONDS - 1)
    assert not goes_on_calling(RULE, [5, 5], MAX_SLOW_EVENTS, 0.0)
    assert not goes_on_calling(RULE, [5, 5], 1, MAX_CHEAP_SECONDS)
    assert goes_on_calling(RULE, grown, MAX_GROWING_EVENTS - 1, MAX_GROWING_SECONDS - 1)
    assert not goes_on_calling(RULE, grown, MAX_GROWING_EVENTS, 0.0)
    assert not goes_on_calling(RULE, grown, 1, MAX_GROWING_SECONDS)
    assert goes_on_calling(StopRule(2), [5, 5], MAX_SLOW_EVENTS, 0.0)
    assert goes_on_calling(RULE, [5, 5], None, 0.0)  # measured


@pytest.mark.parametrize(("num_calls", "ended"), [(5, "exit"), (500, "steps")])
def test_a_run_that_is_stopped_among_calls_behind_its_steps(script, monkeypatch, num_calls, ended):
    monkeypatch.setattr(stop, "MAX_CHEAP_EVENTS", 0)
    monkeypatch.setattr(stop, "MAX_SLOW_EVENTS", 200)
    name = script(
        f"""
        import torch
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(4):
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()
        x = torch.ones(2, 8, device="cuda")
        for t in range({num_calls}):
            with torch.no_grad():
                x = model(x)
        """
    )
    program = run_script(Program(name), RULE, RunSpec()).document.program
    assert (program.steps, program.ended, program.misses_calls) == (4, ended, ended == "steps")


def test_growth_is_that_of_the_later_half_of_the_steps():
    assert RunProgress(1, [7]).growth_bytes == 0
    assert RunProgress(2, [7, 9]).growth_bytes == 2
    assert RunProgress(8, [0, 9, 9, 9, 9, 9, 9, 9]).growth_bytes == 0  # state that was made in the second
    assert RunProgress(9, [0] * 5 + [4] * 4).growth_bytes == 1  # every fourth step keeps something


def test_packages_around_a_module_are_imported_by_its_run(tmp_path, monkeypatch, capsys):
    """They are the program's: with its arguments, and what they lack is its error."""
    package = tmp_path / "around"
    package.mkdir()
    (package / "train.py").write_text("print('trains')")
    (package / "__init__.py").write_text("import sys; print(sys.argv); import no_such_library")
    monkeypatch.chdir(tmp_path)
    program = Program("around.train", ("a",), is_module=True)
    program.check()
    assert "around" not in sys.modules and not capsys.readouterr().out
    outcome = program.run(StopRule())
    assert outcome.ended is EndReason.ERROR and isinstance(outcome.error, ModuleNotFoundError)
    assert capsys.readouterr().out == "['-m', 'a']\n"


def test_seconds_are_those_of_a_processor_or_a_quarter_of_the_clocks(monkeypatch):
    def set_time(clock_seconds, cpu_seconds):
        fake = SimpleNamespace(monotonic=lambda: clock_seconds, process_time=lambda: cpu_seconds)
        monkeypatch.setattr(capture, "time", fake)

    set_time(0.0, 0.0)
    clock = capture._Clock()
    set_time(40.0, 12.0)
    assert clock.count_seconds() == 12
    set_time(40.0, 9.0)
    assert clock.count_seconds() == 10
