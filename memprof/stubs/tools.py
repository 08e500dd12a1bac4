"""Functions for writing stubs: kernels with a backward, checks of arguments, workspaces, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from memprof.errors import MemprofError
from memprof.stubs import in_graph
from memprof.virtual import limits

HALF = (torch.float16, torch.bfloat16)
_Object = TypeVar("_Object")
_Tensors = torch.Tensor | tuple[torch.Tensor, ...]
Forward = Callable[..., tuple[_Tensors, tuple[torch.Tensor | None, ...]]]
Backward = Callable[..., tuple[torch.Tensor | None, ...]]
_note_call: Callable[[str], None] | None = None
_note_write: Callable[[torch.Tensor], None] | None = None
_record_uses: Callable[[list[torch.Tensor]], None] | None = None
_keep_workspace: Callable[[int, str], None] | None = None
_autotuned: set[tuple[str, Any]] = set()  # Triton kernels with the keys of their launches
_run_objects: dict[Any, Any] = {}
_cleanup = ExitStack()
FLUSHED_BYTES = 256 * 1024 * 1024
_HINT = "install the package, or add a stub (memprof help stubs); --no-stubs does without all"
_READ_BY_INSPECT = "_partialmethod"  # read by inspect.signature, which does not use the stub


@contextmanager
def activate(
    note_call: Callable[[str], None],
    note_write: Callable[[torch.Tensor], None],
    record_uses: Callable[[list[torch.Tensor]], None],
    keep_workspace: Callable[[int, str], None],
) -> Iterator[None]:
    """Context manager: stubs may be called. `note_call` is called with a stub's package at each call, `note_write` with
    tensors written in place, `record_uses` with tensors that a kernel reads or writes, `keep_workspace` with bytes and
    name of each workspace that a stub keeps."""
    global _note_call, _note_write, _record_uses, _keep_workspace
    _note_call, _note_write, _record_uses, _keep_workspace = note_call, note_write, record_uses, keep_workspace
    try:
        yield
    finally:
        _cleanup.close()
        _note_call = _note_write = _record_uses = _keep_workspace = None
        _autotuned.clear()
        _run_objects.clear()
        in_graph.clear_calls()


def kernel(forward: Forward, backward: Backward | None, *inputs: Any) -> Any:
    """Run a kernel of another library as a node of autograd, by functions that allocate as its forward and backward.

    Tensors that a function allocates and does not return are freed on return, like a kernel's scratch memory.

    Args:
        forward: called with `inputs`; returns the outputs (a tensor or a tuple) and the tensors to save (a tuple).
        backward: called with the saved tensors and the gradients of the outputs; returns the gradients of `inputs`
            (None for an input without one). A tensor in its closure lives as long as the graph of the outputs.
            None: the kernel has no backward.
        inputs: tensors, and other values.

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
        outputs, saved = in_graph.call_in_graph(forward, *inputs) if in_graph.is_traced(inputs) else forward(*inputs)
        _record(*inputs)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*saved)
        ctx.backward_function = backward
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.dtype.is_floating_point))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.backward_function is None:
            raise RuntimeError("this kernel has no backward")
        saved = ctx.saved_tensors  # read once: a checkpoint recomputes them
        if in_graph.is_traced(gradients):
            return None, None, *in_graph.call_in_graph(ctx.backward_function, saved, *gradients)
        found = ctx.backward_function(saved, *gradients)
        _record(*saved, *gradients)
        return None, None, *found


def _record(*values: Any) -> None:
    """Record that a kernel has used the tensors among `values`."""
    if _record_uses is not None and not in_graph.is_traced(values):
        _record_uses([value for value in values if isinstance(value, torch.Tensor)])


def check_on_gpu(name: str, *tensors: torch.Tensor | None) -> None:
    """Report a call of the stub `name` ("package.function") with `tensors`. Raises RuntimeError: a tensor is not on a
    GPU, as in the real package; MemprofError: no virtual GPU is active."""
    if _note_call is None:
        raise MemprofError(
            f"{name} is memprof's stub, and no virtual GPU is active",
            hint="it has no numbers: call it inside memprof.virtual_gpu or memprof run, or install the package",
        )
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cuda":
            raise RuntimeError(f"{name}: expected a tensor on CUDA, got one on {tensor.device}")
    _note_call(name.partition(".")[0])
    _record(*tensors)


