"""`memprof run`: options, exit codes, what is printed where; the scripts themselves are in tests/scripts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import pytest

from tests.cli.conftest import TRAIN
from tests.cli.terminal import Terminal
from tests.lanes import by_day
from tests.processes import ROOT, Done, python


def started(*arguments: str, seconds: float = 300) -> Done:
    return python("-m", "memprof", "run", *arguments, seconds=seconds)


def test_in_a_process_of_its_own(script):
    """stdout has the script's words, then the report."""
    command = [sys.executable, "-m", "memprof", "run", "--gpu", "rtx-4090", "--steps", "2", script()]
    command += ["256", "32", "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "arguments ['256', '32', '--debug']"
    assert "step 0 1.0" in lines and not any(line.startswith("step 2 ") for line in lines)
    assert "done" not in lines
    assert "memprof run: simulated on a virtual NVIDIA GeForce RTX 4090 (23.52 GiB)" in lines
    assert "train.py 256 32 --debug: stopped after 2 training steps; --until-exit" in done.stdout
    assert "all of step 1" in done.stdout and "optimizer step" in done.stdout


@pytest.mark.parametrize(("arguments", "is_divided"), by_day([((), True), (("-q",), False)]))
def test_on_a_terminal_a_line_divides_the_scripts_words_from_the_report(script, arguments, is_divided):
    terminal = Terminal([sys.executable, "-m", "memprof", "run", *arguments, script(), "64", "8"], {**os.environ})
    terminal.wait(120)
    lines = [line for line in terminal.screen.text.splitlines() if line.strip()]
    first = next(index for index, line in enumerate(lines) if line.startswith("Fits"))
    assert (set(lines[first - 1].strip()) == {"─"}) == is_divided


def test_json_alone_on_stdout(script):
    done = started("--json", "--until-exit", script(), "256", "32")
    document = json.loads(done.stdout)
    assert "step 3 1.0\ndone" in done.stderr
    asked = document["program"].pop("asked")
    assert asked["until_exit"] and asked["steps"] is None and asked["gpu"] == "h100-80gb"
    assert document["program"] == {
        "command": ["train.py", "256", "32"],
        "ended": "exit",
        "exit_code": 0,
        "steps": 4,
        "fixes": [],
        "evaluated": False,
        "planned_steps": None,
        "misses_evaluation": False,
        "misses_unfreezing": False,
        "idle_optimizers": 0,
        "misses_model": False,
        "evaluation_step": None,
        "misses_calls": False,
    }
    names = [(stage["name"], stage["step"]) for stage in document["stages"]]
    for step in (1, 2, 3, 4):
        assert ("backward", step) in names and ("optimizer step", step) in names
    state = {category: document["peak"]["categories"].get(category) for category in ("parameters", "optimizer state")}
    assert state["optimizer state"] == 2 * state["parameters"] > 0


REPLACED = {
    "a file": "import os; sys.stdout = sys.stderr = open(os.devnull, 'w')",
    "a class": "sys.stdout = Tee('train.log')",
    "a wrapper": "import io; sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')",
    "its buffer": "import io; sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')",
    "its descriptor": "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 1)",
    "closed": "sys.stdout.close()",
}


WRITTEN_AS = [*((how, ()) for how in REPLACED), ("a wrapper", ("--json",))]


@pytest.mark.parametrize(
    ("how", "json_options"), by_day(WRITTEN_AS, ("a class", ()), ("its descriptor", ()), ("a wrapper", ("--json",)))
)
def test_the_report_is_on_stdout_wherever_the_script_writes(script, tmp_path, how, json_options):
    name = script(
        f"""
        import sys, torch
        class Tee:
            def __init__(self, path):
                self.file = open(path, "w")
            def write(self, text):
                self.file.write(text)
            def flush(self):
                self.file.flush()
        {REPLACED[how]}
        if {how != "closed"}:
            print("mine")
        x = torch.ones(9, device="cuda")
        """
    )
    done = started(*json_options, "--save", "run.memprof", name)
    assert done.exit_code == 0, done.stderr
    if json_options:
        assert json.loads(done.stdout)["program"]["ended"] == "exit"
    else:
        assert "memprof run: simulated on" in done.stdout and "Fits" in done.stdout
    assert "Saved: memprof show run.memprof" in done.stderr
    if how == "a class":
        assert (tmp_path / "train.log").read_text() == "mine\n"
    elif how in ("a wrapper", "its buffer") and not json_options:
        assert done.stdout.startswith("mine\n")


def test_a_full_gpu_ends_it(memprof, script):
    ran = memprof("run", "--json", "--gpu-vram", "1", script(), 4096, 60000)
    assert ran.exit_code == 3
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in ran.stderr
    assert "runpy" not in ran.stderr and f"{ROOT / 'memprof'}/" not in ran.stderr
    document = ran.json
    assert document["program"]["ended"] == "refused" and document["failure"] is None
    verdict = document["verdict"]
    assert verdict["fits"] is False and verdict["oom_stage"] == "0 Linear" and verdict["oom_step"] == 1
    assert any("--beyond" in sentence for sentence in document["assumptions"])


def test_beyond(memprof, script):
    ran = memprof("run", "--json", "--beyond", "--gpu-vram", "1", script(), 4096, 60000)
    assert ran.exit_code == 3
    assert ran.json["program"]["ended"] == "exit" and ran.json["verdict"]["fits"] is False
    assert ran.json["verdict"]["required_bytes"] > 2 * 60000 * 4096 * 4


def test_the_script_handles_it(memprof, script):
    name = script(
        """
        import torch
        model = torch.nn.Linear(1024, 1024).cuda()
        size = 1 << 20
        while True:
            try:
                model(torch.randn(size, 1024, device="cuda")).sum().backward()
                break
            except torch.cuda.OutOfMemoryError:
                size //= 2
                torch.cuda.empty_cache()
        print("found", size)
        """
    )
    ran = memprof("run", "--until-exit", "--gpu-vram", "2", name)
    assert ran.exit_code == 0
    assert "found 131072" in ran.stdout
    text = " ".join(ran.stdout.split())
    assert (
        "Fits only without the failed allocations: 3 out-of-memory errors were raised and caught, the first in" in text
    )
    assert "train.py:7, where 4.00 GiB were requested with 4.00 MiB in use; the script went on without it." in text
    assert "allocator retries" not in text and "releasing its cache" not in text
    ran = memprof("run", "--until-exit", "--gpu-vram", "2", "--json", name)
    verdict = ran.json["verdict"]
    assert verdict["fits"] is True and verdict["out_of_memory_caught"] == 3 and verdict["retries"] == 0
    first = verdict["first_caught"]
    assert first["bytes"] == 4 << 30 and first["source"].endswith("train.py:7 <module>")
    assert verdict["required_bytes"] < 2 << 30
    (finding,) = [finding for finding in ran.json["findings"] if finding["id"] == "out-of-memory-caught"]
    assert finding["severity"] == "warning" and len(finding["evidence"]) == 3


def test_errors_that_were_caught_before_the_one_that_was_not(memprof, script):
    name = script(
        """
        import torch
        try:
            torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        """
    )
    ran = memprof("run", "--gpu-vram", "2", name)
    text = " ".join(ran.stdout.split())
    assert ran.exit_code == 3 and "It needs at least 3.42 GiB" in text
    assert "Before that an out-of-memory error was raised and caught, and the script went on without" in text


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import torch; x = torch.ones(9, device='cuda'); raise ValueError('mine')", 1, "ValueError: mine"),
        ("import sys, torch; x = torch.ones(9, device='cuda'); sys.exit(5)", 5, ""),
        ("import torch; x = torch.ones(9, device='cuda'); raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_it_fails_by_itself(memprof, script, text, code, said):
    ran = memprof("run", script(text), "x")
    assert ran.exit_code == code
    assert ran.stderr.strip().endswith(said)
    assert "memprof run: simulated on" in ran.stdout  # what was seen so far


def test_an_exit_code_of_the_scripts_own_is_no_verdict(memprof, script):
    name = script("import sys, torch; x = torch.ones(9, device='cuda'); sys.exit(3)")
    ran = memprof("run", name)
    assert ran.exit_code == 1  # 3 would be memprof's: it does not fit
    assert "train.py: ended by itself with exit code 3\n" in ran.stdout
    assert "Fits: " in ran.stdout and "The exit code 3 is the script's own" in ran.stdout
    found = memprof("run", "--json", name).json
    assert found["program"]["exit_code"] == 3 and found["verdict"]["fits"] is True


def test_nothing_on_the_gpu(memprof, script):
    ran = memprof("run", script("print('hello')"))
    assert (ran.exit_code, ran.stdout) == (1, "hello\n")
    assert ran.stderr.startswith(
        "memprof: no verdict: nothing was put on the GPU\n  value: the script ended with exit code 0\n"
    )
    left = memprof("run", script("import sys; sys.exit(3)"))
    assert left.exit_code == 1 and "value: the script ended with exit code 3\n" in left.stderr


def test_what_the_process_has_frozen_stays_so(memprof, script):
    """As pytest's process has the libraries: each search for garbage would go through them again."""
    gc.freeze()
    before = gc.get_freeze_count()
    assert memprof("run", script("import torch; torch.ones(4, device='cuda')")).exit_code == 0
    assert gc.get_freeze_count() > before / 2


@pytest.mark.parametrize(
    ("then", "kind"),
    [
        ("assert loss < 0.5", "unknown value"),
        ("best = None if loss > 0.5 else model\nbest.state_dict()", "unknown value"),
        ("if loss < 0.5: best = model\nprint(best)", "unknown value"),
        ("{0: 'cat'}[int(loss)]", "unknown value"),
        ("model.hf_device_map", "error"),
        pytest.param("print(optimiser)", "error", marks=pytest.mark.nightly),
        pytest.param("import no_such_module", "error", marks=pytest.mark.nightly),
        ("{'input_ids': 1}['labels']", "error"),
    ],
)
def test_a_value_is_blamed_for_what_it_can_cause(memprof, script, then, kind):
    begin = "import torch\nmodel = torch.nn.Linear(8, 8).cuda()\nloss = torch.randn(8, device='cuda').sum().item()\n"
    document = memprof("run", "--json", script(begin + then)).json
    assert document["failure"]["kind"] == kind
    assert ("decision by a value" in document["findings"][0]["title"]) == (kind == "unknown value")


def test_a_script_with_a_virtual_gpu_of_its_own(memprof, script):
    ran = memprof("run", script("import memprof\nwith memprof.virtual_gpu('t4'): pass"))
    assert ran.exit_code == 1
    assert (
        "memprof: a virtual GPU is already active" in ran.stderr and "run this script with plain python" in ran.stderr
    )


WAITING = """
import queue
import threading
import torch

batches = queue.Queue(2)
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def produce():
    kept = []
    while True:
        {line}

thread = threading.Thread(target=produce, daemon=True, name="producer")
thread.start()
while {waits}:
    try:
        model(batches.get()).sum().backward()
        optimizer.step()
    except Exception:
        print("survived")
thread.join()
"""
TRAINS = "model(torch.ones(4, 8).cuda()).sum().backward(), optimizer.step()"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("line", "waits", "exit_code", "said"),
    [
        ("batches.put(torch.ones(4, 8).cuda())", True, 0, "stopped after "),
        (TRAINS, False, 0, "stopped after "),
        (
            "kept.append(torch.ones(1 << 30, device='cuda'))",
            True,
            3,
            "Does not fit: out of memory at train.py:13 in produce()",
        ),
        ("torch.ones(4, device='cuda').__dlpack__()", True, 1, "DLPack hands the tensor's data"),
    ],
    ids=["loads", "trains", "fills the GPU", "is refused"],
)
def test_a_thread_sees_the_gpu_and_may_end_the_run(script, line, waits, exit_code, said):
    """Without it the program would wait forever."""
    done = started(script(WAITING.format(line=line, waits=waits)), seconds=60)
    assert done.exit_code == exit_code and said in " ".join(done.stdout.split()), done.stderr
    assert "StopRun" not in done.stderr and "survived" not in done.stdout


@pytest.mark.nightly
def test_a_stopped_script_is_not_held_by_its_threads(script):
    waiting = script("""
        import queue
        import threading
        import torch

        batches = queue.Queue(2)

        def produce():
            while True:
                batches.put(torch.ones(4, 8))

        threading.Thread(target=produce).start()
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(batches.get().cuda()).sum().backward()
            optimizer.step()
    """)
    done = started(waiting, seconds=60)
    assert done.exit_code == 0 and "stopped after " in done.stdout


def test_a_thread_that_dies_of_something_else_is_the_programs_own(script):
    dying = script("""
        import threading
        import torch

        thread = threading.Thread(target=lambda: {}["missing"])
        thread.start()
        thread.join()
        torch.ones(4, device="cuda")
        print("went on")
    """)
    done = started(dying, seconds=60)
    assert done.exit_code == 0 and "went on" in done.stdout and "ran to its end" in done.stdout
    assert "KeyError: 'missing'" in done.stderr


ENDLESS = """
import time, torch

def wait(where):
    while where == "{waits_in}":
        time.sleep(0.01)

model = torch.nn.Linear(1024, 1024, device="cuda")
wait("build")
optimizer = torch.optim.SGD(model.parameters()) if "{waits_in}" != "serve" else None
for step in range(9):
    with torch.set_grad_enabled(optimizer is not None):
        loss = model(torch.ones(64, 1024, device="cuda")).sum()
    wait("forward")
    wait("serve")
    big = torch.ones(256, 1 << 20, device="cuda") if "{waits_in}" == "backward" else None
    loss.backward()
    wait("backward")
    optimizer.step()
"""


def test_steps_and_timeout(memprof, script):
    assert memprof("run", "--json", "--steps", 3, script(), 8, 8).json["program"]["steps"] == 3
    endless = script(ENDLESS.format(waits_in="serve"), "endless.py")
    ran = memprof("run", "--json", "--timeout", 0.5, endless)
    assert ran.exit_code == 0 and ran.json["program"]["ended"] == "timeout"
    assert ran.json["verdict"]["fits"] is True


@pytest.mark.parametrize("waits_in", by_day(["build", "forward", "backward"], "backward"))
def test_a_script_that_was_stopped_early_has_no_verdict(memprof, script, waits_in):
    slow = script(ENDLESS.format(waits_in=waits_in), "slow.py")
    ran = memprof("run", "--timeout", 0.5, slow)
    assert ran.exit_code == 1
    assert "Not known: " in ran.stdout and "Fits" not in ran.stdout
    ran = memprof("run", "--timeout", 0.5, "--gpu-vram", "0.5", "--json", slow)
    assert ran.exit_code == (3 if waits_in == "backward" else 1)  # what was seen does not fit
    assert ran.json["verdict"]["fits"] is (False if waits_in == "backward" else None)


def test_a_saved_run_is_shown_again(memprof, script, tmp_path):
    name = script(
        """
        import torch
        for size in (3 << 30, 1 << 20):
            try:
                kept = torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                pass
        """
    )
    ran = memprof("run", "--gpu-vram", "2", "--json", "--save", "run.memprof", name)
    shown = memprof("show", "--json", "run.memprof")
    assert shown.json == ran.json and ran.exit_code == shown.exit_code == 0
    assert "Saved: memprof show run.memprof" in ran.stderr


def test_a_run_is_saved_where_it_was_started(memprof, script, tmp_path, monkeypatch):
    (tmp_path / "outputs").mkdir()
    name = script(
        """
        import os, torch
        x = torch.ones(9, device="cuda")
        os.chdir("outputs")
        """
    )
    ran = memprof("run", "--save", "the run.memprof", name)
    assert ran.exit_code == 0 and "Saved: memprof show 'the run.memprof'\n" in ran.stderr  # as a shell takes it
    assert (tmp_path / "the run.memprof").is_file() and not list((tmp_path / "outputs").iterdir())


def test_settings_that_the_script_makes_before_memory_is_used(memprof, script):
    name = script(
        """
        import os
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        import torch
        x = torch.ones(1 << 20, device="cuda")
        """
    )
    try:
        ran = memprof("run", "--json", name)
    finally:
        os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    assert ran.json["allocator"]["alloc_conf"] == "expandable_segments:True"


def test_a_part_of_the_gpu(memprof, script):
    name = script(
        """
        import torch
        torch.cuda.set_per_process_memory_fraction(0.5)
        torch.ones(3 << 30, dtype=torch.uint8, device="cuda")
        """
    )
    ran = memprof("run", "--gpu-vram", "4", name)
    assert ran.exit_code == 3 and "2.00 GiB allowed" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "no script is given"),
        (("none.py",), "no such script"),
        (("-m", "no_such_module"), "no such module"),
        (("--steps", "0", "train.py"), "--steps must be at least 1"),
        (("--steps", "3", "--until-exit", "train.py"), "give --steps or --until-exit, not both"),
        (("--lengths", "lognormal:200,0.5", "train.py"), "--lengths cannot change what a script feeds its model"),
        (("--timeout", "-1", "train.py"), "--timeout must be longer"),
        (("--timeout", "nan", "train.py"), "--timeout is out of range"),
        (("--timeout", "99999999999", "train.py"), "--timeout is out of range"),
        (("--device", "tpu", "train.py"), "unknown --device"),
        (("--device", "cuda", "train.py"), "there is no CUDA GPU to measure on"),
        (("--gpu", "rtx-0000", "train.py"), "unknown GPU"),
        (("--gpu-vram", "0", "train.py"), "--gpu-vram: not an amount of memory"),
        (("--fix", "lora", "train.py"), "this fix cannot be switched on from outside a script"),
        (("--fix", "loar", "train.py"), "unknown fix"),
        (("--fix", "chunked-loss", "--ladder", "train.py"), "--ladder chooses fixes itself"),
        (("--fix", "auto", "--ladder", "train.py"), "--ladder chooses fixes itself"),
        (("--gpu", "rtx-4090", "--gpu-vram", "10", "train.py"), "give --gpu or --gpu-vram, not both"),
        (("--gpu-vram", "10", "--gpu", "h100-80gb", "train.py"), "give --gpu or --gpu-vram, not both"),
        (("--ladder", "--device", "cpu", "train.py"), "a ladder runs on the virtual GPU"),
        (("--alloc-conf", "nonsense:1", "train.py"), ""),
        (("--save", "nowhere/x.memprof", "train.py"), "no such folder to save into"),
    ],
)
def test_wrong_use(memprof, script, arguments, problem):
    script()
    ran = memprof("run", *arguments)
    assert ran.exit_code in (1, 2) and ran.stdout == ""
    assert ran.stderr.startswith(f"memprof: {problem}") and "Traceback" not in ran.stderr
    assert len(ran.stderr.splitlines()) <= 3


