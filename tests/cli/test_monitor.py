"""`memprof monitor` on a terminal and off it: commands that end well, fail, are killed, ask, print a lot; no GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from memprof.device.nvml import read_gpus
from memprof.monitor.run import monitor
from memprof.monitor.sample import MonitorSample, Peaks
from memprof.report.terminal.monitor import FooterView, make_view
from memprof.report.terminal.monitor_text import SampleHistory, draw_sparkline
from tests.cli.terminal import Terminal
from tests.lanes import by_day
from tests.unit.monitor.command import MIB, environment, make_torch
from tests.unit.monitor.command import memprof as command_line
from tests.unit.monitor.command import run as run_monitor

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc")
NO_GPUS = "memprof: GPUs cannot be seen: "


@pytest.fixture
def without_gpus():
    if read_gpus().gpus:
        pytest.skip("there is a GPU here")


@pytest.fixture
def script(tmp_path):
    def write(code):
        file = tmp_path / "script.py"
        file.write_text(code)
        return str(file)

    return write


@pytest.fixture
def terminal():
    opened = []

    def start(*arguments, env=None, **size):
        opened.append(Terminal(command_line(*arguments), env or environment(), **size))
        return opened[-1]

    yield start
    for found in opened:
        found.end()


# -- on a terminal -----------------------------------------------------------------------------------------------------


def test_a_command_that_ends_well(terminal, script, tmp_path):
    code = "import time, torch; torch.cuda.hold(3 << 30); print('begun'); time.sleep(1.2); print('done')"
    env = environment(make_torch(tmp_path))
    shown = terminal("--interval", 0.2, "--", sys.executable, script(code), env=env)
    shown.wait_for("allocated 3.00 GiB, highest 3.00 GiB, peak 3.00 GiB")
    shown.read()
    foot = "\n".join(shown.screen.lines[-8:])
    assert "reserved 6.00 GiB, highest 6.00 GiB, peak 6.00 GiB\n" in foot
    assert " 1 retry with an emptied cache\n" in foot
    assert "█" in foot and "in 1 process, peak" in foot and "done" not in foot
    assert shown.wait() == 0
    assert "begun" in shown.screen.text and "done" in shown.screen.text
    # The rows are released: the whole screen scrolls again, and the last line is memprof's.
    assert shown.screen.region == (0, 29)
    left = [line.strip() for line in shown.screen.lines if line.strip()]
    # Where a line is broken depends on the length of the script's path.
    assert "endedwithexitcode0" in "".join(left[-3:]).replace(" ", "")
    assert "highest" not in shown.screen.text
    assert "peaks: allocated 3.00 GiB, reserved 6.00 GiB" in shown.screen.text.replace("\n", "")


@pytest.mark.nightly
def test_output_is_all_there_and_in_order(terminal, script):
    code = """
import sys, time
for n in range(400):
    print(f"line {n} of the program", flush=True)
    time.sleep(0.004)
print("no line feed at the end", end="")
"""
    shown = terminal("--interval", 0.05, "--", sys.executable, script(code))
    assert shown.wait() == 0
    lines = [line for line in shown.screen.text.splitlines() if line.startswith("line ")]
    assert lines == [f"line {n} of the program" for n in range(400)]
    assert "no line feed at the end" in shown.screen.text
    assert shown.screen.unknown == []


def test_a_command_that_fails(terminal, script):
    shown = terminal("--", sys.executable, script("raise ValueError('of the program')"))
    assert shown.wait() == 1
    assert "ValueError: of the program" in shown.screen.text
    assert "ended with exit code 1" in shown.screen.text.replace("\n", "")


def test_a_command_that_is_killed(terminal, script):
    shown = terminal("--", sys.executable, script("import os; os.kill(os.getpid(), 9)"))
    assert shown.wait() == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in shown.screen.text.replace("\n", "")


def test_ctrl_c_ends_the_command(terminal, script):
    code = """
import time
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted once", flush=True)
    time.sleep(0.5)
    raise SystemExit(42)
"""
    shown = terminal("--interval", 0.1, "--", sys.executable, script(code))
    shown.wait_for("up")
    shown.type("\x03")
    assert shown.wait() == 42
    assert shown.screen.text.count("interrupted once") == 1
    assert "Traceback" not in shown.screen.text


def test_ctrl_c_that_the_command_does_not_handle(terminal, script):
    shown = terminal("--", sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)")
    shown.wait_for("up")
    shown.type("\x03")
    assert shown.wait() == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in shown.screen.text


@pytest.mark.nightly
def test_a_command_that_ignores_ctrl_c(terminal, script):
    code = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up", flush=True)
time.sleep(1)
print("to the end", flush=True)
"""
    shown = terminal("--interval", 0.1, "--", sys.executable, script(code))
    shown.wait_for("up")
    shown.type("\x03")
    shown.type("\x03")
    assert shown.wait() == 0
    assert "to the end" in shown.screen.text


