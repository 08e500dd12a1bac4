"""Launchers (torchrun, accelerate, deepspeed): with one process, what they start is run in this process instead.

A launcher's child would know nothing of the card that the run has. What its arguments mean is asked of the launcher's
own parser where it is installed, on the card that the run has: `--nproc_per_node gpu` is one.
"""

from __future__ import annotations

import argparse
import base64
import functools
import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.errors import MemprofError, UsageError


@dataclass(frozen=True, slots=True)
class Start:
    """What a launcher starts: the program as `python` takes it, and the variables of its environment."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool
    environment: dict[str, str]


Launcher = Callable[[Sequence[str]], Start]
"""Given its arguments, says what it starts.

Raises:
    MemprofError: more than one process.
    UsageError: what it starts is no Python program, or the launcher is not installed.
    SystemExit: of the launcher's own parser.
"""


def find_launcher(name: str, arguments: Sequence[str], *, is_module: bool) -> tuple[Launcher, Sequence[str]] | None:
    """The launcher that a command is, and its own arguments; None if it is a program of the user's.

    Args:
        name: a module, or a command as one types it: bare, or in a folder of commands.
        arguments: what follows.
        is_module: whether it is a module.
    """
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


def _torchrun(arguments: Sequence[str], module: str = "torch.distributed.run") -> Start:
    run = importlib.import_module("torch.distributed.run")
    args = importlib.import_module(module).parse_args(list(arguments))
    processes = run.determine_local_world_size(args.nproc_per_node)
    _one(processes * run.parse_min_max_nnodes(args.nnodes)[1], "torch.distributed.run")
    local_rank = () if run.get_use_env(args) else ("--local-rank=0",)
    return _start(args, _variables_of_torch(args), *local_rank)


def _variables_of_torch(args: Any) -> dict[str, str]:
    """Of one worker (torch/distributed/elastic/agent/server/local_elastic_agent.py, `_start_workers`)."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT"), "0")
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
    return {
        **ranks,
        **sizes,
        "ROLE_NAME": args.role,
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": str(args.master_port or 29500),
        "TORCHELASTIC_MAX_RESTARTS": str(args.max_restarts),
        "TORCHELASTIC_RUN_ID": str(args.rdzv_id),
        # There is no agent, whose store workers would look for.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _accelerate(arguments: Sequence[str]) -> Start:
    try:
        launch = importlib.import_module("accelerate.commands.launch")
        utils = importlib.import_module("accelerate.utils.launch")
    except ImportError as error:
        raise UsageError("accelerate cannot be imported", value=str(error), hint="pip install accelerate") from error
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(list(arguments)))
    _one(max(args.num_processes, args.num_machines or 1), "accelerate launch")
    if not (args.use_deepspeed or args.use_fsdp or args.use_megatron_lm or args.multi_gpu) or args.cpu:
        return _start(args, utils.prepare_simple_launcher_cmd_env(args)[1])
    # accelerate has torch's launcher start these.
    own = utils.prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else utils.prepare_multi_gpu_env(args)
    of_torch = importlib.import_module("torch.distributed.run").get_args_parser().parse_args([args.training_script])
    of_torch.master_port = args.main_process_port or of_torch.master_port
    return _start(args, own | _variables_of_torch(of_torch))


def _deepspeed(arguments: Sequence[str]) -> Start:
    """The arguments of `deepspeed` (deepspeed/launcher/runner.py of 0.17)."""
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
    _deepspeed_both(parser)
    args = parser.parse_args(list(arguments))
    # NAME[:SLOT[,SLOT ...]][@...]: a name alone is all cards of the machine, of which there is one.
    slots = [node.partition(":")[2].split(",") for node in (args.include or args.i).split("@")]
    nodes = abs(int(args.num_nodes.rpartition(":")[2]))
    _one(max(args.num_gpus, nodes, sum(map(len, slots))), "deepspeed")
    return _deepspeed_start(args)


def _deepspeed_node(arguments: Sequence[str]) -> Start:
    """The arguments of what `deepspeed` starts on each machine (deepspeed/launcher/launch.py of 0.17)."""
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch")
    for flag in ("--node_rank", "--min_elastic_nodes", "--max_elastic_nodes", "--save_pid"):
        parser.add_argument(flag, type=int)
    for flag in ("--enable_each_rank_log", "--bind_core_list"):
        parser.add_argument(flag)
    for flag in ("--enable_elastic_training", "--bind_cores_to_rank"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--world_info", required=True)
    parser.add_argument("--master_addr", default="127.0.0.1")
    _deepspeed_both(parser)
    args = parser.parse_args(list(arguments))
    try:
        cards = json.loads(base64.urlsafe_b64decode(args.world_info))
        processes = sum(map(len, cards.values()))
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError("--world_info cannot be read", value=args.world_info, hint="it is base64 of JSON") from error
    _one(processes, "deepspeed.launcher.launch")
    return _deepspeed_start(args)


def _deepspeed_both(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--master_port", default="29500")
    for flag in ("--module", "--no_python", "--no_local_rank"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)


def _deepspeed_start(args: argparse.Namespace) -> Start:
    environment = dict.fromkeys(("RANK", "LOCAL_RANK", "CROSS_RANK"), "0")
    environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "CROSS_SIZE"), "1")
    environment |= {"MASTER_ADDR": args.master_addr or "127.0.0.1", "MASTER_PORT": args.master_port}
    return _start(args, environment, *(() if args.no_local_rank else ("--local_rank=0",)))


def _one(processes: int, launcher: str) -> None:
    if processes != 1:
        raise MemprofError(
            f"not yet: {launcher} is to start {processes} processes: several GPUs come later",
            hint="ask it for one process, on one machine: the run is then that of one card",
        )


def _start(args: Any, environment: dict[str, str], *before: str) -> Start:
    if args.no_python:
        raise UsageError(
            "the launcher is to start a command, and no Python program",
            value=args.training_script,
            hint="leave out --no_python, and name the script",
        )
    return Start(args.training_script, (*before, *args.training_script_args), bool(args.module), environment)


_COMMANDS: dict[str, tuple[Launcher, str]] = {
    "torchrun": (_torchrun, ""),
    "accelerate": (_accelerate, "launch"),
    "accelerate-launch": (_accelerate, ""),
    "deepspeed": (_deepspeed, ""),
}
"""Name of a command -> the launcher, and the first argument that makes it one."""
_MODULES: dict[str, tuple[Launcher, str]] = {
    "torch.distributed.run": (_torchrun, ""),
    "torch.distributed.launch": (functools.partial(_torchrun, module="torch.distributed.launch"), ""),
    "accelerate.commands.launch": (_accelerate, ""),
    "accelerate.commands.accelerate_cli": (_accelerate, "launch"),
    "deepspeed": (_deepspeed, ""),
    "deepspeed.launcher.runner": (_deepspeed, ""),
    "deepspeed.launcher.launch": (_deepspeed_node, ""),
}
