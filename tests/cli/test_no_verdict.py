"""A script that ends where memprof is not asked: exit code 1 and what to do, never 0 with nothing printed."""

import json
import os

import pytest

from tests.lanes import by_day
from tests.processes import python
from tests.schemas import checked

TRAIN = """
import atexit, ctypes, os, signal, sys, threading, time
import torch

def train(steps):
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

"""
ENDS = {
    "empty": ("", "the script ended with exit code 0"),
    "nothing on the GPU": ("train", "the script ended with exit code 0"),
    "exit": ("sys.exit(256)", "the script ended with exit code 0"),
    "text": ("sys.exit('no data')", "the script ended with exit code 1"),
    "_exit": ("os._exit(0)", "the script ended with exit code 0"),
    "_exit at the end": ("atexit.register(os._exit, 0)", "the script ended with exit code 0"),
    "daemon": (
        "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)",
        "the script ended with exit code 0",
    ),
    "thread": (
        "train(1)\nthreading.Thread(target=os._exit, args=(0,)).start()\nwhile True: train(1)",
        "it ended with exit code 0",
    ),
    "library": ("train(1)\nctypes.CDLL(None)._exit(0)", "it ended with exit code 0"),
    "killed": ("train(1)\nos.kill(os.getpid(), signal.SIGKILL)", "it was killed by SIGKILL"),
    "ended": ("train(1)\nos.kill(os.getpid(), signal.SIGTERM)", "it was killed by SIGTERM"),
    "aborted": ("train(1)\nos.abort()", "it was killed by SIGABRT"),
}


@pytest.mark.parametrize("how", by_day(ENDS, "nothing on the GPU", "_exit", "thread", "killed"))
def test_no_verdict_is_exit_code_1_and_one_error(how, tmp_path):
    text, value = ENDS[how]
    (tmp_path / "script.py").write_text(TRAIN * (how != "empty") + text)
    files = tmp_path / "files"
    files.mkdir()
    done = python(
        "-m", "memprof", "run", "--json", "script.py", folder=tmp_path, env={**os.environ, "TMPDIR": str(files)}
    )
    error = checked(json.loads(done.stdout))["error"]
    assert (done.exit_code, error["exit_code"], error["value"]) == (1, 1, value)
    assert not list(files.glob("memprof-*")) or how == "daemon"  # whose parent does not know it
    assert error["problem"].startswith("no verdict: ") and error["hint"]
    assert f"memprof: {error['problem']}\n" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("train(3)", 0),
        ("train(1)\nos._exit(0)", 0),
        pytest.param("train(1)\nsys.exit(7)", 7, marks=pytest.mark.nightly),
        ("train(1)\nsys.exit(3)", 1),
        pytest.param("train(1)\natexit.register(os._exit, 7)", 7, marks=pytest.mark.nightly),
        ("if os.fork(): os.wait(); train(3)", 0),  # the other process comes to the end of the script, too
        ("threading.Thread(target=time.sleep, args=(600,)).start(); train(3)", 0),
    ],
)
def test_a_verdict_is_one_document(text, code, tmp_path):
    (tmp_path / "script.py").write_text(TRAIN + text)
    done = python("-m", "memprof", "run", "--json", "--steps", "2", "script.py", folder=tmp_path)
    document = checked(json.loads(done.stdout))
    assert (document["verdict"]["fits"], done.exit_code) == (True, code), done.stderr


def test_a_signal_that_somebody_sends_is_passed_on_and_no_error(tmp_path):
    """To memprof's own process, whose child runs the script."""
    (tmp_path / "script.py").write_text(f"{TRAIN}os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)")
    done = python("-m", "memprof", "run", "script.py", folder=tmp_path)
    assert (done.exit_code, done.stdout, done.stderr) == (143, "", "")


def test_an_exception_without_a_text_is_the_scripts(tmp_path):
    (tmp_path / "script.py").write_text(
        f"{TRAIN}class E(Exception):\n    def __str__(self): raise ValueError('no')\ntrain(1)\nraise E\n"
    )
    done = python("-m", "memprof", "run", "--json", "script.py", folder=tmp_path)
    assert (done.exit_code, json.loads(done.stdout)["failure"]["message"]) == (1, "<exception str() failed>")
    assert done.stderr.rstrip().endswith("E: <exception str() failed>") and "memprof/" not in done.stderr


def test_a_script_that_closes_descriptors_by_number(tmp_path):
    """What memprof keeps of its output is not among those that scripts close so."""
    (tmp_path / "script.py").write_text(TRAIN + "train(1)\nos.closerange(3, 256)")
    done = python("-m", "memprof", "run", "--json", "script.py", folder=tmp_path)
    assert done.exit_code == 0 and checked(json.loads(done.stdout))["command"] == "run"


def test_a_script_that_closes_all_descriptors_is_not_given_the_report(tmp_path):
    """It may have opened a file of its own under the number of one."""
    text = """
train(1)
import resource
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
os.closerange(3, limit)
own = os.open("own", os.O_CREAT | os.O_WRONLY)
for number in range(64, min(limit, 4096)): os.dup2(own, number)
"""
    (tmp_path / "script.py").write_text(TRAIN + text)
    done = python("-m", "memprof", "run", "--json", "script.py", folder=tmp_path)
    assert done.exit_code == 1 and "memprof: no report: the script has closed the descriptors" in done.stderr
    assert not (tmp_path / "own").read_text()


@pytest.mark.parametrize("begin", ["", "torch.ones(4, device='cuda')\n"])
def test_a_script_that_a_launcher_starts_is_told_so(begin, tmp_path):
    (tmp_path / "script.py").write_text(f"import os, torch\n{begin}rank = int(os.environ['LOCAL_RANK'])")
    options = ("--gpu", "rtx-4090", "--worst-batch")
    done = python("-m", "memprof", "run", "--json", *options, "--gpus", "2", "script.py", "--lr", "1", folder=tmp_path)
    document = checked(json.loads(done.stdout))
    command = "memprof run --worst-batch --gpu rtx-4090 torchrun --nproc-per-node 2 script.py --lr 1"
    if begin:
        assert any(line["text"].endswith(command) for line in document["findings"][0]["evidence"])
    else:
        assert document["error"]["hint"] == f"start it with torchrun, which sets LOCAL_RANK: {command}"
        assert document["error"]["value"].endswith("script.py:2 <module>: KeyError: 'LOCAL_RANK'")
    assert done.exit_code == 1
