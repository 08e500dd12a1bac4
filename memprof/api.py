"""memprof's Python API: `virtual_gpu`, `virtual_gpus`, `profile`, `sweep` and `apply` of `memprof`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from memprof.allocator import CurrentSettings, Settings
from memprof.device.catalog import Gpu, custom_gpu, find_gpu
from memprof.errors import MemprofError, RunFailedError, UsageError
from memprof.fixes.applied import apply
from memprof.flows.account import analyze
from memprof.flows.gpus import RunAllocator, make_device_facts, resolve_settings
from memprof.flows.profile import profile as profile_spec
from memprof.ledger.ledger import EmptyTraceError
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.stubs.extension import extensions
from memprof.trace.events import Trace
from memprof.trace.io import save_trace
from memprof.units import format_bytes, parse_gib
from memprof.virtual import VirtualGpu
from memprof.virtual.arguments import copy_arguments, move_to_gpu

if TYPE_CHECKING:
    from memprof.report.documents.sweep import Sweep

__all__ = ["ProfiledGpu", "apply", "profile", "sweep", "virtual_gpu", "virtual_gpus"]


class ProfiledGpu:
    """Virtual GPU for the user's own code, a context manager.

    Inside the `with` block `torch.device("cuda")` is the virtual GPU; forward, backward and optimizer steps are
    recognized. After the block, even if it raised, `report()` and `trace` describe the run.
    """

    def __init__(
        self, gpu: Gpu, settings: Settings, gpus: int, rank_size: tuple[int, int] | None, compiles: bool, stubs: bool
    ) -> None:
        self._gpu = gpu
        self._settings = CurrentSettings(settings)
        rank, size = rank_size or (0, gpus)
        self._environment = {} if rank_size is None else _make_environment(rank, size, gpus)
        self._previous_environment: dict[str, str | None] = {}  # values before the block; None: not set
        self._virtual = VirtualGpu(
            gpu,
            gpus=gpus,
            nodes=-(-size // gpus),
            rank=rank,
            context_bytes=gpu.context_bytes,
            memory=lambda trace: RunAllocator(trace, gpu, self._settings.now),
            allocator_settings=self._settings,
            release=settings.release.version,
            compiles=compiles,
            extensions=extensions(stubs=stubs),
        )

    def __enter__(self) -> ProfiledGpu:
        self._virtual.__enter__()
        self._previous_environment = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for name, value in self._previous_environment.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        self._virtual.__exit__(kind, error, traceback)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes that are allocated now, on all virtual GPUs together; for use inside the block."""
        return self._virtual.recorder.storages.live_bytes

    @property
    def trace(self) -> Trace:
        """Return the trace recorded so far."""
        trace = self._virtual.trace
        device = make_device_facts(self._gpu, config=self._settings.now.config)
        allocator = self._settings.now.facts
        trace.facts = dataclasses.replace(trace.facts, command="virtual_gpu", device=device, allocator=allocator)
        return trace

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Save the trace as a capture, for `memprof.load` and for `memprof show`, `compare` and `analyze`.

        Args:
            path: path of the file; an existing capture is replaced.
            force: whether to replace an existing file that is no capture.

        Raises:
            UsageError: the path is an existing file that is no capture.
            MemprofError: the file cannot be written.
        """
        save_trace(self.trace, Path(path), force=force)

    def report(self, limit_bytes: int | None = None, *, gpu: int | None = None) -> Report:
        """Return a report on the run so far, with methods `save()` and `to_json()`.

        Args:
            limit_bytes: device memory for the verdict, including the CUDA context; None: the GPU's capacity.
            gpu: index of the GPU to report on, if there are several; None: the GPU with the highest usage.

        Raises:
            EmptyTraceError: nothing was allocated on the GPU.
            UsageError: `limit_bytes` is out of range, or the GPU does not exist.
        """
        self.check_limit(limit_bytes)
        trace = self.trace
        if limit_bytes is not None:
            name = f"{self._gpu.name} held to {format_bytes(limit_bytes)}"
            device = make_device_facts(dataclasses.replace(self._gpu, name=name, total_bytes=limit_bytes))
            trace.facts = dataclasses.replace(trace.facts, device=device)
        return analyze(trace, gpu=gpu)

    def check_limit(self, limit_bytes: int | None) -> None:
        """Raise UsageError if `limit_bytes` is above the GPU's capacity or below the size of the CUDA context."""
        if limit_bytes is None:
            return
        if limit_bytes > self._gpu.total_bytes:
            raise UsageError(
                "the limit is more than the GPU has",
                value=f"{format_bytes(limit_bytes)}; {self._gpu.name} has {format_bytes(self._gpu.total_bytes)}",
                hint="leave the limit out, or choose another GPU",
            )
        if limit_bytes <= self._gpu.context_bytes:
            raise UsageError(
                "the limit leaves nothing beside the CUDA context",
                value=f"{format_bytes(limit_bytes)}; the context takes {format_bytes(self._gpu.context_bytes)}",
                hint="the limit is device memory with the context, as nvidia-smi shows it",
            )


