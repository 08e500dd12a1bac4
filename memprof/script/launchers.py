"""Launchers (torchrun, accelerate, deepspeed, engines): one process that they would start runs in this process instead.

A launcher's child process would not see the virtual GPU. Arguments are parsed by the launcher's own parser, where
installed, while the virtual GPUs exist, so that `--nproc_per_node gpu` means their number.
"""

from __future__ import annotations

import argparse
import base64
import functools
import importlib
import importlib.util
import json
import math
import os
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.errors import UsageError
from memprof.installer import format_install_command


@dataclass(frozen=True, slots=True)
class ProcessSelection:
    """Selection of one process of a distributed program by its rank, and the program's numbers of GPUs and machines."""

    rank: int | None = None  # None: RANK of the environment, or 0
    gpus: int | None = None  # on each machine; None: as many as the launcher starts processes there
    nodes: int | None = None  # machines; None: as in the launcher's arguments, or one


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """Start of one process: program and arguments for `python`, environment variables, rank, and sizes."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool
    environment: dict[str, str]
    rank: int = 0
    gpus: int = 1  # on each machine
    nodes: int = 1
    # Number of processes of the program, if known before the run; else the number of GPUs.
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
    """Return the launcher's environment variable, such as RANK, whose absence raised `error`; "" for other errors."""
    if isinstance(error, KeyError) and error.args and error.args[0] in _RANK_VARIABLES:
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        environ_getitem = type(os.environ).__getitem__.__code__  # another dict may have such keys too
        return str(error.args[0]) if codes and codes[-1] is environ_getitem else ""
    match = _MISSING_VARIABLE.search(str(error)) if isinstance(error, ValueError) else None
    return match[1] if match else ""


def start_without_launcher(
    name: str, arguments: tuple[str, ...], is_module: bool, selection: ProcessSelection
) -> ProcessStart:
    """Return the process of a program without a launcher, by RANK and WORLD_SIZE; raise UsageError for a bad rank."""
    counts = [int(os.environ[name]) for name in _COUNT_VARIABLES if os.environ.get(name, "").isdigit()]
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


def parse_ranks(text: str, size: int) -> list[int]:
    """Return the ranks that `text` names: `all`, or ranks and ranges such as `0,3,5-7`; UsageError: unknown ranks."""
    if text.strip() == "all":
        return list(range(size))
    ranks: set[int] = set()
    for part in text.split(","):
        first, *rest = part.strip().split("-", 1)
        last = rest[0] if rest else first
        if not (first.isdigit() and last.isdigit()):
            raise UsageError("--ranks takes numbers", value=text, hint="for instance all, 0,3 or 0-3")
        rank_range = range(int(first), int(last) + 1)
        if not rank_range or rank_range[-1] >= size:
            raise UsageError("there is no such rank", value=f"--ranks {text} of {size}", hint="ranks count from 0")
        ranks |= set(rank_range)
    return sorted(ranks)


class _LaunchedProcess:
    """Selected process of a launcher that starts `processes[i]` of them on machine i; UsageError if it cannot exist."""

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
        """Return how to start this process; `args` are the launcher's parsed arguments."""
        if args.no_python:
            problem = "the launcher is to start a command, and no Python program"
            raise UsageError(problem, value=args.training_script, hint="leave out --no_python, and name the script")
        arguments = (*first_arguments, *args.training_script_args)
        placement = (self.rank, self.gpus, self.nodes, self.size)
        return ProcessStart(args.training_script, arguments, bool(args.module), environment, *placement)


def find_launcher(name: str, arguments: Sequence[str], *, is_module: bool) -> tuple[Launcher, Sequence[str]] | None:
    """Return (launcher, remaining arguments) if module or command `name` is a launcher, such as torchrun; else None."""
    if is_module:
        entry = _MODULES.get(name)
    else:
        path = Path(name)
        may_be_launcher = path.parent.name == "bin" if os.sep in name else not path.is_file()
        entry = _COMMANDS.get(path.name) if may_be_launcher else None
    if entry is None:
        return None
    launcher, required_argument = entry
    if required_argument and tuple(arguments[:1]) != (required_argument,):
        return None
    return launcher, arguments[1:] if required_argument else arguments