def require(condition: bool, name: str, requirement: str) -> None:
    """Raise RuntimeError("`name` expects `requirement`") unless `condition` is true."""
    if not condition:
        raise RuntimeError(f"{name} expects {requirement}")


def maybe_contiguous(tensor: Any) -> Any:
    """Return `tensor`, or a contiguous copy if the stride of its last dimension is not 1; None for None."""
    return tensor.contiguous() if tensor is not None and tensor.stride(-1) != 1 else tensor


def autocast_dtype(default: torch.dtype) -> torch.dtype:
    """Return the dtype to which autocast casts on a GPU, or `default` outside autocast."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else default


def count_multiprocessors() -> int:
    """Return the number of multiprocessors of the current GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def mark_written(*tensors: torch.Tensor) -> None:
    """Report that a kernel has written `tensors` in place, so that their values are unknown from now on."""
    if _note_write is not None:
        for tensor in tensors:
            _note_write(tensor)


def reserve_workspace(name: str, num_bytes: int) -> None:
    """Allocate a workspace of `num_bytes`, called `name` in reports, once per GPU; it lives until the run ends."""
    key = ("workspace", name, torch.cuda.current_device())
    if key not in _run_objects and _keep_workspace is not None:
        _run_objects[key] = None
        _keep_workspace(num_bytes, name)


def keep_for_run(key: Any, make: Callable[[], _Object]) -> _Object:
    """Return the object that `make` creates at the first call with `key`; it lives until the run ends."""
    if key not in _run_objects:
        _run_objects[key] = make()
    return _run_objects[key]  # type: ignore[no-any-return]


def call_at_end(undo: Callable[[], None]) -> None:
    """Call `undo` when the run ends, to revert a package's changes to other modules."""
    _cleanup.callback(undo)


def record_autotuning(kernel_name: str, key: Any) -> None:
    """Allocate and free what `triton.autotune` does at a kernel's first launch with `key`: 256 MiB, which are written
    before each timing to clear the GPU's cache (triton/testing.py, do_bench)."""
    if (kernel_name, key) not in _autotuned:
        _autotuned.add((kernel_name, key))
        torch.empty(FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")


def unsupported_error(name: str, argument: str, hint: str = _HINT) -> MemprofError:
    """Return the error for a call of `name` ("package.function") with an argument that its stub does not support."""
    return limits.unsupported_error(f"calls {name} with {argument}, which memprof's stub does not know", hint)


def refuse_if(name: str, conditions: Mapping[str, Any]) -> None:
    """Raise `unsupported_error` if a call of `name` meets one of `conditions`: description -> whether it is met."""
    for description, is_met in conditions.items():
        if is_met:
            raise unsupported_error(name, description)


def refuse_any(name: str, **options: Any) -> None:
    """Raise `unsupported_error` if a call of `name` sets one of `options` to a value other than None."""
    refuse_if(name, {f"`{option}`": value is not None for option, value in options.items()})


def missing_stub_error(name: str) -> MemprofError:
    """Return the error for the use of `name`, which the real package has and which has no stub."""
    return limits.unsupported_error(f"uses {name}, which is not installed and has no stub", _HINT)


class _PlaceholderMeta(type):
    """The metaclass of placeholders: a program can import them, derive from them and name their attributes, such as the
    members of an enum, as packages do when they are imported; to call one raises an error."""

    _refused_name: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise missing_stub_error(cls._refused_name)

    def __getattr__(cls, name: str) -> Any:
        if (name.startswith("__") and name.endswith("__")) or name == _READ_BY_INSPECT:
            raise AttributeError(name)
        attribute = make_placeholder(cls._refused_name, name)
        setattr(cls, name, attribute)  # the same one at each use, as an enum's member is
        return attribute


def make_placeholder(module: str, name: str) -> Any:
    """Return a class that can be imported in place of `module.name`, and raises an error when it is called."""
    placeholder = _PlaceholderMeta(name, (), {"__module__": module})
    placeholder._refused_name = f"{module}.{name}"
    return placeholder