def test_a_command_that_asks(terminal, script):
    shown = terminal("--interval", 0.1, "--", sys.executable, script("print('hello ' + input('name? '))"))
    shown.wait_for("name? ")
    time.sleep(0.3)
    shown.type("ada\n")
    assert shown.wait() == 0
    assert "hello ada" in shown.screen.text


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_ctrl_z_stops_and_fg_goes_on(script):
    """Below a shell with job control, which is what gives a terminal away and takes it back."""
    code = script("import time\nprint('up', flush=True)\ntime.sleep(2.5)\nprint('over', flush=True)")
    line = " ".join(command_line("--interval", "0.1", "--", sys.executable, code))
    shown = Terminal(["bash", "--norc", "--noprofile", "-i"], {**environment(), "PS1": "ready> ", "HISTFILE": ""})
    try:
        shown.wait_for("ready> ")
        shown.type(f"{line}; echo left with $?\n")
        shown.wait_for("resident")
        shown.type("\x1a")
        shown.wait_for("Stopped")
        shown.read(0.2)
        assert shown.screen.region == (0, 29)
        before = len(shown.received)
        time.sleep(0.5)
        shown.read()
        assert "resident" not in shown.received[before:]
        shown.type("fg\n")
        shown.wait_for("over")
        shown.wait_for("ended with exit code 0")
    finally:
        shown.end()


@pytest.mark.nightly
def test_a_terminal_that_closes(script, tmp_path):
    """The command hears of it as it would alone; memprof goes on for as long as it does, and logs."""
    log = tmp_path / "log.csv"
    # In one write: what follows the words would fail where nobody reads any more.
    code = script(
        "import os, signal, time\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "os.write(1, b'hang-ups are ignored\\n')\ntime.sleep(1)"
    )
    shown = Terminal(command_line("--interval", 0.1, "--log", log, "--", sys.executable, code), environment())
    shown.wait_for("hang-ups are ignored")
    while not log.exists():
        shown.read(0.1)
    shown.read(0.3)
    before = len(log.read_text().splitlines())
    os.close(shown._descriptor)
    _, status = os.waitpid(shown.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(log.read_text().splitlines()) > before + 2


@pytest.mark.nightly
def test_a_window_that_changes(terminal, script):
    shown = terminal("--interval", 0.1, "--", sys.executable, script("import time; time.sleep(1)"), rows=40)
    shown.wait_for("resident")
    shown.resize(20, 60)
    assert shown.wait() == 0
    assert "\x1b[1;17r" in shown.received  # three rows of twenty


@pytest.mark.nightly
def test_a_window_that_is_too_small(terminal, script):
    shown = terminal("--interval", 0.1, "--", sys.executable, script("import time; time.sleep(0.5)"), rows=8)
    assert shown.wait() == 0
    assert "\x1b[" not in shown.received
    assert "ended with exit code 0" in shown.screen.text.replace("\n", "")


def test_no_gpus_in_one_line(terminal, without_gpus):
    shown = terminal()
    assert shown.wait() == 1
    assert shown.received.startswith(NO_GPUS)
    assert shown.received.count("\n") == 1


# -- without a terminal ------------------------------------------------------------------------------------------------


def test_input_output_and_exit_code_pass_through(script):
    code = "import sys; data = sys.stdin.read(); print(data * 2, end=''); sys.stderr.write('wrong\\n'); sys.exit(3)"
    done = run_monitor("--", sys.executable, script(code), env=environment(), text="abc\n")
    assert (done.returncode, done.stdout) == (3, "abc\nabc\n")
    others = [line for line in done.stderr.splitlines() if not line.startswith("memprof: ") and "resident" not in line]
    assert others == ["wrong"]


@pytest.mark.nightly
def test_a_line_each_second_and_one_on_the_gpus(script, without_gpus):
    code = "import time; x = bytearray(100 << 20); time.sleep(1)"
    done = run_monitor("--interval", 0.2, "--", sys.executable, script(code), env=environment())
    lines = done.stderr.splitlines()
    assert sum(line.startswith(NO_GPUS) for line in lines) == 1
    assert 3 <= sum("in 1 process" in line for line in lines) <= 8
    peak = lines[-1].rpartition("resident ")[2]
    assert peak.endswith(" MiB") and 100 < float(peak.split()[0]) < 140


@pytest.mark.nightly
def test_a_command_shorter_than_the_interval_has_its_peak(script):
    code = "import time; x = bytearray(300 << 20); del x; time.sleep(1)"
    done = run_monitor("--json", "--interval", 30, "--", sys.executable, script(code), env=environment())
    outcome = json.loads(done.stderr.splitlines()[-1])["outcome"]
    assert 300 * MIB < outcome["peaks"]["resident_bytes"] < 340 * MIB
    assert outcome["elapsed"] < 15


def test_a_command_that_ends_before_it_is_watched(monkeypatch):
    """Its SIGCHLD is gone by the time that signals are held back: nothing must wait for it."""
    from memprof.monitor.command import RunningCommand, Signals

    started = []
    monkeypatch.setattr(
        "memprof.monitor.run.RunningCommand", lambda *given: started.append(RunningCommand(*given)) or started[0]
    )
    block = Signals.block

    def late(signals):
        while started[0].exit_code is None:
            time.sleep(0.01)
        block(signals)

    monkeypatch.setattr(Signals, "block", late)
    view = make_view(open(os.devnull, "w"), has_command=True, quiet=True)  # noqa: SIM115
    outcome = monitor(["false"], view, interval=60)
    view._stream.close()
    assert (outcome.exit_code, outcome.ending) == (1, "ended with exit code 1")
    assert outcome.elapsed < 30


@pytest.mark.parametrize(
    "number", by_day([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP], signal.SIGTERM, signal.SIGINT)
)
def test_a_signal_to_memprof_reaches_the_command(script, number):
    code = f"""
import signal, sys, time
signal.signal({int(number)}, lambda *_: (print("caught", flush=True), sys.exit(11)))
print("up", flush=True)
time.sleep(60)
"""
    arguments = command_line("--quiet", "--", sys.executable, script(code))
    process = subprocess.Popen(
        arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # whoever runs the tests may ignore it, as nohup does
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        try:
            stdout, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, stdout) == (11, "caught\n"), stderr


@pytest.mark.nightly
def test_a_signal_that_memprof_ignores_is_ignored_by_the_command(script):
    code = "import signal, time; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True); time.sleep(0.5)"
    line = f'trap "" HUP; exec {" ".join(command_line("--quiet", "--", sys.executable, script(code)))}'
    process = subprocess.Popen(["sh", "-c", line], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"True\n"
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_the_command_has_no_signal_blocked(script):
    code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGTERM))"
    done = run_monitor("--quiet", "--", sys.executable, script(code), env=environment())
    assert done.stdout == f"set() {signal.Handlers.SIG_DFL!r}\n".replace("<Handlers.SIG_DFL: 0>", str(signal.SIG_DFL))