def virtual_gpu(
    name: str = "h100-80gb",
    *,
    vram: str | float | None = None,
    alloc_conf: str | None = None,
    torch_release: str | None = None,
    compiles: bool = True,
    stubs: bool = True,
) -> ProfiledGpu:
    """Return a context manager in which "cuda" (of Apple's GPUs "mps", of Intel's "xpu") is a virtual GPU: see
    `ProfiledGpu`.

    Args:
        name: a GPU of the catalog.
        vram: capacity of a GPU that is not in the catalog, in GiB or with a unit ("24GB"); replaces `name`.
        alloc_conf: settings of torch's caching allocator, as in PYTORCH_CUDA_ALLOC_CONF; None: the environment's.
        torch_release: torch whose allocator, CUDA libraries and workspaces are simulated, such as "2.9"; None: the
            installed one.
        compiles: whether torch.compile compiles for the GPU; False: functions run eagerly.
        stubs: whether packages that are not installed are replaced by a stub (docs/stubs.md).

    Raises:
        UsageError: the GPU is not in the catalog.

    Example:
        with memprof.virtual_gpu("rtx-4090") as gpu:
            model = torch.nn.Linear(4096, 4096).to("cuda")
            model(torch.zeros(64, 4096, device="cuda")).sum().backward()
        report = gpu.report()
        print(report.verdict.required_bytes, report.peak.categories)
    """
    return virtual_gpus(
        1, name, vram=vram, alloc_conf=alloc_conf, torch_release=torch_release, compiles=compiles, stubs=stubs
    )


def virtual_gpus(
    n: int,
    gpu: str = "h100-80gb",
    *,
    vram: str | float | None = None,
    alloc_conf: str | None = None,
    torch_release: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    compiles: bool = True,
    stubs: bool = True,
) -> ProfiledGpu:
    """Return a context manager with `n` equal virtual GPUs (`cuda:0`, ...), for one process or for one rank of several.

    With a rank, only this rank runs, and the others are assumed to be alike (docs/parallel.md). Inside the block the
    variables of torchrun (`RANK`, `WORLD_SIZE`, ...) are set for `torch.distributed.init_process_group`.

    Args:
        n: number of GPUs in a machine.
        gpu: a GPU of the catalog.
        vram: capacity of a GPU that is not in the catalog, in GiB or with a unit ("24GB"); replaces `gpu`.
        alloc_conf: settings of torch's caching allocator, as in PYTORCH_CUDA_ALLOC_CONF; None: the environment's.
        torch_release: torch whose allocator, CUDA libraries and workspaces are simulated, such as "2.9"; None: the
            installed one.
        rank: the rank that the block runs as, from 0; None: a single process, unless `world_size` is given.
        world_size: number of ranks, on as many machines as they need; None: one rank per GPU.
        compiles: whether torch.compile compiles for the GPU; False: functions run eagerly.
        stubs: whether packages that are not installed are replaced by a stub (docs/stubs.md).

    Raises:
        UsageError: the GPU is not in the catalog, `n` is below 1, or the rank is out of range.

    Example:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        with memprof.virtual_gpus(8, "a100-80gb", rank=3) as gpus:
            dist.init_process_group("nccl")
            torch.cuda.set_device(dist.get_rank())
            model = DistributedDataParallel(torch.nn.Linear(4096, 4096).cuda())
            model(torch.zeros(64, 4096, device="cuda")).sum().backward()
        print(gpus.report())
    """
    for name, count in (("n", n), ("world_size", world_size)):
        if count is not None and count < 1:
            raise UsageError(f"{name} must be at least 1", value=count, hint="give a positive whole number")
    size = world_size or n
    if rank is not None and not 0 <= rank < size:
        raise UsageError("there is no such rank", value=f"rank={rank} of {size}", hint="ranks count from 0")
    model = find_gpu(gpu) if vram is None else custom_gpu(parse_gib(vram))
    rank_size = None if rank is None and world_size is None else (rank or 0, size)
    settings = resolve_settings(alloc_conf, torch_release, flag="alloc_conf", backend=model.backend)
    return ProfiledGpu(model, settings, n, rank_size, compiles, stubs)


