"""Tools for writing stubs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from memprof.errors import MemprofError
from memprof.stubs import in_graph
from memprof.virtual import limits

HALF = (torch.float16, torch.bfloat16)
_Kept = TypeVar("_Kept")
_Tensors = torch.Tensor | tuple[torch.Tensor, ...]
Forward = Callable[..., tuple[_Tensors, tuple[torch.Tensor | None, ...]]]
Backward = Callable[..., tuple[torch.Tensor | None, ...]]
_used: Callable[[str], None] | None = None
_written: Callable[[torch.Tensor], None] | None = None
_takes: Callable[[int, str], None] | None = None
_tuned: set[tuple[str, Any]] = set()
_kept: dict[Any, Any] = {}
_ends = ExitStack()
FLUSHED_BYTES = 256 * 1024 * 1024


@contextmanager
def active(
    used: Callable[[str], None], written: Callable[[torch.Tensor], None], takes: Callable[[int, str], None]
) -> Iterator[None]:
    """Context manager: stubs may be called. `used` is called with the package of each, `written` with tensors written
    in place, `takes` with the workspaces that stubs keep."""
    global _used, _written, _takes
    _used, _written, _takes = used, written, takes
    try:
        yield
    finally:
        _ends.close()
        _used = _written = _takes = None
        _tuned.clear()
        _kept.clear()
        in_graph.forget()


def kernel(forward: Forward, backward: Backward | None, *inputs: Any) -> Any:
    """Call a kernel of another library that has a backward of its own, by what both allocate.

    What a function makes and does not return is freed on return, as a kernel's scratch does.

    Args:
        forward: given `inputs`, gives the outputs (a tensor or a tuple) and what is saved for the backward (a tuple).
        backward: given what was saved and the gradients of the outputs, gives those of `inputs` (None for what has
            none). A tensor that the function holds otherwise lives on after it, as long as what is computed of the
            outputs. None: the kernel has no backward.
        inputs: tensors, and anything else.

    Example:
        def forward(x, weight):
            statistics = x.new_empty(x.shape[0], dtype=torch.float32)
            return torch.empty_like(x), (x, weight, statistics)

        def backward(saved, gradient):
            x, weight, _ = saved
            return torch.empty_like(x), torch.empty_like(weight)

        with memprof.virtual_gpu() as gpu:
            x, weight = torch.ones(64, 32, device="cuda"), torch.ones(32, device="cuda", requires_grad=True)
            memprof.kernel(forward, backward, x, weight).sum().backward()
            print(gpu.allocated_bytes)
    """
    return _Kernel.apply(forward, backward, *inputs)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Backward | None, *inputs: Any) -> Any:
        outputs, saved = in_graph.called(forward, *inputs) if in_graph.is_traced(inputs) else forward(*inputs)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*saved)
        ctx.run = backward
        made = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.mark_non_differentiable(*(tensor for tensor in made if not tensor.dtype.is_floating_point))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.run is None:
            raise RuntimeError("this kernel has no backward")
        if in_graph.is_traced(gradients):
            return None, None, *in_graph.called(ctx.run, ctx.saved_tensors, *gradients)
        return None, None, *ctx.run(ctx.saved_tensors, *gradients)


def check_on_gpu(name: str, *tensors: torch.Tensor | None) -> None:
    """Check a stub's call: `name`, "package.function", on these tensors. Raises RuntimeError: a tensor is not on a GPU
    (an error in the real package too); MemprofError: no virtual GPU is active."""
    if _used is None:
        raise MemprofError(
            f"{name} is memprof's stub, and no virtual GPU is active",
            hint="it has no numbers: call it inside memprof.virtual_gpu or memprof run, or install the package",
        )
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cuda":
            raise RuntimeError(f"{name}: expected a tensor on CUDA, got one on {tensor.device}")
    _used(name.partition(".")[0])


def require(holds: bool, name: str, what: str) -> None:
    """Raise RuntimeError with `name` and `what` unless `holds`, where the real function raises an error too."""
    if not holds:
        raise RuntimeError(f"{name} expects {what}")


def last_contiguous(tensor: Any) -> Any:
    """Return a copy of a tensor whose last dimension is not contiguous, else the tensor (maybe_contiguous)."""
    return tensor.contiguous() if tensor is not None and tensor.stride(-1) != 1 else tensor


def autocast_dtype(otherwise: torch.dtype) -> torch.dtype:
    """Return the dtype that autocast casts to on a GPU, or `otherwise` without autocast."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else otherwise


