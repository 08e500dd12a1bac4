"""The start of vLLM's engine: in this process, with dummy weights where there are none, and what decides its KV cache.

Names of vLLM are those of v0.33.0; where an older release has another one, the figure is not known. Sources:
vllm/v1/worker/gpu_worker.py (determine_available_memory), vllm/utils/mem_utils.py (memory_profiling).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memprof.patching import Patch
from memprof.serving.budget import RUN, EngineBudget
from memprof.serving.outside_torch import estimate_outside_torch
from memprof.serving.releases import read_vllm_rules
from memprof.stubs.engines import TOKENIZER_FILES, WEIGHT_FILES, has_files, patch_groups
from memprof.stubs.vllm.peak import describe_peak
from memprof.units import format_bytes
from memprof.virtual.install_context import InstallContext

_NO_WEIGHTS = "{} has no weights here: vLLM loads dummy weights (--load-format dummy), which take the same memory."
_NO_TOKENIZER = "{} has no tokenizer here: vLLM starts without one (--skip-tokenizer-init)."
_OUTSIDE_TORCH = (
    "Outside torch, {} are taken for kernels' code and local memory, and for NCCL: as published start-up logs have it."
)
_IN_PROCESS = "vLLM's engine runs in this process, and not in processes of its own; no request is served."
# Functions that raise ValueError where the memory does not suffice -> the modules that call them.
_REFUSING_FUNCTIONS = {
    "vllm.v1.engine.core": ("get_kv_cache_configs",),
    "vllm.v1.worker.gpu_worker": ("request_memory",),
}


class EngineStart:
    """The start of one engine: figures that the engine computes and does not keep, and its refusal."""

    def __init__(self, context: InstallContext) -> None:
        self._context = context
        self._profile: Any = None  # vLLM's MemoryProfilingResult
        self._profile_events = (0, 0)  # numbers of events before and after the profile run
        self._graph_taken_bytes: int | None = None
        self._refusal = ""
        self._tensor_parallel = 1
        self._is_over = False

    def get_patches(self, module: ModuleType) -> Iterator[Patch]:
        """Yield the patches of `module`, one of `MODULES`."""
        for name in _REFUSING_FUNCTIONS.get(module.__name__, ()):
            if hasattr(module, name):
                yield module, name, self._record_refusal(getattr(module, name))
        yield from _PATCHES[module.__name__](self, module)

    def _patch_arguments(self, module: Any) -> Iterator[Patch]:
        """Yield a patch by which a model without weights gets dummy weights, and one without a tokenizer starts."""
        original = module.EngineArgs.create_engine_config
        assume = self._context.assume

        @functools.wraps(original)
        def create_engine_config(arguments: Any, *args: Any, **kwargs: Any) -> Any:
            assume(_IN_PROCESS)
            folder = Path(arguments.model)
            if arguments.load_format == "auto" and not has_files(folder, arguments.model, WEIGHT_FILES):
                assume(_NO_WEIGHTS.format(arguments.model))
                arguments.load_format = "dummy"
            tokenizer = arguments.tokenizer or arguments.model
            if not (arguments.skip_tokenizer_init or has_files(Path(tokenizer), tokenizer, TOKENIZER_FILES)):
                assume(_NO_TOKENIZER.format(tokenizer))
                arguments.skip_tokenizer_init = True
            num_workers = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
            if num_workers > 1:
                # vLLM's own way to run one worker in a process that others have started: by the variables of torchrun.
                arguments.distributed_executor_backend = "external_launcher"
                for name, value in _make_rank_variables(num_workers).items():
                    os.environ.setdefault(name, value)
            return original(arguments, *args, **kwargs)

        yield module.EngineArgs, "create_engine_config", create_engine_config

    def _patch_core(self, module: Any) -> Iterator[Patch]:
        """Yield a patch that reports an engine's budget once the engine is ready, or has refused to start."""
        original = module.EngineCore.__init__

        @functools.wraps(original)
        def __init__(core: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            self._tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
            try:
                original(core, vllm_config, *args, **kwargs)
            except (ValueError, torch.OutOfMemoryError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    self._refusal = str(error)
                if self._refusal:
                    self._context.on_engine_start(self._make_budget(core, vllm_config))
                raise
            self._context.on_engine_start(self._make_budget(core, vllm_config))

        yield module.EngineCore, "__init__", __init__
        original_shutdown = module.EngineCore.shutdown

        @functools.wraps(original_shutdown)
        def shutdown(core: Any) -> None:
            if not self._is_over:  # an engine that the program keeps is shut down when Python exits, without a GPU
                original_shutdown(core)

        yield module.EngineCore, "shutdown", shutdown

    def end(self) -> None:
        """Note that the run is over."""
        self._is_over = True

    def _patch_client(self, module: Any) -> Iterator[Patch]:
        """Yield a patch by which a server's engine starts in this process; what the server would do next needs the
        engine's answers, so that the run ends there."""

        def make_client(vllm_config: Any, executor_class: Any, log_stats: bool, *args: Any, **kwargs: Any) -> Any:
            core = importlib.import_module("vllm.v1.engine.core").EngineCore(vllm_config, executor_class, log_stats)
            core.shutdown()
            raise SystemExit(0)

        yield module.EngineCoreClient, "make_async_mp_client", staticmethod(make_client)

    def _patch_server(self, module: Any) -> Iterator[Patch]:
        """Yield a patch by which the server takes any free port: nothing is served, and its port may be in use."""
        original = module.ServeSubcommand.cmd

        def run_command(arguments: Any) -> None:
            arguments.port = 0
            original(arguments)

        yield module.ServeSubcommand, "cmd", staticmethod(run_command)

    def _patch_streams(self, module: Any) -> Iterator[Patch]:
        """Yield a patch by which vLLM does not replace the `write` of this process's streams, to prefix each line."""
        if hasattr(module, "decorate_logs"):
            yield module, "decorate_logs", lambda *args, **kwargs: None

    def _patch_worker(self, module: Any) -> Iterator[Patch]:
        """Yield patches that keep the result of the profile run, and the memory that CUDA graphs have taken."""
        original, trace = module.memory_profiling, self._context.recorder.trace

        @contextlib.contextmanager
        def profile_memory(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self._add_outside_torch()
            with original(*args, **kwargs) as self._profile:
                begin = len(trace.events)
                yield self._profile
                self._profile_events = (begin, len(trace.events))

        yield module, "memory_profiling", profile_memory
        original_capture = module.Worker.compile_or_warm_up_model

        @functools.wraps(original_capture)
        def warm_up(worker: Any, *args: Any, **kwargs: Any) -> Any:
            runner = worker.model_runner
            capture = runner.capture_model

            def capture_and_note(*args: Any, **kwargs: Any) -> Any:
                self._graph_taken_bytes = capture(*args, **kwargs)
                return self._graph_taken_bytes

            runner.capture_model = capture_and_note
            try:
                return original_capture(worker, *args, **kwargs)
            finally:
                del runner.capture_model

        yield module.Worker, "compile_or_warm_up_model", warm_up

    def _add_outside_torch(self) -> None:
        """Let the memory outside torch grow by what published logs of this release have."""
        context, rules = self._context, read_vllm_rules(importlib.import_module("vllm").__version__)
        context.outside_torch_bytes = estimate_outside_torch(context.gpu, rules, self._tensor_parallel)
        context.assume(_OUTSIDE_TORCH.format(format_bytes(context.outside_torch_bytes)))

    def _record_refusal(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except ValueError as error:
                self._refusal = str(error)
                raise

        return call

    def _make_budget(self, core: Any, config: Any) -> EngineBudget:
        """Return what the engine has computed, for the GPU of its first worker."""
        model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
        worker = getattr(getattr(getattr(core, "model_executor", None), "driver_worker", None), "worker", None)
        profile, runner = self._profile, getattr(worker, "model_runner", None)
        snapshot = getattr(worker, "init_snapshot", None)
        estimate = getattr(worker, "cudagraph_memory_estimate", None)
        weights = _round(getattr(runner, "model_memory_usage", None))
        num_tokens, concurrency = _read_capacity(core, config)
        return EngineBudget(
            engine="vllm",
            release=importlib.import_module("vllm").__version__,
            source=RUN,
            model=model.model,
            gpu=self._context.gpu.key,
            tensor_parallel=config.parallel_config.tensor_parallel_size,
            dtype=str(model.dtype).removeprefix("torch."),
            quantization=model.quantization,
            kv_cache_dtype=cache.cache_dtype,
            context_length=model.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            total_bytes=getattr(snapshot, "total_memory", None),
            utilization=cache.gpu_memory_utilization,
            weights_bytes=weights,
            outside_torch_bytes=_get(profile, "non_torch_increase"),
            buffers_bytes=_subtract(_get(profile, "total_consumed"), weights, _get(profile, "non_torch_increase")),
            profile_peak_bytes=_get(profile, "transient_peak_headroom", "torch_peak_increase"),
            profile_peak_reason=describe_peak(self._context.recorder.trace, *self._profile_events),
            graph_bytes=estimate or None,
            graph_taken_bytes=_round(self._graph_taken_bytes),
            kv_cache_bytes=_round(getattr(worker, "available_kv_cache_memory_bytes", None)),
            block_size=cache.block_size,
            num_blocks=cache.num_gpu_blocks,
            num_tokens=num_tokens,
            concurrency=concurrency,
            refusal=self._refusal,
        )


def _get(result: Any, *names: str) -> int | None:
    """Return the first of the attributes `names` that `result` has."""
    return next((int(getattr(result, name)) for name in names if hasattr(result, name)), None)


def _read_capacity(core: Any, config: Any) -> tuple[int | None, float | None]:
    """Return the tokens that the KV cache holds, and the longest requests, as the engine prints them; None: unknown."""
    cache = config.cache_config
    if getattr(cache, "kv_cache_size_tokens", None) is not None:
        return cache.kv_cache_size_tokens, cache.kv_cache_max_concurrency
    # Releases that only print them (0.19, vllm/v1/core/kv_cache_utils.py, _report_kv_cache_config).
    layout = getattr(getattr(core, "scheduler", None), "kv_cache_config", None)
    if layout is None or not layout.kv_cache_groups:
        return None, None
    tokens = (
        layout.num_blocks
        // len(layout.kv_cache_groups)
        * min(g.kv_cache_spec.block_size for g in layout.kv_cache_groups)
    )
    utilities = importlib.import_module("vllm.v1.core.kv_cache_utils")
    compute = getattr(utilities, "get_max_concurrency_for_kv_cache_config", None)
    return tokens, None if compute is None else compute(config, layout)


def _subtract(total: int | None, *parts: int | None) -> int | None:
    """Return what `parts` leave of `total`; None if one of them is not known."""
    return None if total is None or None in parts else total - sum(part or 0 for part in parts)


def _round(value: Any) -> int | None:
    return None if value is None else int(value)


def _make_rank_variables(num_workers: int) -> dict[str, str]:
    """Return the environment variables of the first of `num_workers` workers."""
    size = str(num_workers)
    return {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }  # fmt: skip


_PATCHES: dict[str, Callable[[EngineStart, Any], Iterator[Patch]]] = {
    "vllm.engine.arg_utils": EngineStart._patch_arguments,
    "vllm.distributed.parallel_state": lambda start, module: patch_groups(module),
    "vllm.v1.engine.core": EngineStart._patch_core,
    "vllm.v1.engine.core_client": EngineStart._patch_client,
    "vllm.entrypoints.cli.serve": EngineStart._patch_server,
    "vllm.v1.worker.gpu_worker": EngineStart._patch_worker,
    "vllm.utils.system_utils": EngineStart._patch_streams,
}
MODULES = tuple(_PATCHES)
