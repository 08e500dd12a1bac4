"""A run that was refused something, or whose children were, has no verdict: text, JSON, exit code, and how it ended."""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.lanes import by_day
from tests.processes import Done, python

TWO = """
import torch
x = torch.ones(9, device="cuda")
torch.distributed.init_process_group("nccl", rank=0, world_size=2, init_method="tcp://127.0.0.1:1")
"""
CAUGHT = """
import torch
x = torch.ones(9, device="cuda")
try:
    torch.distributed.init_process_group("nccl", rank=0, world_size=2, init_method="tcp://127.0.0.1:1")
except Exception:
    {then}
"""
CHILD = "import torch\nmodel = torch.nn.Linear(9, 9).to('cuda' if torch.{asked} else 'cpu')\nprint('finished')"


def ran(tmp_path, text: str, *options: str) -> Done:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return python("-m", "memprof", "run", *options, file, folder=tmp_path)


def refused(done: Done, said: str) -> dict:
    """The document of a run that has no verdict."""
    assert done.exit_code == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["verdict"]["fits"] is None
    assert document["failure"]["kind"] == "refused" and said in document["failure"]["message"]
    first = document["findings"][0]
    assert (first["id"], first["severity"]) == ("run-failed", "error") and said in first["title"]
    return document


def test_what_is_not_simulated_ends_the_run(tmp_path):
    document = refused(ran(tmp_path, TWO, "--json"), "a group of 2 processes")
    assert document["program"]["ended"] == "not simulated" and document["failure"]["source"].endswith("<module>")
    done = ran(tmp_path, TWO)
    assert done.exit_code == 1 and done.stdout.startswith("Refused: ") and "Fits" not in done.stdout
    assert "stopped where it cannot be simulated" in " ".join(done.stdout.split())  # folded after the path of the file
    assert done.stderr.startswith("memprof: ") and "GPUs for 1\n  hint:  memprof run --gpus 2" in done.stderr


@pytest.mark.parametrize("then", by_day(["pass", "raise SystemExit(5)", "raise ValueError('mine')"], "pass"))
def test_a_program_that_catches_it_has_no_verdict_either(tmp_path, then):
    """On a GPU it would not have gone on as it did."""
    done = ran(tmp_path, CAUGHT.format(then=then), "--json")
    code = 5 if "5" in then else 1
    assert refused(done._replace(exit_code=1), "a group of 2 processes")["program"]["exit_code"] in (0, 1, 5)
    assert done.exit_code == code


def test_what_is_refused_after_the_run_was_stopped_is_no_part_of_it(tmp_path):
    text = """
    import torch
    model = torch.nn.Linear(9, 9).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    try:
        for _ in range(9):
            model(torch.ones(2, 9, device="cuda")).sum().backward()
            optimizer.step()
    finally:
        torch.distributed.init_process_group("nccl", rank=0, world_size=2, init_method="tcp://127.0.0.1:1")
    """
    done = ran(tmp_path, text, "--json", "--steps", "2")
    assert done.exit_code == 0 and json.loads(done.stdout)["verdict"]["fits"] is True