def test_options_behind_the_command_are_the_commands(script):
    code = script("import sys; print(sys.argv[1:])")
    for arguments in ([sys.executable, code], ["--", sys.executable, code]):
        done = run_monitor("--quiet", *arguments, "--json", "--log", "x", "--debug", "--", env=environment())
        assert done.stdout == "['--json', '--log', 'x', '--debug', '--']\n", done.stderr


def test_commands_that_cannot_run(memprof, tmp_path):
    gone = memprof("monitor", "--", "no-such-program", "--debug")
    assert (gone.exit_code, gone.stderr) == (127, "memprof: there is no such command\n  value: no-such-program\n")
    folder = memprof("monitor", "--", tmp_path)
    assert folder.exit_code == 126
    assert "permission denied" in folder.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--interval", "0"], "the interval is too short"), (["--once", "--", "true"], "--once is of the GPUs alone")],
)
def test_wrong_use(memprof, arguments, said):
    done = memprof("monitor", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_log_that_cannot_be_written(script, tmp_path):
    code = script("import time; time.sleep(0.5); print('done')")
    done = run_monitor("--interval", 0.1, "--log", "/dev/full", "--", sys.executable, code, env=environment())
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.count("no space left on device") == 1
    assert done.stderr.count("in 1 process") >= 2


@pytest.mark.nightly
def test_a_log_that_has_no_place_is_refused_before_the_command_begins(script, tmp_path):
    notes = tmp_path / "notes.csv"
    notes.write_text("mine")
    code = script("print('done')")
    for file, said in ((tmp_path / "no" / "log.csv", "no such folder"), (notes, "is no log of memprof")):
        done = run_monitor("--log", file, "--", sys.executable, code, env=environment())
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert "--log" in done.stderr
    assert notes.read_text() == "mine"
    done = run_monitor("--log", notes, "--force", "--", sys.executable, code, env=environment())
    assert (done.returncode, done.stdout) == (0, "done\n")
    again = run_monitor("--log", notes, "--", sys.executable, code, env=environment())
    assert again.returncode == 0
    assert notes.read_text().startswith("time,")


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_reader_that_has_gone(script, without_gpus):
    """Of the command's view: the command is not to suffer."""
    line = " ".join(command_line("--interval", "0.1", "--", sys.executable, script("import time; time.sleep(0.8)")))
    done = subprocess.run(
        ["bash", "-c", f"{{ {line} 2>&1 >&3 | head -n 1; }} 3>&1; echo ${{PIPESTATUS[0]}}"],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.startswith(NO_GPUS)
    assert done.stderr == ""


# -- pieces ------------------------------------------------------------------------------------------------------------


def test_sparkline():
    assert draw_sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline([5, 5, 5], 2) == "██"
    assert draw_sparkline([0, 0], 5) == "▁▁"
    assert draw_sparkline([1, 4], 9, highest=8) == "▂▅"
    assert draw_sparkline([], 9) == ""


def test_a_footer_needs_processes(capsys):
    view = FooterView(sys.stdout)
    view.show(MonitorSample(0.0, 0.0), Peaks())
    assert capsys.readouterr().out == ""
    assert SampleHistory().draw_curve("allocated").strip() == ""