def test_a_fix_that_does_not_apply(memprof, script):
    ran = memprof("run", "--fix", "sdpa-attention", script(), 64, 8)
    assert ran.exit_code == 2
    assert "memprof: sdpa-attention" in ran.stderr and "Traceback" not in ran.stderr


def test_what_cannot_be_simulated_is_said_in_a_line(memprof, script):
    name = script(
        """
        import torch
        x = torch.ones(9, device="cuda").to_sparse()
        torch.sparse.log_softmax(x, 0)
        """
    )
    ran = memprof("run", name)
    assert ran.exit_code == 1 and "memprof run: simulated on" in ran.stdout
    assert ran.stderr.startswith("memprof: not yet: ") and "train.py:4" in ran.stderr
    assert len(ran.stderr.splitlines()) == 2


def test_measured_on_the_cpu(memprof, script):
    name = script(TRAIN.replace('"cuda"', '"cpu"'))
    ran = memprof("run", "--device", "cpu", "--json", name, 256, 32)
    assert ran.exit_code == 0 and ran.json["source"] == "measured"
    names = {(stage["name"], stage["step"]) for stage in ran.json["stages"]}
    assert {("backward", 2), ("optimizer step", 2)} <= names
    categories = ran.json["peak"]["categories"]
    assert categories["optimizer state"] == 2 * categories["parameters"] > 0


def test_a_sum_of_losses_is_seen_in_two_steps(memprof, script):
    name = script(
        """
        import torch
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total = 0
        for _ in range(10):
            loss = model(torch.randn(8, 64, device="cuda")).square().mean()
            total += loss
            loss.backward()
            optimizer.step()
        """,
        "sums.py",  # lines are read off the file, and Python keeps those of a file that another test called the same
    )
    document = memprof("run", "--json", "--steps", "2", name).json
    assert document["program"]["steps"] == 2
    (finding,) = [finding for finding in document["findings"] if finding["id"] == "memory-growth"]
    assert "variable `total` (" in finding["title"] and "sums.py:8" in finding["title"]