def _start_torchrun(
    arguments: Sequence[str], selection: ProcessSelection, module: str = "torch.distributed.run"
) -> ProcessStart:
    run = importlib.import_module("torch.distributed.run")
    args = importlib.import_module(module).parse_args(list(arguments))
    processes = _parse_number("--nproc-per-node", args.nproc_per_node, run.determine_local_world_size)
    nodes = _parse_number("--nnodes", args.nnodes, lambda text: run.parse_min_max_nnodes(text)[1])
    process = _LaunchedProcess("torch.distributed.run", selection, [processes] * nodes)
    local_rank = () if run.get_use_env(args) else (f"--local-rank={process.local_rank}",)
    return process.start(args, _make_torch_variables(args, process), *local_rank)


def _parse_number(flag: str, value: str, parse: Callable[[str], int]) -> int:
    try:
        return parse(value)
    except (ValueError, RuntimeError) as error:
        problem = "torch's launcher cannot read it"
        raise UsageError(problem, value=f"{flag} {value}", hint="a number, as torchrun --help has it") from error


def _make_torch_variables(args: Any, process: _LaunchedProcess) -> dict[str, str]:
    """Return the environment variables that torchrun sets (elastic/agent/server/local_elastic_agent.py)."""
    variables = {
        **dict.fromkeys(("RANK", "ROLE_RANK"), process.rank),
        "LOCAL_RANK": process.local_rank,
        "GROUP_RANK": process.node,
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), process.size),
        "LOCAL_WORLD_SIZE": process.local_size,
        "GROUP_WORLD_SIZE": process.nodes,
        "ROLE_NAME": args.role,
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": args.master_port or 29500,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": args.max_restarts,
        "TORCHELASTIC_RUN_ID": args.rdzv_id,
        "TORCHELASTIC_USE_AGENT_STORE": False,  # there is no agent, whose store workers would look for
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {name: str(value) for name, value in variables.items()}


