"""Launchers: recognised by module and by command, asked what they start, refused with more than one process."""

from __future__ import annotations

import base64
import json
import os

import pytest

from memprof.errors import MemprofError, UsageError
from memprof.script import Ended, Program, StopRule
from memprof.script.launchers import Start, find_launcher


def start(command: str) -> Start:
    words = command.split()
    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    found = find_launcher(name, arguments, is_module=is_module)
    assert found is not None
    launcher, rest = found
    return launcher(rest)


def world(**nodes: list[int]) -> str:
    return base64.urlsafe_b64encode(json.dumps(nodes).encode()).decode()


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("accelerate.commands.launch")
    monkeypatch.setattr("accelerate.commands.launch.default_config_file", str(tmp_path / "none.yaml"))


TORCH = "--nproc_per_node 1 --master_port 29511"


@pytest.mark.parametrize(
    ("command", "name", "arguments", "is_module", "environment"),
    [
        (f"torchrun {TORCH} train.py --lr 1", "train.py", ("--lr", "1"), False, {"MASTER_PORT": "29511"}),
        (f"/usr/bin/torchrun {TORCH} train.py", "train.py", (), False, {"RANK": "0", "WORLD_SIZE": "1"}),
        ("torchrun --standalone -m package.train x", "package.train", ("x",), True, {"LOCAL_WORLD_SIZE": "1"}),
        ("-m torch.distributed.run train.py", "train.py", (), False, {"MASTER_ADDR": "127.0.0.1"}),
        ("-m torch.distributed.launch train.py", "train.py", ("--local-rank=0",), False, {"LOCAL_RANK": "0"}),
        ("-m torch.distributed.launch --use-env train.py", "train.py", (), False, {"LOCAL_RANK": "0"}),
        (
            "accelerate launch --num_processes 1 --mixed_precision bf16 train.py --lr 1",
            "train.py",
            ("--lr", "1"),
            False,
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
        ),
        ("-m accelerate.commands.launch --num_processes 1 -m pack.train", "pack.train", (), True, {}),
        ("-m accelerate.commands.accelerate_cli launch --num_processes 1 t.py", "t.py", (), False, {}),
        (
            "accelerate-launch --num_processes 1 --use_fsdp --main_process_port 29512 t.py",
            "t.py",
            (),
            False,
            {"ACCELERATE_USE_FSDP": "true", "MASTER_PORT": "29512", "WORLD_SIZE": "1"},
        ),
        ("deepspeed train.py --deepspeed d.json", "train.py", ("--local_rank=0", "--deepspeed", "d.json"), False, {}),
        ("deepspeed --num_gpus 1 --no_local_rank --module a.b", "a.b", (), True, {"CROSS_SIZE": "1", "RANK": "0"}),
        ("deepspeed --include localhost:3 t.py", "t.py", ("--local_rank=0",), False, {"LOCAL_SIZE": "1"}),
        (
            f"-m deepspeed.launcher.launch --world_info={world(localhost=[0])} --master_port=29513 t.py -x",
            "t.py",
            ("--local_rank=0", "-x"),
            False,
            {"MASTER_PORT": "29513"},
        ),
    ],
)
def test_what_is_started(command, name, arguments, is_module, environment):
    found = start(command)
    assert (found.name, found.arguments, found.is_module) == (name, arguments, is_module)
    assert environment.items() <= found.environment.items()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("torchrun --nproc_per_node 4 t.py", "torch.distributed.run is to start 4 processes"),
        ("torchrun --nnodes 1:2 --rdzv-backend c10d t.py", "torch.distributed.run is to start 2 processes"),
        ("accelerate launch --multi_gpu --num_processes 8 t.py", "accelerate launch is to start 8 processes"),
        ("deepspeed --num_gpus=2 t.py", "deepspeed is to start 2 processes"),
        ("deepspeed --include localhost:0,1@other:0 t.py", "deepspeed is to start 3 processes"),
        ("deepspeed --num_nodes 2 t.py", "deepspeed is to start 2 processes"),
        (f"-m deepspeed.launcher.launch --world_info={world(a=[0], b=[0])} t.py", "launch is to start 2 processes"),
    ],
)
def test_several_processes_come_later(command, said):
    with pytest.raises(MemprofError, match=said) as raised:
        start(command)
    assert raised.value.problem.startswith("not yet: ") and "several GPUs come later" in raised.value.problem


@pytest.mark.parametrize(
    "command",
    ["torchrun --no-python ls", "deepspeed --no_python ls", "-m deepspeed.launcher.launch --world_info=x t.py"],
)
def test_what_is_no_python_program(command):
    with pytest.raises(UsageError):
        start(command)


def test_programs_of_the_user(tmp_path):
    (tmp_path / "deepspeed").write_text("print('mine')")
    for name, is_module in (("deepspeed", False), ("train.py", False), ("torchrun", True), ("src/torchrun", False)):
        assert find_launcher(name, (), is_module=is_module) is None
    assert find_launcher("accelerate", ("config",), is_module=False) is None


def test_it_runs_here_as_main(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "before")
    (tmp_path / "train.py").write_text("import os, sys; print(__name__, sys.argv, os.environ['RANK'], os.getpid())")
    program = Program("torchrun", ("train.py", "a"))
    program.check()
    assert program.run(StopRule()).ended is Ended.EXIT
    assert capsys.readouterr().out == f"__main__ ['train.py', 'a'] 0 {os.getpid()}\n"
    assert os.environ["RANK"] == "before" and "WORLD_SIZE" not in os.environ


def test_what_cannot_be_started():
    outcome = Program("torchrun", ("no_such.py",)).run(StopRule())
    assert outcome.ended is Ended.NOT_SIMULATED and isinstance(outcome.error, UsageError)
    outcome = Program("torchrun", ("--nproc_per_node", "3", "no_such.py")).run(StopRule())
    assert outcome.ended is Ended.NOT_SIMULATED and outcome.exit_code == 1
