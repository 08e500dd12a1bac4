"""Commands that start a launcher (torchrun, accelerate, deepspeed): one of its processes is run in this process.

A launcher's child process would not see the run's virtual GPU. The launcher's own parser, if installed, parses the
arguments, and sees the run's GPUs: `--nproc_per_node gpu` is the number of virtual GPUs.
"""

from __future__ import annotations

import argparse
import base64
import functools
import importlib
import json
import os
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.errors import UsageError


@dataclass(frozen=True, slots=True)
class ProcessSelection:
    """The process to run of all processes of a program, and the GPUs and machines of the program."""

    rank: int | None = None  # None: the first, or RANK of the environment
    gpus: int | None = None  # on each machine; None: as many as the launcher starts processes there
    nodes: int | None = None  # machines; None: as many as the launcher takes, or one


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """One process: the program as `python` takes it, environment variables, rank, and number of processes."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool
    environment: dict[str, str]
    rank: int = 0
    gpus: int = 1  # on each machine
    nodes: int = 1
    # Processes of the whole program, if known before the run; else the number of GPUs.
    size: int = 1


# Returns the process that a launcher's arguments start; raises UsageError (no Python program, launcher not installed,
# too few GPUs or ranks), and SystemExit of the launcher's own parser.
Launcher = Callable[[Sequence[str], ProcessSelection], ProcessStart]
# Variables with the number of GPUs of a process; the first that is set counts.
_COUNT_VARIABLES = ("LOCAL_WORLD_SIZE", "WORLD_SIZE")
# Variables that a launcher sets in each process, and that scripts and init_process_group read.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# torch/distributed/rendezvous.py, _env_error.
_MISSING_VARIABLE = re.compile(rf"environment variable ({'|'.join(_RANK_VARIABLES)}) expected, but not set")


def find_missing_variable(error: BaseException | None) -> str:
    """Return the launcher's variable whose absence raised `error`; empty for other errors."""
    if isinstance(error, KeyError) and error.args and error.args[0] in _RANK_VARIABLES:
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        environ_getitem = type(os.environ).__getitem__.__code__  # another dict may have such keys too
        return str(error.args[0]) if codes and codes[-1] is environ_getitem else ""
    found = _MISSING_VARIABLE.search(str(error)) if isinstance(error, ValueError) else None
    return found[1] if found else ""