def _start_accelerate(arguments: Sequence[str], selection: ProcessSelection) -> ProcessStart:
    try:
        launch = importlib.import_module("accelerate.commands.launch")
        utils = importlib.import_module("accelerate.utils.launch")
    except ImportError as error:
        hint = format_install_command("accelerate")
        raise UsageError("accelerate cannot be imported", value=str(error), hint=hint) from error
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(list(arguments)))
    nodes = args.num_machines or 1
    process = _LaunchedProcess("accelerate launch", selection, [max(args.num_processes // nodes, 1)] * nodes)
    is_distributed = args.use_deepspeed or args.use_fsdp or args.use_megatron_lm or args.multi_gpu
    if not is_distributed and process.size > 1 and not args.cpu:
        args.multi_gpu = is_distributed = True  # as on a machine that has these GPUs
    if not is_distributed or args.cpu:
        return process.start(args, utils.prepare_simple_launcher_cmd_env(args)[1])
    # accelerate starts these processes through torch's launcher.
    environment = utils.prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else utils.prepare_multi_gpu_env(args)
    torch_args = importlib.import_module("torch.distributed.run").get_args_parser().parse_args([args.training_script])
    torch_args.master_port = args.main_process_port or torch_args.master_port
    return process.start(args, environment | _make_torch_variables(torch_args, process))


def _start_deepspeed(arguments: Sequence[str], selection: ProcessSelection) -> ProcessStart:
    """Return the selected process of `deepspeed ARGUMENTS` (deepspeed/launcher/runner.py of 0.17)."""
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
    """Return the selected process of `deepspeed.launcher.launch`, which starts a machine's processes (0.17)."""
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


def _start_engine(
    arguments: Sequence[str],
    selection: ProcessSelection,
    *,
    package: str,
    words: tuple[str, ...],
    sizes: tuple[tuple[str, ...], ...],
) -> ProcessStart:
    """Return the selected worker of an inference engine's server, which has a worker for each GPU of the model.

    Args:
        package: what is imported, and named in messages.
        words: the command or the module, and the word after it that starts a server.
        sizes: flags of each option whose product is the number of workers.

    Raises UsageError: the engine is not installed.
    """
    if importlib.util.find_spec(package) is None:
        hint = (
            f"memprof help serving has the line that installs its Python code; or memprof recommend --engine {package}"
        )
        raise UsageError(f"{_ENGINES[package]} is not installed", value=" ".join(words), hint=hint)
    parser = argparse.ArgumentParser(prog=package, add_help=False, allow_abbrev=False)
    for flags in sizes:
        parser.add_argument(*flags, type=int, default=1)
    args, _ = parser.parse_known_args(list(arguments))
    size = math.prod(vars(args).values())
    process = _LaunchedProcess(" ".join(words), selection, [size])
    variables = {
        "RANK": process.rank, "LOCAL_RANK": process.local_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
    }  # fmt: skip
    environment = {name: str(value) for name, value in variables.items()} if size > 1 else {}
    name, *others = words
    return ProcessStart(
        name, (*others, *arguments), not others, environment, process.rank, process.gpus, process.nodes, size
    )


_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
_start_vllm = functools.partial(
    _start_engine,
    package="vllm",
    words=("vllm", "serve"),
    sizes=(
        ("--tensor-parallel-size", "--tensor_parallel_size", "-tp"),
        ("--pipeline-parallel-size", "--pipeline_parallel_size", "-pp"),
    ),
)
_start_sglang = functools.partial(
    _start_engine,
    package="sglang",
    sizes=(("--tensor-parallel-size", "--tp-size", "--tp"), ("--pipeline-parallel-size", "--pp-size")),
)


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--master_port", default="29500")
    for flag in ("--module", "--no_python", "--no_local_rank"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)


def _make_deepspeed_start(args: argparse.Namespace, process: _LaunchedProcess) -> ProcessStart:
    environment = {
        "RANK": str(process.rank),
        "LOCAL_RANK": str(process.local_rank),
        "CROSS_RANK": str(process.node),
        "WORLD_SIZE": str(process.size),
        "LOCAL_SIZE": str(process.local_size),
        "CROSS_SIZE": str(process.nodes),
        "MASTER_ADDR": args.master_addr or "127.0.0.1",
        "MASTER_PORT": args.master_port,
    }
    return process.start(args, environment, *(() if args.no_local_rank else (f"--local_rank={process.local_rank}",)))


# Name of a command -> the launcher, and the first argument that selects the launcher.
_COMMANDS: dict[str, tuple[Launcher, str]] = {
    "torchrun": (_start_torchrun, ""),
    "accelerate": (_start_accelerate, "launch"),
    "accelerate-launch": (_start_accelerate, ""),
    "deepspeed": (_start_deepspeed, ""),
    "vllm": (_start_vllm, "serve"),
    "sglang": (functools.partial(_start_sglang, words=("sglang", "serve")), "serve"),
}
_MODULES: dict[str, tuple[Launcher, str]] = {
    "torch.distributed.run": (_start_torchrun, ""),
    "torch.distributed.launch": (functools.partial(_start_torchrun, module="torch.distributed.launch"), ""),
    "accelerate.commands.launch": (_start_accelerate, ""),
    "accelerate.commands.accelerate_cli": (_start_accelerate, "launch"),
    "deepspeed": (_start_deepspeed, ""),
    "deepspeed.launcher.runner": (_start_deepspeed, ""),
    "deepspeed.launcher.launch": (_start_deepspeed_node, ""),
    "sglang.launch_server": (functools.partial(_start_sglang, words=("sglang.launch_server",)), ""),
}
