"""Hand-written kernels: flex attention, Triton. Code from torch.compile is in compiled/.

Kernels cannot be launched without a GPU. Flex attention allocates as its compiled kernel does. The first call of a
Triton kernel ends the run with the kernel's name, or is skipped if the option `passes_kernels` is set.
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
    """Patches for hand-written kernels and for tracing without torch.compile."""

    imports = ("triton.testing",)  # imported after Triton's driver, which packages query at once

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches that reject tracing by the program, and make flex_attention allocate as its kernel does."""
        from_tensor, flex_attention = dynamo.from_tensor, dispatch.call_flex_attention
        if from_tensor.is_imported() and from_tensor.exists():
            yield from_tensor.patch(_wrap_from_tensor(from_tensor.get()))
        if flex_attention.is_imported() and flex_attention.exists():
            yield flex_attention.patch(_make_flex_attention(context.assume))

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Context manager: on exit, clear FakeTensorMode's cache, whose entries refer to the current GPU."""
        try:
            yield
        finally:
            if dynamo.FakeTensorMode.is_imported():
                dynamo.FakeTensorMode.get().cache_clear()

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of Triton's kernel launches, which skip the kernel or raise a KernelError with its name."""
        record_uses = context.recorder.storages.record_uses
        yield from _patch_triton_launches(
            _SkippedLaunches(context.mark_written, record_uses) if context.options.skips_kernels else None
        )


def _patch_triton_launches(skipped_launches: _SkippedLaunches | None) -> Iterator[Patch]:
    for module_name, methods in _LAUNCHERS.items():
        module = sys.modules.get(module_name)
        for class_name, method in methods.items():
            launcher = getattr(module, class_name, None)
            if launcher is not None and method in vars(launcher):
                wrap = _wrap_getitem if method == "__getitem__" else _wrap_run
                yield launcher, method, wrap(getattr(launcher, method), skipped_launches)
    driver_module = sys.modules.get("triton.runtime.driver")
    if driver_module is not None and hasattr(sys.modules.get(_DRIVER_MODULE), "CudaUtils"):
        # Queries of the driver (by triton.testing.do_bench, which makes the cache) are answered by torch.
        yield sys.modules[_DRIVER_MODULE], "CudaUtils", _CudaUtils
        yield driver_module.driver, "_default", None
        yield driver_module.driver, "_active", None


class _CudaUtils:
    """The GPU's properties as Triton's driver reports them (triton/backends/nvidia/driver.c), without clock rates."""

    @staticmethod
    def get_device_properties(device: Any) -> dict[str, int]:
        """Return the properties by Triton's names; kernels choose their grid by the number of multiprocessors."""
        gpu: Any = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": gpu.shared_memory_per_block_optin,
            "max_num_regs": gpu.regs_per_multiprocessor,
            "multiprocessor_count": gpu.multi_processor_count,
            "warpSize": gpu.warp_size,
        }


_DRIVER_MODULE = "triton.backends.nvidia.driver"
# A launch `kernel[grid](...)` is `KernelInterface.__getitem__`, and ends in `run` of one of these classes
# (triton/runtime); in some releases `run` is an attribute of the instance, so that `__getitem__` is patched as well.
_LAUNCHERS = {
    "triton.runtime.jit": {"KernelInterface": "__getitem__", "JITFunction": "run"},
    "triton.runtime.autotuner": {"Autotuner": "run", "Heuristics": "run"},
}