def start_without_launcher(
    name: str, arguments: tuple[str, ...], is_module: bool, selection: ProcessSelection
) -> ProcessStart:
    """Return the process of a program without launcher, by RANK and WORLD_SIZE; raise UsageError: no such rank."""
    counts = [int(os.environ[one]) for one in _COUNT_VARIABLES if os.environ.get(one, "").isdigit()]
    gpus = selection.gpus or (counts[0] if counts else 1)
    nodes = selection.nodes or (-(-counts[-1] // gpus) if counts and selection.gpus is None else 1)
    size = counts[-1] if counts else gpus * nodes
    if selection.rank is None:
        text = os.environ.get("RANK", "")
        return ProcessStart(name, arguments, is_module, {}, int(text) if text.isdigit() else 0, gpus, nodes, size)
    _check_rank(selection.rank, size)
    environment = {"RANK": str(selection.rank), "LOCAL_RANK": str(selection.rank % gpus)} if counts else {}
    return ProcessStart(name, arguments, is_module, environment, selection.rank, gpus, nodes, size)


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise UsageError("there is no such rank", value=f"--rank {rank} of {size}", hint="ranks count from 0")


class _LaunchedProcess:
    """The selected one of the processes that a launcher starts; UsageError: too few GPUs, or no such rank."""

    def __init__(self, launcher: str, selection: ProcessSelection, processes: Sequence[int]) -> None:
        max_processes = max(processes, default=0)
        if min(processes, default=0) < 1:
            hint = "at least one process on each machine"
            raise UsageError(f"{launcher} is to start nothing", value=f"{max_processes} processes", hint=hint)
        if selection.gpus is not None and max_processes > selection.gpus:
            problem = f"{launcher} is to start {max_processes} processes on a machine with {selection.gpus} of the GPUs"
            raise UsageError(problem, value=f"--gpus {selection.gpus}", hint=f"--gpus {max_processes}, or leave it out")
        if selection.nodes is not None and selection.nodes != len(processes):
            raise UsageError(
                f"{launcher} is to start processes on {len(processes)} machines",
                value=f"--nodes {selection.nodes}",
                hint="leave out --nodes: the launcher's own options say how many",
            )
        self.size = sum(processes)
        self.rank = selection.rank or 0
        _check_rank(self.rank, self.size)
        self.gpus, self.nodes = selection.gpus or max_processes, len(processes)
        self.local_rank, self.node = self.rank, 0
        while self.local_rank >= processes[self.node]:
            self.local_rank -= processes[self.node]
            self.node += 1
        self.local_size = processes[self.node]

    def start(self, args: Any, environment: dict[str, str], *first_arguments: str) -> ProcessStart:
        """Return the start of this process: program, arguments, environment and rank."""
        if args.no_python:
            problem = "the launcher is to start a command, and no Python program"
            raise UsageError(problem, value=args.training_script, hint="leave out --no_python, and name the script")
        arguments = (*first_arguments, *args.training_script_args)
        where = (self.rank, self.gpus, self.nodes, self.size)
        return ProcessStart(args.training_script, arguments, bool(args.module), environment, *where)


def find_launcher(name: str, arguments: Sequence[str], *, is_module: bool) -> tuple[Launcher, Sequence[str]] | None:
    """Return the launcher that a module or command (bare, or in a bin folder) is, with its arguments, or None."""
    if is_module:
        words = _MODULES.get(name)
    else:
        path = Path(name)
        known = path.parent.name == "bin" if os.sep in name else not path.is_file()
        words = _COMMANDS.get(path.name) if known else None
    if words is None:
        return None
    launcher, first = words
    if first and tuple(arguments[:1]) != (first,):
        return None
    return launcher, arguments[1:] if first else arguments


def _start_torchrun(
    arguments: Sequence[str], selection: ProcessSelection, module: str = "torch.distributed.run"
) -> ProcessStart:
    run = importlib.import_module("torch.distributed.run")
    args = importlib.import_module(module).parse_args(list(arguments))
    processes = _parse_number("--nproc-per-node", args.nproc_per_node, run.determine_local_world_size)
    nodes = _parse_number("--nnodes", args.nnodes, lambda text: run.parse_min_max_nnodes(text)[1])
    started = _LaunchedProcess("torch.distributed.run", selection, [processes] * nodes)
    local_rank = () if run.get_use_env(args) else (f"--local-rank={started.local_rank}",)
    return started.start(args, _make_torch_variables(args, started), *local_rank)


def _parse_number(flag: str, text: str, read: Callable[[str], int]) -> int:
    try:
        return read(text)
    except (ValueError, RuntimeError) as error:
        problem = "torch's launcher cannot read it"
        raise UsageError(problem, value=f"{flag} {text}", hint="a number, as torchrun --help has it") from error


def _make_torch_variables(args: Any, started: _LaunchedProcess) -> dict[str, str]:
    """Return a worker's variables (_start_workers of torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    values = {
        **dict.fromkeys(("RANK", "ROLE_RANK"), started.rank),
        "LOCAL_RANK": started.local_rank,
        "GROUP_RANK": started.node,
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), started.size),
        "LOCAL_WORLD_SIZE": started.local_size,
        "GROUP_WORLD_SIZE": started.nodes,
        "ROLE_NAME": args.role,
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": args.master_port or 29500,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": args.max_restarts,
        "TORCHELASTIC_RUN_ID": args.rdzv_id,
        "TORCHELASTIC_USE_AGENT_STORE": False,  # there is no agent, whose store workers would look for
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {name: str(value) for name, value in values.items()}


def _start_accelerate(arguments: Sequence[str], selection: ProcessSelection) -> ProcessStart:
    try:
        launch = importlib.import_module("accelerate.commands.launch")
        utils = importlib.import_module("accelerate.utils.launch")
    except ImportError as error:
        raise UsageError("accelerate cannot be imported", value=str(error), hint="pip install accelerate") from error
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(list(arguments)))
    nodes = args.num_machines or 1
    started = _LaunchedProcess("accelerate launch", selection, [max(args.num_processes // nodes, 1)] * nodes)
    is_distributed = args.use_deepspeed or args.use_fsdp or args.use_megatron_lm or args.multi_gpu
    if not is_distributed and started.size > 1 and not args.cpu:
        args.multi_gpu = is_distributed = True  # as on a machine that has these GPUs
    if not is_distributed or args.cpu:
        return started.start(args, utils.prepare_simple_launcher_cmd_env(args)[1])
    # accelerate starts these processes through torch's launcher.
    own = utils.prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else utils.prepare_multi_gpu_env(args)
    of_torch = importlib.import_module("torch.distributed.run").get_args_parser().parse_args([args.training_script])
    of_torch.master_port = args.main_process_port or of_torch.master_port
    return started.start(args, own | _make_torch_variables(of_torch, started))


def _start_deepspeed(arguments: Sequence[str], selection: ProcessSelection) -> ProcessStart:
    """Return the process that `deepspeed` starts, by its arguments (deepspeed/launcher/runner.py of 0.17)."""
    parser = argparse.ArgumentParser(prog="deepspeed")
    for flag in ("-H", "-i", "-e", "--hostfile", "--exclude", "--launcher", "--launcher_args", "--bind_core_list"):
        parser.add_argument(flag, default="")
    for flag in ("--enable_each_rank_log", "--autotuning", "--min_elastic_nodes", "--max_elastic_nodes"):
        parser.add_argument(flag)
    for flag in ("--no_ssh_check", "--force_multi", "--save_pid", "--elastic_training", "--bind_cores_to_rank"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--include", default="")
    parser.add_argument("--num_nodes", default="1")
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    parser.add_argument("--master_addr", default="")
    _add_common_arguments(parser)
    args = parser.parse_args(list(arguments))
    # NAME[:SLOT[,SLOT ...]][@...]: a name alone is all GPUs of the machine, of which there is one.
    included = args.include or args.i
    slots = [len(node.partition(":")[2].split(",")) for node in included.split("@") if included]
    nodes = abs(int(args.num_nodes.rpartition(":")[2]))
    gpus_per_node = args.num_gpus if args.num_gpus > 0 else selection.gpus or 1
    return _make_deepspeed_start(args, _LaunchedProcess("deepspeed", selection, slots or [gpus_per_node] * nodes))


def _start_deepspeed_node(arguments: Sequence[str], selection: ProcessSelection) -> ProcessStart:
    """Return the process that `deepspeed` starts on each machine (deepspeed/launcher/launch.py of 0.17)."""
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch")
    for flag in ("--node_rank", "--min_elastic_nodes", "--max_elastic_nodes", "--save_pid"):
        parser.add_argument(flag, type=int)
    for flag in ("--enable_each_rank_log", "--bind_core_list"):
        parser.add_argument(flag)
    for flag in ("--enable_elastic_training", "--bind_cores_to_rank"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--world_info", required=True)
    parser.add_argument("--master_addr", default="127.0.0.1")
    _add_common_arguments(parser)
    args = parser.parse_args(list(arguments))
    try:
        gpus = json.loads(base64.urlsafe_b64decode(args.world_info))
        processes = list(map(len, gpus.values()))
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError("--world_info cannot be read", value=args.world_info, hint="it is base64 of JSON") from error
    return _make_deepspeed_start(args, _LaunchedProcess("deepspeed.launcher.launch", selection, processes))


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--master_port", default="29500")
    for flag in ("--module", "--no_python", "--no_local_rank"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)


def _make_deepspeed_start(args: argparse.Namespace, started: _LaunchedProcess) -> ProcessStart:
    environment = {
        "RANK": str(started.rank),
        "LOCAL_RANK": str(started.local_rank),
        "CROSS_RANK": str(started.node),
        "WORLD_SIZE": str(started.size),
        "LOCAL_SIZE": str(started.local_size),
        "CROSS_SIZE": str(started.nodes),
        "MASTER_ADDR": args.master_addr or "127.0.0.1",
        "MASTER_PORT": args.master_port,
    }
    return started.start(args, environment, *(() if args.no_local_rank else (f"--local_rank={started.local_rank}",)))


# Name of a command -> the launcher, and the first argument that selects the launcher.
_COMMANDS: dict[str, tuple[Launcher, str]] = {
    "torchrun": (_start_torchrun, ""),
    "accelerate": (_start_accelerate, "launch"),
    "accelerate-launch": (_start_accelerate, ""),
    "deepspeed": (_start_deepspeed, ""),
}
_MODULES: dict[str, tuple[Launcher, str]] = {
    "torch.distributed.run": (_start_torchrun, ""),
    "torch.distributed.launch": (functools.partial(_start_torchrun, module="torch.distributed.launch"), ""),
    "accelerate.commands.launch": (_start_accelerate, ""),
    "accelerate.commands.accelerate_cli": (_start_accelerate, "launch"),
    "deepspeed": (_start_deepspeed, ""),
    "deepspeed.launcher.runner": (_start_deepspeed, ""),
    "deepspeed.launcher.launch": (_start_deepspeed_node, ""),
}