def num_multiprocessors() -> int:
    """Return the number of multiprocessors of the current GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def mark_written(*tensors: torch.Tensor) -> None:
    """Note that a kernel has written these tensors in place, so that their values are unknown."""
    if _written is not None:
        for tensor in tensors:
            _written(tensor)


def reserve_workspace(name: str, num_bytes: int) -> None:
    """Allocate a package's workspace, with this name in reports, at its first call on a GPU; kept for the run."""
    key = ("workspace", name, torch.cuda.current_device())
    if key not in _kept and _takes is not None:
        _kept[key] = None
        _takes(num_bytes, name)


def keep_for_run(key: Any, make: Callable[[], _Kept]) -> _Kept:
    """Return the object that `make` creates at the first call with `key`, kept for the length of a run."""
    if key not in _kept:
        _kept[key] = make()
    found: _Kept = _kept[key]
    return found


def call_at_end(undo: Callable[[], None]) -> None:
    """Call `undo` when the run ends, to revert a package's changes to other modules."""
    _ends.callback(undo)


def count_autotuning(kernel_name: str, key: Any) -> None:
    """Count the launch of a Triton kernel under `triton.autotune`: with a new key its configurations are timed, and
    before each timing 256 MiB are written to clear the GPU's cache (triton/testing.py, do_bench; for CUDA
    backends/nvidia/driver.py, get_empty_cache_for_benchmark)."""
    if (kernel_name, key) not in _tuned:
        _tuned.add((kernel_name, key))
        torch.empty(FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")


def unsupported_error(name: str, what: str, hint: str = "") -> MemprofError:
    """Return the error for `what`, an argument of `name` ("package.function") with other, unknown allocations."""
    return limits.unsupported_error(f"calls {name} with {what}, which memprof's stub does not know", hint or _HINT)


def refuse(name: str, reasons: Mapping[str, Any]) -> None:
    """Raise `unsupported_error` for the first of `reasons` (an argument's text -> whether it is given) that holds."""
    for what, holds in reasons.items():
        if holds:
            raise unsupported_error(name, what)


def refuse_given(name: str, **options: Any) -> None:
    """Raise `unsupported_error` for the first of `options` that is not None."""
    refuse(name, {f"`{option}`": value is not None for option, value in options.items()})


def missing_stub_error(name: str) -> MemprofError:
    """Return the error for a name of a real package that has no stub."""
    return limits.unsupported_error(f"uses {name}, which is not installed and has no stub", _HINT)


_HINT = "install the package, or add a stub (memprof help stubs); --no-stubs does without all"


_READ_BY_INSPECT = "_partialmethod"  # read by inspect.signature, which does not use the stub


class _PlaceholderMeta(type):
    """The metaclass of a name without a stub, which can be imported, but not used."""

    _refused_name: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise missing_stub_error(cls._refused_name)

    def __getattr__(cls, name: str) -> Any:
        if (name.startswith("__") and name.endswith("__")) or name == _READ_BY_INSPECT:
            raise AttributeError(name)
        raise missing_stub_error(f"{cls._refused_name}.{name}")


def make_placeholder(module: str, name: str) -> Any:
    """Return a class that can be imported in place of `module.name`; every use raises an error with that name."""

    def refuse(cls: type, /, **kwargs: Any) -> None:
        raise missing_stub_error(f"{module}.{name}")

    made = _PlaceholderMeta(name, (), {"__module__": module, "__init_subclass__": classmethod(refuse)})
    made._refused_name = f"{module}.{name}"
    return made