class _SkippedLaunches:
    """Skips launches of Triton kernels, and reproduces the memory that autotuning takes.

    An autotuner times each of its configurations once for each of its keys (triton/runtime/autotuner.py of 3.4 to 3.7).
    All configurations take equal memory, one after the other. So only one is timed, by Triton's own code: its
    `do_bench` (with a buffer of 256 MiB) or the kernel author's, and the tensor copies of `restore_value`.
    """

    def __init__(
        self, note_written: Callable[[torch.Tensor], None], record_uses: Callable[[list[torch.Tensor]], None]
    ) -> None:
        self._note_written = note_written
        self._record_uses = record_uses
        self._timed_keys: set[tuple[int, Any]] = set()

    def __call__(self, kernel: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        self._time_autotuning(kernel, args, kwargs)
        self._record_uses(tensors)
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
        arguments = {name: value for name, value in {**positional, **kwargs}.items() if name in tuner.arg_names}
        key_values = [str(arguments[name]) for name in tuner.keys if name in arguments]
        key = (id(tuner), (*key_values, *(str(value.dtype) for value in arguments.values() if hasattr(value, "dtype"))))
        if key not in self._timed_keys:
            self._timed_keys.add(key)
            tuner.nargs = positional
            tuner._bench(*args, config=tuner.configs[0], **kwargs)
            tuner.nargs = None


def _wrap_getitem(original: Callable[..., Any], skipped_launches: _SkippedLaunches | None) -> Callable[..., Any]:
    def __getitem__(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            if _skip_launch(kernel, args, kwargs, skipped_launches):
                return None
            return original(kernel, grid)(*args, **kwargs)

        return launch

    return __getitem__


def _wrap_run(original: Callable[..., Any], skipped_launches: _SkippedLaunches | None) -> Callable[..., Any]:
    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _skip_launch(kernel, args, kwargs, skipped_launches) else original(kernel, *args, **kwargs)

    return run


def _skip_launch(kernel: Any, args: Any, kwargs: Any, skipped_launches: _SkippedLaunches | None) -> bool:
    """Return whether an argument of the kernel is a tensor without data, so that the launch is skipped.

    Raises:
        KernelError: an argument has no data, and `skipped_launches` is None.
    """
    with torch.DisableTorchFunction():
        meta_args = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.is_meta]
    if not meta_args:
        return False
    if skipped_launches is not None:
        skipped_launches(kernel, args, kwargs, meta_args)
        return True
    function = kernel
    while hasattr(function, "fn"):  # an autotuner has a kernel, a kernel has a function
        function = function.fn
    name = getattr(function, "__qualname__", None) or getattr(kernel, "__name__", "kernel")
    qualified_name = f"{getattr(function, '__module__', '')}.{name}".lstrip(".")
    raise KernelError(f"the Triton kernel {qualified_name} was launched with tensors that have no data", qualified_name)


def _wrap_from_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `from_tensor` that raises for CUDA tensors: without a GPU, fake CUDA tensors abort the process."""

    def from_tensor(mode: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cuda":
            raise TracingError("tracing a model on the GPU (torch.export, FakeTensorMode) is not simulated")
        return original(mode, tensor, *args, **kwargs)

    return from_tensor


_FLEX_MODULE = "torch.nn.attention.flex_attention"
BLOCK_MASK = (
    "create_block_mask, compiled, makes no mask of every pair of positions: what its blocks are is kept, and not known."
)


def is_block_mask(function: Any) -> bool:
    """Return whether `function` is torch's own `create_block_mask`."""
    flex = sys.modules.get(_FLEX_MODULE)
    return flex is not None and function is flex.create_block_mask


def allocate_block_mask(*args: Any, **kwargs: Any) -> Any:
    """Return a `BlockMask` of the arguments of `create_block_mask`, allocated as its compiled kernel does: two numbers
    for each block. The eager code would allocate the full mask of shape [queries, keys]."""
    bound = inspect.signature(sys.modules[_FLEX_MODULE].create_block_mask).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    size, queries, keys = arguments["BLOCK_SIZE"], arguments["Q_LEN"], arguments["KV_LEN"]
    q_size, k_size = (size, size) if isinstance(size, int) else size
    shape = (arguments["B"] or 1, arguments["H"] or 1, -(-queries // q_size), -(-keys // k_size))
    device = torch.accelerator.current_accelerator() if arguments["device"] is None else arguments["device"]
    partial, full = (torch.empty(shape, dtype=torch.int8, device=device) for _ in range(2))
    blocks = (partial, full if arguments.get("separate_full_blocks", True) else None)
    return dispatch.create_sparse_block_from_block_mask(blocks, arguments["mask_mod"], (queries, keys), q_size, k_size)


def _make_flex_attention(assume: Callable[[str], None]) -> Callable[..., Any]:
    def call(operator: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        assume("flex_attention allocates as its compiled kernel: output, logsumexp, delta in the backward.")
        return _FlexAttention.apply(query, key, value)

    return call


class _FlexAttention(torch.autograd.Function):
    """Flex attention with the allocations of its compiled kernel (torch/_inductor/kernel/flex/flex_attention.py).

    Forward: the output, laid out as the query, and a float32 logsumexp per query and head; backward: a float32 delta
    of that shape, and three gradients. Scores are never stored. Gradients of buffers in a score_mod are not computed.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        """Return the output, the logsumexp, and an empty tensor for the scores' maxima, which no caller requests."""
        shape = (*query.shape[:-1], value.shape[-1])
        out = torch.empty_like(query) if query.shape == shape else query.new_empty(shape)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        max_scores = query.new_empty(0, dtype=torch.float32)
        ctx.mark_non_differentiable(lse, max_scores)
        return out, lse, max_scores

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of query, key and value."""
        query, key, value, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        result = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del delta
        return result