def test_interrupted(tmp_path):
    done = ran(tmp_path, "import torch\nx = torch.ones(9, device='cuda')\nraise KeyboardInterrupt", "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 130 and document["verdict"]["fits"] is None
    assert document["failure"]["kind"] == "interrupted" and "it was interrupted" in document["findings"][0]["title"]


@pytest.mark.nightly
@pytest.mark.parametrize("asked", by_day(["accelerator.is_available()", "cuda.is_available()"], "cuda.is_available()"))
def test_no_child_trains_for_real(tmp_path, asked):
    (tmp_path / "child.py").write_text(CHILD.format(asked=asked), encoding="utf-8")
    text = """
    import subprocess, sys, torch
    x = torch.ones(9, device="cuda")
    subprocess.run([sys.executable, "child.py"])
    print("goes on")
    """
    done = ran(tmp_path, text, "--json")
    document = refused(done, "child.py:2 <module> uses CUDA in another process")
    assert document["program"]["ended"] == "exit" and "goes on" in done.stderr
    assert "finished" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", by_day(["spawn", "fork", "forkserver"], "fork"))
def test_no_process_of_multiprocessing_trains_for_real(tmp_path, method):
    """Not one whose class has a `run` of its own either, nor one that imports torch in it."""
    text = f"""
    import multiprocessing
    class Child(multiprocessing.get_context({method!r}).Process):
        def run(self):
            import torch
            torch.set_num_threads(1)
            print(torch.nn.Linear(9, 9).to('cuda' if torch.cuda.is_available() else 'cpu').weight.device)
    if __name__ == "__main__":
        import torch
        x = torch.ones(9, device="cuda")
        child = Child()
        child.start()
        child.join()
    """
    done = ran(tmp_path, text, "--json")
    refused(done, "run uses CUDA in another process")
    assert "\ncpu" not in done.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_a_program_does_not_wait_for_what_a_refused_child_never_sends(tmp_path):
    text = """
    import torch
    from torch import multiprocessing
    def train(queue):
        queue.put(torch.ones(2, device="cuda").sum().item())
    if __name__ == "__main__":
        x = torch.ones(9, device="cuda")
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        context.Process(target=train, args=(queue,)).start()
        print("got", queue.get())
    """
    done = ran(tmp_path, text, "--json")
    refused(done, "train uses CUDA in another process")
    assert "got" not in done.stderr.split()


@pytest.mark.nightly
def test_a_child_without_torch_and_one_on_the_host_are_let_through(tmp_path):
    (tmp_path / "host.py").write_text("import torch\nprint('host', torch.ones(3).sum().item())", encoding="utf-8")
    text = """
    import os, subprocess, sys, torch
    x = torch.ones(9, device="cuda")
    print(subprocess.check_output([sys.executable, "-c", "import sys; print('no', 'torch' in sys.modules)"], text=True))
    print(subprocess.check_output([sys.executable, "host.py"], text=True))
    """
    done = ran(tmp_path, text, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["verdict"]["fits"] is True
    assert "no False" in done.stderr and "host 3.0" in done.stderr


def test_refused_before_anything_was_on_the_gpu(tmp_path):
    (tmp_path / "child.py").write_text(CHILD.format(asked="cuda.is_available()"), encoding="utf-8")
    done = ran(tmp_path, "import subprocess, sys\nsubprocess.run([sys.executable, 'child.py'])")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "memprof: not yet: " in done.stderr and "memprof run PROGRAM" in done.stderr


def test_a_program_that_puts_another_in_its_place(tmp_path):
    done = ran(
        tmp_path, "import os, sys, torch\nx = torch.ones(9, device='cuda')\nos.execl(sys.executable, 'p')", "--json"
    )
    refused(done, "in its own place")


TRAIN = """
import os, sys, torch
from torch import nn
print(sys.argv[1:], *(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")))
{wrap}
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = """
torch.distributed.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), device_ids=[int(os.environ["LOCAL_RANK"])])
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator()
model = accelerator.prepare(nn.Linear(64, 64))
print("on", accelerator.device, accelerator.mixed_precision)
"""
SHARDED = """
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Linear(64, 64).cuda()
fully_shard(model)
"""
LAUNCHED = {
    "torchrun": (("torchrun", "--nproc_per_node", "gpu"), DDP, "['--lr', '1'] 0 1 0 29500"),
    "its module": (("-m", "torch.distributed.run", "--nproc_per_node", "1"), DDP, "['--lr', '1'] 0 1 0 29500"),
    "torchrun, sharded": (("torchrun",), SHARDED, "['--lr', '1'] 0 1 0 29500"),
    "accelerate": (("accelerate", "launch", "--mixed_precision", "bf16"), ACCELERATE, "on cuda bf16"),
    "its module too": (("-m", "accelerate.commands.launch", "--num_processes", "1"), ACCELERATE, "on cuda no"),
    "deepspeed": (("deepspeed", "--no_local_rank"), DDP, "['--lr', '1'] 0 1 0 29500"),
}


@pytest.mark.parametrize("how", by_day(LAUNCHED, "torchrun"))
def test_a_launcher_with_one_process_runs_in_this_one(tmp_path, how):
    launcher, wrap, said = LAUNCHED[how]
    (tmp_path / "train.py").write_text(TRAIN.format(wrap=wrap), encoding="utf-8")
    done = python("-m", "memprof", "run", "--json", "--steps", "2", *launcher, "train.py", "--lr", "1", folder=tmp_path)
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert said in done.stderr and document["verdict"]["fits"] is True and document["program"]["steps"] == 2
    assert document["program"]["command"] == [*launcher, "train.py", "--lr", "1"]
    assert document["peak"]["categories"]["optimizer state"] >= 2 * 64 * 65 * 4
    assert ("communication" in document["peak"]["categories"]) == (wrap != ACCELERATE)  # which joins no group


def test_of_several_processes_one_is_run(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.format(wrap=DDP), encoding="utf-8")
    launched = ("torchrun", "--nproc_per_node", "4", "train.py")
    done = python("-m", "memprof", "run", "--rank", "2", "--json", *launched, folder=tmp_path)
    assert done.exit_code == 0 and "[] 2 4 2 29500" in done.stderr
    document = json.loads(done.stdout)
    assert (document["rank"]["rank"], document["rank"]["world_size"]) == (2, 4) and "gpus" not in document
    assert "communication" in document["peak"]["categories"]
    done = python("-m", "memprof", "run", "--gpus", "2", *launched, folder=tmp_path)
    assert (done.exit_code, done.stdout) == (2, "") and "start 4 processes on a machine with 2" in done.stderr
    missing = python("-m", "memprof", "run", "torchrun", "no_such.py", folder=tmp_path)
    assert missing.exit_code == 2 and missing.stderr.startswith("memprof: no such script")


def test_handlers_of_atexit_see_the_gpu(tmp_path):
    text = """
    import atexit, torch
    x = torch.ones(4, device="cuda")
    atexit.register(lambda: print("bye", torch.cuda.is_available(), torch.ones(1 << 20, device="cuda").is_cuda))
    @atexit.register
    def first():
        torch.cuda.synchronize()
        print("first")
    """
    done = ran(tmp_path, text, "--json")
    assert done.exit_code == 0 and done.stderr == "first\nbye True True\n"
    assert json.loads(done.stdout)["peak"]["allocated_bytes"] >= 4 << 20, "it is a part of the run"


def test_an_operator_without_a_kernel_is_not_the_scripts_failure(memprof, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nx = torch.zeros(64, device='cuda')\ntorch.library.define('mine::op', '(Tensor x) -> Tensor')\n"
        "torch.ops.mine.op(x)\n"
    )
    done = memprof("run", "--json", script)
    assert done.exit_code == 1
    assert (done.json["program"]["ended"], done.json["failure"]["kind"]) == ("not simulated", "no meta kernel")
