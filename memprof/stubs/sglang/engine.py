"""The start of SGLang's engine: its scheduler in this process, dummy weights where there are none, and the KV cache.

Names of SGLang are those of v0.5.13 and v0.5.23; a figure that a release has under another name is not known. Sources:
python/sglang/srt/entrypoints/engine.py (_launch_scheduler_processes), managers/scheduler.py (run_scheduler_process),
model_executor/model_runner.py and model_runner_kv_cache_mixin.py.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memprof.patching import Patch
from memprof.serving.budget import RUN, EngineBudget
from memprof.stubs.engines import TOKENIZER_FILES, WEIGHT_FILES, has_files, patch_groups
from memprof.stubs.finder import is_stub
from memprof.units import GIB
from memprof.virtual.install_context import InstallContext

_NO_WEIGHTS = "{} has no weights here: SGLang loads dummy weights (--load-format dummy), which take the same memory."
_NO_TOKENIZER = "{} has no tokenizer here: SGLang starts without one (--skip-tokenizer-init)."
_IN_PROCESS = "SGLang's scheduler runs in this process, and not in one of its own; no request is served."
# Methods of the model runner that capture CUDA graphs: of decoding and, in pieces, of prefills.
_CAPTURES = (
    "init_device_graphs", "init_piecewise_cuda_graphs",  # 0.5.13
    "init_decode_cuda_graph", "init_prefill_cuda_graph",  # 0.5.23
)  # fmt: skip
_REFUSAL = "Not enough memory"  # how the error begins that the size of the cache raises (pool_configurator.py)


class _SchedulerEnd(BaseException):
    """Leaves `run_scheduler_process`, which answers any `Exception` by a signal to its parent process; its cause is the
    error of the scheduler, None: the scheduler is ready."""


class EngineStart:
    """The start of one engine: what its model runner computes, and its refusal."""

    def __init__(self, context: InstallContext) -> None:
        self._context = context
        self._runner: Any = None
        self._free_bytes: int | None = None  # before the weights are loaded
        self._graph_bytes: int | None = None  # that CUDA graphs have taken

    def get_patches(self, module: ModuleType) -> Iterator[Patch]:
        """Yield the patches of `module`, one of `MODULES`."""
        yield from _PATCHES[module.__name__](self, module)

    def _patch_arguments(self, module: Any) -> Iterator[Patch]:
        """Yield a patch by which a model without weights gets dummy weights, and one without a tokenizer starts."""
        original = module.ServerArgs.__post_init__
        assume = self._context.assume

        @functools.wraps(original)
        def __post_init__(arguments: Any) -> None:
            model = arguments.model_path
            if arguments.load_format == "auto" and not has_files(Path(model), model, WEIGHT_FILES):
                assume(_NO_WEIGHTS.format(model))
                arguments.load_format = "dummy"
            tokenizer = arguments.tokenizer_path or model
            if not (arguments.skip_tokenizer_init or has_files(Path(tokenizer), tokenizer, TOKENIZER_FILES)):
                assume(_NO_TOKENIZER.format(tokenizer))
                arguments.skip_tokenizer_init = True
            original(arguments)

        yield module.ServerArgs, "__post_init__", __post_init__

    def _patch_launch(self, module: Any) -> Iterator[Patch]:
        """Yield a patch by which the scheduler runs in this process; what the server would do next needs the answers
        of a scheduler, so that the run ends there."""

        def launch(cls: Any, /, server_args: Any, port_args: Any, run_scheduler: Callable[..., None], **_: Any) -> Any:
            self._context.assume(_IN_PROCESS)
            values = {"server_args": server_args, "port_args": port_args, "pipe_writer": None, "dp_rank": None}
            ranks = {
                name: values.get(name, 0)
                for name, parameter in inspect.signature(run_scheduler).parameters.items()
                if parameter.default is inspect.Parameter.empty
            }
            try:
                run_scheduler(**ranks)
            except _SchedulerEnd as end:
                if end.__cause__ is not None:
                    raise end.__cause__ from None
            raise SystemExit(0)

        yield module.Engine, "_launch_scheduler_processes", classmethod(launch)
        original = module.assert_pkg_version

        @functools.wraps(original)
        def assert_pkg_version(package: str, *args: Any, **kwargs: Any) -> None:
            if package != "flashinfer_python" or not is_stub("flashinfer"):  # a stub is as good as any release
                original(package, *args, **kwargs)

        yield module, "assert_pkg_version", assert_pkg_version

    def _patch_scheduler(self, module: Any) -> Iterator[Patch]:
        """Yield patches that report an engine's budget once its scheduler is ready, or has refused to start."""
        original = module.Scheduler.__init__

        @functools.wraps(original)
        def __init__(scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(scheduler, server_args, *args, **kwargs)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError) or _REFUSAL in str(error):
                    self._context.on_engine_start(self._make_budget(server_args, str(error)))
                raise _SchedulerEnd from error
            self._context.on_engine_start(self._make_budget(server_args))
            raise _SchedulerEnd

        yield module.Scheduler, "__init__", __init__
        # Title, log lines, and the death of a process that the scheduler would have had for itself.
        yield module, "configure_scheduler_process", lambda *args, **kwargs: None

    def _patch_runner(self, module: Any) -> Iterator[Patch]:
        """Yield patches that keep the model runner of the engine, and the memory that is free before it loads."""
        original = module.ModelRunner.init_torch_distributed

        @functools.wraps(original)
        def init_torch_distributed(runner: Any, *args: Any, **kwargs: Any) -> Any:
            free = original(runner, *args, **kwargs)
            if self._runner is None:  # a draft model has one of its own, later
                self._runner = runner
                self._free_bytes = _to_bytes(getattr(runner, "pre_model_load_memory", free))
            return free

        yield module.ModelRunner, "init_torch_distributed", init_torch_distributed
        for name in _CAPTURES:
            if hasattr(module.ModelRunner, name):
                yield module.ModelRunner, name, self._add_graphs(getattr(module.ModelRunner, name))

    def _add_graphs(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        """Return `capture`, which captures CUDA graphs, with what they take added up."""

        @functools.wraps(capture)
        def capture_and_note(*args: Any, **kwargs: Any) -> Any:
            free, _ = torch.cuda.mem_get_info()
            result = capture(*args, **kwargs)
            self._graph_bytes = (self._graph_bytes or 0) + free - torch.cuda.mem_get_info()[0]
            return result

        return capture_and_note

    def _patch_children(self, module: Any) -> Iterator[Patch]:
        """Yield a patch by which a server that ends leaves the children of this process, which are memprof's, alone."""
        original = module.kill_process_tree

        @functools.wraps(original)
        def kill_process_tree(parent_pid: int | None, *args: Any, **kwargs: Any) -> None:
            if parent_pid not in (None, os.getpid()):
                original(parent_pid, *args, **kwargs)

        yield module, "kill_process_tree", kill_process_tree

    def _make_budget(self, arguments: Any, refusal: str = "") -> EngineBudget:
        """Return what the engine has computed, for the GPU of its first scheduler."""
        runner, total = self._runner, self._context.gpu.total_bytes
        model = getattr(runner, "model_config", None)
        pool = getattr(runner, "token_to_kv_pool", None)
        tokens = getattr(runner, "max_total_num_tokens", None)
        length = getattr(model, "context_len", None)
        return EngineBudget(
            engine="sglang",
            release=importlib.import_module("sglang").__version__,
            source=RUN,
            model=arguments.model_path,
            gpu=self._context.gpu.key,
            tensor_parallel=arguments.tp_size,
            dtype=str(getattr(model, "dtype", "")).removeprefix("torch.") or None,
            quantization=getattr(model, "quantization", None),
            kv_cache_dtype=arguments.kv_cache_dtype,
            context_length=length,
            max_num_seqs=getattr(runner, "max_running_requests", None),
            max_num_batched_tokens=arguments.chunked_prefill_size,
            total_bytes=total,
            utilization=getattr(runner, "mem_fraction_static", None),
            weights_bytes=_to_bytes(getattr(runner, "weight_load_mem_usage", None)),
            outside_torch_bytes=None if self._free_bytes is None else total - self._free_bytes,
            graph_taken_bytes=self._graph_bytes or None,
            kv_cache_bytes=_to_bytes(getattr(pool, "mem_usage", None)),
            block_size=getattr(runner, "page_size", None),
            num_tokens=tokens,
            concurrency=tokens / length if tokens and length else None,
            refusal=refusal,
        )


def _to_bytes(gib: float | None) -> int | None:
    """Return GiB, in which SGLang computes, as bytes."""
    return None if gib is None else round(gib * GIB)


_PATCHES: dict[str, Callable[[EngineStart, Any], Iterator[Patch]]] = {
    "sglang.srt.utils.common": EngineStart._patch_children,
    "sglang.srt.distributed.parallel_state": lambda start, module: patch_groups(module),
    "sglang.srt.server_args": EngineStart._patch_arguments,
    "sglang.srt.entrypoints.engine": EngineStart._patch_launch,
    "sglang.srt.managers.scheduler": EngineStart._patch_scheduler,
    "sglang.srt.model_executor.model_runner": EngineStart._patch_runner,
}
MODULES = tuple(_PATCHES)
