"""Hand-written kernels: flex attention, Triton. Code from torch.compile is in compiled/.

Kernels cannot be launched without a GPU. Flex attention allocates as its compiled kernel does. The first call of a
Triton kernel ends the run with the kernel's name, or is skipped if the caller of VirtualGpu vouches for the kernels.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private import dispatch, dynamo
from memprof.virtual.install_context import InstallContext
from memprof.watch.failure import KernelError, TracingError


class CompiledCode(Extension):
    """Kernels and traces that are made without torch.compile."""

    imports = ("triton.testing",)  # imported after Triton's driver, which packages query at once

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches that refuse the program's own tracing, and make flex_attention allocate as its kernel does."""
        fake, flex = dynamo.from_tensor, dispatch.call_flex_attention
        if fake.is_imported() and fake.exists():
            yield fake.patch(_refuse_tracing(fake.get()))
        if flex.is_imported() and flex.exists():
            yield flex.patch(_flex_attention(context.assume))

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Context manager: clear the cache of fake tensors after the run: its entries name the current GPU."""
        try:
            yield
        finally:
            if dynamo.FakeTensorMode.is_imported():
                dynamo.FakeTensorMode.get().cache_clear()

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of the launches of Triton's kernels, which skip the kernel or end the run with its name."""
        yield from _triton_patches(context.mark_written if context.options.skips_kernels else None)


def _triton_patches(note_written: Callable[[torch.Tensor], None] | None) -> Iterator[Patch]:
    skipped = None if note_written is None else _SkippedLaunches(note_written)
    for module_name, names in _LAUNCHERS.items():
        module = sys.modules.get(module_name)
        for name, method in names.items():
            launcher = getattr(module, name, None)
            if launcher is not None and method in vars(launcher):
                wrap = _wrap_getitem if method == "__getitem__" else _wrap_run
                yield launcher, method, wrap(getattr(launcher, method), skipped)
    drivers = sys.modules.get("triton.runtime.driver")
    if drivers is not None and hasattr(sys.modules.get(_DRIVER), "CudaUtils"):
        # Queries of the driver (by triton.testing.do_bench, which makes the cache) are answered by torch.
        yield sys.modules[_DRIVER], "CudaUtils", _CudaUtils
        yield drivers.driver, "_default", None
        yield drivers.driver, "_active", None


class _CudaUtils:
    """The GPU's properties as Triton's driver reports them (triton/backends/nvidia/driver.c), without clock rates."""

    @staticmethod
    def get_device_properties(device: Any) -> dict[str, int]:
        """Return the properties by Triton's names; kernels choose their launch by the number of multiprocessors."""
        gpu: Any = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": gpu.shared_memory_per_block_optin,
            "max_num_regs": gpu.regs_per_multiprocessor,
            "multiprocessor_count": gpu.multi_processor_count,
            "warpSize": gpu.warp_size,
        }


_DRIVER = "triton.backends.nvidia.driver"
# A launch `kernel[grid](...)` is `KernelInterface.__getitem__`, and ends in `run` of one of these classes
# (triton/runtime); in some releases `run` is an attribute of the instance, so that `__getitem__` is patched as well.
_LAUNCHERS = {
    "triton.runtime.jit": {"KernelInterface": "__getitem__", "JITFunction": "run"},
    "triton.runtime.autotuner": {"Autotuner": "run", "Heuristics": "run"},
}