def _make_environment(rank: int, size: int, gpus: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank on a machine with `gpus` GPUs."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank % gpus,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": min(gpus, size - rank // gpus * gpus),
        "GROUP_RANK": rank // gpus,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    return {name: str(value) for name, value in variables.items()}


@overload
def profile(target: TargetSpec, /, progress: Callable[[str], None] = ...) -> tuple[Trace, Report]: ...


@overload
def profile(
    target: Callable[..., object],
    /,
    *args: Any,
    gpu: str = ...,
    vram: str | float | None = ...,
    steps: int = ...,
    **kwargs: Any,
) -> Report: ...


def profile(target: TargetSpec | Callable[..., object], /, *args: Any, **kwargs: Any) -> Any:
    """Profile a specification, or a function of your own.

    A `TargetSpec` is run as by `memprof profile` (memprof.flows.profile); the result is the trace and the report.

    A function is called `steps` times on a virtual GPU with the other arguments; the result is the report. Modules and
    tensors among the arguments, also in lists, tuples and dictionaries, are copied to the GPU, and all arguments are
    copies, so that the caller's objects do not change. Backward and optimizer steps are recognized.

    Args:
        target: the specification, or the function.
        *args: arguments of the function.
        gpu: a GPU of the catalog; "h100-80gb" by default.
        vram: capacity of a GPU that is not in the catalog, in GiB or with a unit ("24GB"); replaces `gpu`.
        steps: number of calls. The first call makes the optimizer's state, so that at least two calls show the steady
            state, and three show memory growth.
        **kwargs: keyword arguments of the function, except the names above.

    Raises:
        UsageError: the GPU is not known, an argument cannot be copy_arguments, or `steps` is below 1.
        RunFailedError: the function raised; `trace` and `document` describe the run until then.
        EmptyTraceError: the function put nothing on the GPU.

    Example:
        def step(model, optimizer, batch):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        model = torch.nn.Linear(512, 512)
        report = memprof.profile(step, model, torch.optim.AdamW(model.parameters()), torch.zeros(8, 512), gpu="t4")
        print(report)
    """
    if isinstance(target, TargetSpec):
        return profile_spec(target, *args, **kwargs)
    if not callable(target):
        hint = "give a TargetSpec or a function, and its arguments"
        raise UsageError("nothing that could be profiled", value=repr(target), hint=hint)
    return _profile_function(target, args, **kwargs)


def _profile_function(
    function: Callable[..., object],
    args: tuple[Any, ...],
    *,
    gpu: str = "h100-80gb",
    vram: str | float | None = None,
    steps: int = 2,
    **kwargs: Any,
) -> Report:
    if steps < 1:
        raise UsageError("nothing is run", value=f"steps={steps}", hint="give at least 1, or 2 for the steady state")
    profiled_gpu = virtual_gpu(gpu, vram=vram)
    args, kwargs = copy_arguments((args, kwargs))
    try:
        with profiled_gpu:
            args, kwargs = move_to_gpu((args, kwargs))
            for _ in range(steps):
                function(*args, **kwargs)
    except MemprofError:
        raise
    except Exception as error:
        run_error = RunFailedError(
            f"the function raised {type(error).__name__}",
            value=str(error),
            hint="if the same code runs on a real GPU, this is a gap of the virtual one",
        )
        run_error.trace = profiled_gpu.trace
        with contextlib.suppress(EmptyTraceError):  # before anything was on the GPU
            run_error.document = profiled_gpu.report()
        raise run_error from error
    return profiled_gpu.report()


def sweep(
    script: Sequence[str] = (),
    /,
    *,
    axes: Mapping[str, Any] | None = None,
    executor: Executor | str | None = None,
    exact: bool = False,
    store: str | Path | None = None,
    cache: bool = True,
    workers: int | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Sweep:
    """Say of a grid of configurations which fit, as `memprof sweep`; `frames()["cells"]` of the result is a data frame.

    Args:
        script: a script and its arguments, in which `{NAME}` stands for a value of the axis NAME; empty: a model.
        axes: of a script, the values of each NAME.
        executor: any `concurrent.futures.Executor`, or "dask:ADDRESS" of a scheduler; None: processes of this machine.
        exact: whether to run every cell; False: the analytical estimate and other runs decide what is far from the
            limit.
        store: folder of answers, or an address of fsspec (s3://BUCKET/FOLDER), which a sweep goes on from; None: below
            the folder of the cache.
        cache: whether to take answers from there.
        workers: number of cells that the executor gets at once; None: by cores and memory, or for another executor as
            many as it has workers, if that is known, else 256.
        progress: called with the progress in words.
        **options: fields of `TargetSpec` (with a script, of `memprof run`), and `fix`: "none", "auto" or names joined
            by "+". Those of the model, the batch, the GPU and the fixes may be lists.

    Raises:
        UsageError: a value is unknown, or a worker has other versions than this process.

    Example:
        table = memprof.sweep(model="gpt2", batch_size=[1, 2], context_length=64, gpu=["rtx-4090", "h100-80gb"])
        print(table.frames()["cells"][["gpu", "batch_size", "fits", "needed_bytes"]])
    """
    from memprof.flows.sweep.axes import build_script_grid, build_spec_grid
    from memprof.flows.sweep.run import run_sweep

    if axes and not script:
        raise UsageError(
            "axes are those of a script", value=", ".join(axes), hint="give them as options: batch_size=[1, 2]"
        )
    grid = build_script_grid(list(script), axes or {}, options) if script else build_spec_grid(options)
    return run_sweep(
        grid, executor, exact=exact, store=store, cache=cache, workers=workers, progress=progress or _ignore
    )


def _ignore(work: str) -> None:
    """Report no progress."""
