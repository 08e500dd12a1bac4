"""Launchers: recognised by module and by command, asked what they start, refused with more than one process."""

from __future__ import annotations

import base64
import json
import os

import pytest

from memprof.errors import UsageError
from memprof.script import EndReason, Program, StopRule
from memprof.script.launchers import ProcessSelection, ProcessStart, find_launcher, find_missing_variable

FIRST = ProcessSelection()


def start(command: str, place: ProcessSelection = FIRST) -> ProcessStart:
    words = command.split()
    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    found = find_launcher(name, arguments, is_module=is_module)
    assert found is not None
    launcher, rest = found
    return launcher(rest, place)


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
    ("command", "rank", "gpus", "nodes", "variables"),
    [
        ("torchrun --nproc_per_node 4 t.py", 3, 4, 1, {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}),
        ("torchrun --nproc_per_node 4 --nnodes 1:2 t.py", 5, 4, 2, {"RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "1"}),
        ("-m torch.distributed.launch --nproc_per_node 2 t.py", 1, 2, 1, {"LOCAL_WORLD_SIZE": "2"}),
        ("accelerate launch --multi_gpu --num_processes 8 t.py", 7, 8, 1, {"RANK": "7", "WORLD_SIZE": "8"}),
        ("accelerate launch --num_processes 2 t.py", 1, 2, 1, {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}),
        ("accelerate launch --num_processes 4 --num_machines 2 --machine_rank 0 t.py", 3, 2, 2, {"LOCAL_RANK": "1"}),
        ("deepspeed --num_gpus=2 t.py", 1, 2, 1, {"LOCAL_SIZE": "2"}),
        ("deepspeed --include localhost:0,1@other:0 t.py", 2, 2, 2, {"WORLD_SIZE": "3", "CROSS_RANK": "1"}),
        ("deepspeed --num_nodes 2 t.py", 1, 1, 2, {"LOCAL_RANK": "0", "CROSS_SIZE": "2"}),
        (f"-m deepspeed.launcher.launch --world_info={world(a=[0], b=[0])} t.py", 1, 1, 2, {"WORLD_SIZE": "2"}),
    ],
)
def test_one_of_several_processes(command, rank, gpus, nodes, variables):
    found = start(command, ProcessSelection(rank))
    assert (found.rank, found.gpus, found.nodes) == (rank, gpus, nodes)
    assert variables.items() <= found.environment.items()
    assert start(command).environment["RANK"] == "0"
    with pytest.raises(UsageError, match="no such rank"):
        start(command, ProcessSelection(99))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (ProcessSelection(gpus=2), "start 4 processes on a machine with 2 of the GPUs"),
        (ProcessSelection(nodes=2), "processes on 1 machines"),
    ],
)
def test_fewer_gpus_than_processes(place, said):
    with pytest.raises(UsageError, match=said):
        start("torchrun --nproc_per_node 4 t.py", place)


@pytest.mark.parametrize(
    ("environment", "place", "found"),
    [
        ({}, ProcessSelection(), (0, 1, 1, {})),
        ({}, ProcessSelection(3, 4), (3, 4, 1, {})),
        ({}, ProcessSelection(5, 4, 2), (5, 4, 2, {})),
        ({"WORLD_SIZE": "8", "RANK": "3"}, ProcessSelection(), (3, 8, 1, {})),
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            ProcessSelection(5),
            (5, 4, 2, {"RANK": "5", "LOCAL_RANK": "1"}),
        ),
        ({"WORLD_SIZE": "8", "RANK": "3"}, ProcessSelection(gpus=4), (3, 4, 1, {})),
    ],
)
def test_processes_by_hand(monkeypatch, environment, place, found):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started = Program("train.py").start(place)
    assert isinstance(started, ProcessStart)
    assert (started.rank, started.gpus, started.nodes, started.environment) == found


@pytest.mark.parametrize(
    "command",
    ["torchrun --no-python ls", "deepspeed --no_python ls", "-m deepspeed.launcher.launch --world_info=x t.py"],
)
def test_what_is_no_python_program(command):
    with pytest.raises(UsageError):
        start(command)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nproc-per-node x", "value: --nproc-per-node x"),
        ("--nnodes x", "value: --nnodes x"),
        ("--nnodes 1:x", "value: --nnodes 1:x"),
        ("--nnodes 1:2:3", "value: --nnodes 1:2:3"),
        ("--nproc-per-node 0", "is to start nothing"),
        ("--nproc-per-node -1", "is to start nothing"),
        ("--nnodes 0", "is to start nothing"),
    ],
)
def test_numbers_that_torchs_launcher_cannot_take(options, said):
    with pytest.raises(UsageError, match=said):
        start(f"torchrun {options} train.py")


def test_vllm_has_a_worker_for_each_gpu_of_the_model(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    one, two = start("vllm serve m"), start("vllm serve m -tp 2 --max-model-len 8", ProcessSelection(rank=1))
    assert (one.name, one.arguments, one.environment, one.gpus) == ("vllm", ("serve", "m"), {}, 1)
    assert (two.rank, two.gpus, two.environment["WORLD_SIZE"], two.environment["LOCAL_RANK"]) == (1, 2, "2", "1")
    assert two.arguments == ("serve", "m", "-tp", "2", "--max-model-len", "8")


@pytest.mark.parametrize("server", ["sglang serve", "-m sglang.launch_server"])
def test_sglang_has_a_scheduler_for_each_gpu_of_the_model(monkeypatch, server):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    process = start(f"{server} --model-path m --tp 2", ProcessSelection(rank=1))
    assert (process.rank, process.gpus, process.is_module) == (1, 2, server.startswith("-m"))
    assert process.arguments[-4:] == ("--model-path", "m", "--tp", "2")


def test_vllm_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="vLLM is not installed"):
        start("vllm serve m")


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
    assert program.run(StopRule()).ended is EndReason.EXIT
    assert capsys.readouterr().out == f"__main__ ['train.py', 'a'] 0 {os.getpid()}\n"
    assert os.environ["RANK"] == "before" and "WORLD_SIZE" not in os.environ


def test_what_cannot_be_started():
    for arguments in (("no_such.py",), ("--nproc_per_node", "3", "no_such.py"), ("--nproc_per_node", "3", __file__)):
        outcome = Program("torchrun", arguments).run(StopRule())
        assert outcome.ended is EndReason.NOT_SIMULATED and isinstance(outcome.error, UsageError)


def test_the_variable_of_a_launcher_that_a_script_looks_for(monkeypatch):
    import torch

    def error_of(code: str) -> BaseException | None:
        try:
            exec(code, {"os": os, "dist": torch.distributed})
        except Exception as error:
            return error
        return None

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
        assert find_missing_variable(error_of(f"int(os.environ['{name}'])")) == name
    assert find_missing_variable(error_of("dist.init_process_group('gloo')")) == "RANK"
    assert find_missing_variable(error_of("os.environ['NO_SUCH_VARIABLE']")) == ""
    assert find_missing_variable(error_of("{}['RANK']")) == ""  # a table of the script's own
    assert find_missing_variable(KeyError()) == find_missing_variable(None) == ""