class _SkippedLaunches:
    """Skipped launches of Triton kernels in one run.

    An autotuner times each of its configurations once for each of its keys (triton/runtime/autotuner.py of 3.4 to 3.7).
    The configurations take the same memory one after the other, so only one is timed, by Triton's own code: `do_bench`,
    whose buffer of 256 MiB is cleared between two calls, the kernel author's replacement (`do_bench`,
    `use_cuda_graph`), and copies of the tensors that each call restores (`restore_value`).
    """

    def __init__(self, note_written: Callable[[torch.Tensor], None]) -> None:
        self._note_written = note_written
        self._timed: set[tuple[int, Any]] = set()

    def __call__(self, kernel: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        self._time_autotuning(kernel, args, kwargs)
        for tensor in tensors:
            self._note_written(tensor)

    def _time_autotuning(self, kernel: Any, args: Any, kwargs: Any) -> None:
        tuner: Any = kernel
        while not hasattr(tuner, "configs"):
            for name, value in getattr(tuner, "values", {}).items():  # heuristics compute arguments of the key
                kwargs = {**kwargs, name: value({**dict(zip(tuner.arg_names, args, strict=False)), **kwargs})}
            if not hasattr(tuner, "fn"):
                return
            tuner = tuner.fn
        if len(tuner.configs) < 2:
            return
        positional = dict(zip(tuner.arg_names, args, strict=False))
        given = {name: value for name, value in {**positional, **kwargs}.items() if name in tuner.arg_names}
        values = [str(given[name]) for name in tuner.keys if name in given]
        key = (id(tuner), (*values, *(str(value.dtype) for value in given.values() if hasattr(value, "dtype"))))
        if key not in self._timed:
            self._timed.add(key)
            tuner.nargs = positional
            tuner._bench(*args, config=tuner.configs[0], **kwargs)
            tuner.nargs = None


def _wrap_getitem(original: Callable[..., Any], skipped: _SkippedLaunches | None) -> Callable[..., Any]:
    def __getitem__(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            if _skip_launch(kernel, args, kwargs, skipped):
                return None
            return original(kernel, grid)(*args, **kwargs)

        return launch

    return __getitem__


def _wrap_run(original: Callable[..., Any], skipped: _SkippedLaunches | None) -> Callable[..., Any]:
    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _skip_launch(kernel, args, kwargs, skipped) else original(kernel, *args, **kwargs)

    return run


def _skip_launch(kernel: Any, args: Any, kwargs: Any, skipped: _SkippedLaunches | None) -> bool:
    """Return whether a kernel has tensors without data among its arguments, so that the launch is skipped.

    Raises:
        KernelError: the arguments have no data, and launches are not skipped.
    """
    with torch.DisableTorchFunction():
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.is_meta]
    if not given:
        return False
    if skipped is not None:
        skipped(kernel, args, kwargs, given)
        return True
    function = kernel
    while hasattr(function, "fn"):  # an autotuner has a kernel, a kernel has a function
        function = function.fn
    name = getattr(function, "__qualname__", None) or getattr(kernel, "__name__", "kernel")
    qualified_name = f"{getattr(function, '__module__', '')}.{name}".lstrip(".")
    raise KernelError(f"the Triton kernel {qualified_name} was launched with tensors that have no data", qualified_name)


def _refuse_tracing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `from_tensor` that refuses tensors "on cuda": fake tensors on CUDA abort the process without a GPU."""

    def from_tensor(mode: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cuda":
            raise TracingError("tracing a model on the GPU (torch.export, FakeTensorMode) is not simulated")
        return original(mode, tensor, *args, **kwargs)

    return from_tensor


_FLEX = "torch.nn.attention.flex_attention"
BLOCK_MASK = (
    "create_block_mask, compiled, makes no mask of every pair of positions: what its blocks are is kept, and not known."
)


def is_block_mask(function: Any) -> bool:
    """Return whether `function` is torch's own `create_block_mask`."""
    flex = sys.modules.get(_FLEX)
    return flex is not None and function is flex.create_block_mask


def allocate_block_mask(*args: Any, **kwargs: Any) -> Any:
    """Return a `BlockMask` as the compiled `create_block_mask` allocates it: the kernel calls `mask_mod` for every
    pair, sums by block in registers and writes two numbers a block. The eager code makes the whole mask [queries x
    keys], and compiling it here would end the run's own function mode, in addition to the mode that it enters."""
    bound = inspect.signature(sys.modules[_FLEX].create_block_mask).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    size, queries, keys = given["BLOCK_SIZE"], given["Q_LEN"], given["KV_LEN"]
    rows, columns = (size, size) if isinstance(size, int) else size
    shape = (given["B"] or 1, given["H"] or 1, -(-queries // rows), -(-keys // columns))
    where = torch.accelerator.current_accelerator() if given["device"] is None else given["device"]
    partial, full = (torch.empty(shape, dtype=torch.int8, device=where) for _ in range(2))
    blocks = (partial, full if given.get("separate_full_blocks", True) else None)
    return dispatch.create_sparse_block_from_block_mask(blocks, given["mask_mod"], (queries, keys), rows, columns)


def _flex_attention(assume: Callable[[str], None]) -> Callable[..., Any]:
    def call(operator: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        assume("flex_attention allocates as its compiled kernel: output, logsumexp, delta in the backward.")
        return _FlexAttention.apply(query, key, value)

    return call


class _FlexAttention(torch.autograd.Function):
    """The allocations of the compiled kernel (torch/_inductor/kernel/flex/flex_attention.py).

    Forward: the output, laid out as the query, and a float32 logsumexp per query and head; backward: a float32 delta
    like the logsumexp, and the three gradients. No score is ever written to memory. Gradients of buffers in a score_mod
    are not computed.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        """Return output, logsumexp and maxima of the scores, which are empty since no caller requests them."""
        shape = (*query.shape[:-1], value.shape[-1])
        out = torch.empty_like(query) if query.shape == shape else query.new_empty(shape)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        maxima = query.new_empty(0, dtype=torch.float32)
        ctx.mark_non_differentiable(lse, maxima)
        return out, lse, maxima

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of query, key and value."""
        query, key, value, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        result = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del delta
        return result
