"""Conversion of the exception that ended a run into a `Failure` with operator, module and source line.

All facts are read from the frames of the traceback, so runs without failure have no overhead: the operator from the
frame of the dispatch mode, the module from the frame of the innermost wrapped module call.
"""

from __future__ import annotations

import contextlib
import dis
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from memprof.allocator.messages import MpsOutOfMemoryError
from memprof.errors import MemprofError, error_text, first_line
from memprof.trace.events import GPU_TYPES, NONE, EventKind, Failure, FailureKind, Phase, PhaseKind, Trace, is_gpu
from memprof.watch.modules import MODULE_CALL_CODE
from memprof.watch.program_code import WORKLOAD_DIR, is_own_file, is_program
from memprof.watch.recorder import Recorder


class KernelError(RuntimeError):
    """Error: the program called `kernel`, a kernel outside torch (Triton, CUDA extension) that needs a real GPU."""

    def __init__(self, message: str, kernel: str) -> None:
        super().__init__(message)
        self.kernel = kernel


class TracingError(RuntimeError):
    """Error: torch.export traces a model on the virtual GPU, which is not supported."""


_ACTIVITY_BY_PHASE = {
    PhaseKind.MODEL: "the program's own code, before its first step",
    PhaseKind.OPTIMIZER: "building the optimizer",
    PhaseKind.INPUTS: "making the inputs",
    PhaseKind.OTHER: "the program's own code",
}
# torch's messages for an operator without a kernel for tensors without data (torch/csrc/autograd, Dispatcher.cpp,
# torch/_library/custom_ops.py).
_NO_META_KERNEL_PATTERNS = (
    re.compile(r"([\w.]+::[\w.]+): attempted to run this operator with Meta tensors"),
    re.compile(r"Could not run '([\w.]+::[\w.]+)' (?:from|with arguments from)"),
    re.compile(r"no fake impl registered for <CustomOpDef\(([\w.]+::[\w.]+)\)>"),
)
# Errors by which torch says that a GPU's memory ran out.
OUT_OF_MEMORY_ERRORS = (torch.OutOfMemoryError, MpsOutOfMemoryError)
# torch's messages for a missing GPU, by device type; only the thread that entered the virtual GPU, and its backward
# threads, have one, and of one type.
_NO_GPU_PATTERNS = {
    gpu_type: re.compile(
        f"Could not run 'aten::.* from the '{gpu_type.upper()}' backend|Torch not compiled with {gpu_type.upper()} "
        f"enabled|PyTorch is not linked with support for {gpu_type}{'|Found no NVIDIA driver' * (gpu_type == 'cuda')}"
    )
    for gpu_type in GPU_TYPES
}
_GPU_EXAMPLES = {"cuda": "h100-80gb", "mps": "m4-max-64gb", "xpu": "arc-b580"}  # GPUs of the catalog, by device type
# torch's message where a thread that does not see the virtual GPU copies a tensor of that GPU.
_NO_DATA_MESSAGE = "Cannot copy out of meta tensor"
_NO_META_ACCESS_PATTERN = re.compile(
    r"Not available for 'meta' device|Cannot access storage of \w+Impl|on meta tensors|Cannot pack tensors on meta"
)
# torch's name for the device and types of tensors without data, which do not occur in messages on a real GPU.
_META_NAME_PATTERN = re.compile(r"\b[Mm]eta(?:[A-Z]\w*)?\b")
# Messages with which extensions and Triton refuse tensors whose data is not on a real GPU.
_NEEDS_DATA_PATTERN = re.compile(
    r"Cannot access data pointer|data is not allocated yet|is_cuda\(\)|\b(?:must|should|expected|has) (?:to )?(?:be )?"
    r"(?:a |on )?(?:the )?(?:CUDA|GPU)\b|0 active drivers|CUDA driver|libcuda|no kernel image|invalid device function|"
    r"CUDA_HOME|no CUDA-capable device|cudaError",
    re.IGNORECASE,
)


# Python's and torch's messages for arguments that a function does not have, or lacks.
_SIGNATURE_PATTERN = re.compile(
    r"unexpected keyword argument|required (?:positional|keyword-only) argument|takes .* positional arguments? but|"
    r"multiple values for (?:keyword )?argument"
)


def describe_failure(
    error: BaseException,
    recorder: Recorder,
    phase: Phase,
    unknown_read: tuple[int, str] | None,
    dispatch_code: CodeType,
) -> Failure:
    """Return the failure for `error`, raised in `phase` on the virtual GPU.

    `unknown_read`: index of the source line that last read a value that is not computed, and a description of the
    value. `dispatch_code`: code object of the dispatch mode's method, whose frames have the operator.
    """
    op: str | None = None
    module = NONE
    frames, lines = _collect_frames_and_lines(error)
    for frame in frames:
        if frame.f_code is dispatch_code:
            func, place = frame.f_locals.get("func"), frame.f_locals.get("place")
            op = None if func is None else func._schema.name.replace("::", ".")
            if place is not None and place.module != NONE:
                module = place.module
        elif frame.f_code is MODULE_CALL_CODE:
            index = frame.f_locals.get("index")
            module = module if index is None else index  # None: the call raised before the module was known
    source = lines[-1] if lines else None
    own_line = next((line for line in reversed(lines) if is_own_file(line)), None)
    if isinstance(error, MemprofError):
        return make_refused_failure(error.problem, error.hint, source, phase, frames)
    kind, named_op = _classify_error(error, error_text(error))
    hint = format_fake_registration(named_op or op) if kind is FailureKind.NO_META_KERNEL else None
    message = first_line(error)
    own_type, absent_type = recorder.trace.device.partition(":")[0], _find_absent_type(error_text(error))
    if absent_type == own_type:
        absent_type = None
    if absent_type is not None:
        kind, named_op, message = FailureKind.ERROR, None, message.partition(". ")[0]
        hint = (
            f"the program asks for {absent_type!r}, and the virtual GPU is {own_type!r}: give it a GPU of that type, "
            f"such as --gpu {_GPU_EXAMPLES[absent_type]} (memprof gpus lists all)"
        )
    unknown_read_text = None
    if kind is FailureKind.ERROR and unknown_read is not None and unknown_read[0] != NONE and _depends_on_values(error):
        source_index, value_text = unknown_read
        line = recorder.trace.sources[source_index]
        if any(_split_location(line) == _split_location(other) for other in lines):
            kind, unknown_read_text = FailureKind.UNKNOWN_VALUE, f"{line}: {value_text}"
    if kind is FailureKind.ERROR and absent_type is None and _mentions_meta_device(error_text(error), frames):
        kind = FailureKind.GAP
    return Failure(
        kind=kind,
        phase=_describe_activity(phase, frames),
        error=type(error).__name__,
        message=message,
        op=named_op or op,
        module=None if module == NONE else recorder.trace.modules[module].path,
        source=source,
        read=unknown_read_text,
        hint=hint,
        caller=None if own_line == source else own_line,
    )


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of memprof's and torch's frames in the traceback of `error`.

    On a real GPU these are C++ frames, which release their objects on exit; Python frames would keep tensors alive as
    long as the traceback. Frames that `describe_failure` reads are not cleared.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code is MODULE_CALL_CODE or code.co_name == "__torch_dispatch__" or is_program(code):
            continue
        with contextlib.suppress(RuntimeError):  # the caller's frame still runs
            frame.clear()


def format_fake_registration(op: str | None) -> str | None:
    """Return a hint with code that registers a fake kernel (torch.library.register_fake) for custom operator `op`.

    None for torch's own operators and unknown names.
    """
    namespace, _, name = (op or "").partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name.partition(".")[0], None) if name else None
    if packet is None or namespace in ("aten", "prims", "prim"):
        return None
    overload = name.partition(".")[2] or packet.overloads()[0]
    schema = getattr(packet, overload)._schema
    tensor = next((arg.name for arg in schema.arguments if str(arg.type) == "Tensor"), None)
    results = [_RESULT_EXPRESSIONS.get(str(arg.type), "...").format(tensor or "...") for arg in schema.returns]
    return _FAKE_REGISTRATION.format(
        name=schema.name if overload == "default" else f"{schema.name}.{overload}",
        arguments=", ".join(_format_parameters(schema)),
        result=", ".join(results) or "None",
    )


def _format_parameters(schema: Any) -> Iterator[str]:
    has_star = False
    for argument in schema.arguments:
        if argument.kwarg_only and not has_star:
            has_star = True
            yield "*"
        yield f"{argument.name}={argument.default_value!r}" if argument.has_default_value() else argument.name


# Type of a result -> an expression that makes such a result.
_RESULT_EXPRESSIONS = {"Tensor": "torch.empty_like({})", "List[Tensor]": "[torch.empty_like({})]"}
_FAKE_REGISTRATION = """say what it allocates, with the shapes, types and strides that its kernel gives its results
@torch.library.register_fake("{name}")
def _({arguments}):
    return {result}
or choose another implementation of it, or measure the run on a GPU"""


def make_refused_failure(
    problem: str, hint: str | None, source: str | None, phase: Phase, frames: Iterable[FrameType] | None = None
) -> Failure:
    """Return the failure of a run in which memprof refused to simulate an operation, even if the program continued.

    `frames` are the frames that the error passed through; None means the current stack.
    """
    activity = _describe_activity(
        phase, (frame for frame, _ in traceback.walk_stack(sys._getframe())) if frames is None else frames
    )
    return Failure(FailureKind.REFUSED, activity, MemprofError.__name__, problem, None, None, source, None, hint)


def _describe_activity(phase: Phase, frames: Iterable[FrameType]) -> str:
    activity = _ACTIVITY_BY_PHASE.get(phase.kind, phase.kind.value)
    if phase.kind is PhaseKind.MODEL and any(map(_is_building_model, frames)):
        activity = "building the model"
    return f"{activity} of step {phase.step}" if phase.step else activity


def _is_building_model(frame: FrameType) -> bool:
    """Return whether `frame` runs `__init__`, `to` or `_apply` of a module, or code of memprof's own workloads.

    The phase alone does not show that a model is built: it is MODEL from the program's start to the first model call.
    """
    code = frame.f_code
    if code.co_name in ("__init__", "_apply", "to"):
        return isinstance(frame.f_locals.get(next(iter(code.co_varnames), "")), nn.Module)
    return code.co_filename.startswith(WORKLOAD_DIR)


def is_missing_gpu_error(error: BaseException) -> bool:
    """Return whether `error` was raised because its thread has no access to the virtual GPU."""
    return _find_absent_type(error_text(error)) is not None or _NO_DATA_MESSAGE in error_text(error)


def _find_absent_type(text: str) -> str | None:
    """Return the device type that the error message `text` says torch lacks; None if it is another message."""
    return next((gpu_type for gpu_type, pattern in _NO_GPU_PATTERNS.items() if pattern.search(text)), None)


def is_caused_by_oom(error: BaseException | None) -> bool:
    """Return whether `error`, or an error in its chain of causes and contexts, says that the GPU's memory ran out."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OUT_OF_MEMORY_ERRORS):
            return True
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def has_last_allocation_failed(trace: Trace) -> bool:
    """Return whether the last GPU allocation in `trace` failed."""
    for kind, ref in reversed(trace.events):
        if kind is EventKind.ALLOC and is_gpu(trace.storages[ref].device):
            return bool(trace.refused) and trace.refused[-1] == ref
    return False


def is_torchscript_error(error: BaseException | None) -> bool:
    """Return whether `error` is of TorchScript's interpreter, which raises it for any error of an operator."""
    return isinstance(error, RuntimeError) and "operation failed in the TorchScript interpreter" in error_text(error)


def describe_measured_failure(error: BaseException, phase: Phase) -> Failure:
    """Return the failure for `error`, raised on a real device in `phase`."""
    text = error_text(error)
    is_out_of_memory = (
        isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator: can't allocate" in text
    )
    frames, lines = _collect_frames_and_lines(error)
    source = lines[-1] if lines else None
    if isinstance(error, MemprofError):
        return make_refused_failure(error.problem, error.hint, source, phase, frames)
    kind = FailureKind.OUT_OF_MEMORY if is_out_of_memory else _classify_error(error, "")[0]
    return Failure(
        kind, _describe_activity(phase, frames), type(error).__name__, first_line(error), None, None, source, None
    )


def _collect_frames_and_lines(error: BaseException) -> tuple[list[FrameType], list[str]]:
    """Return the frames in the traceback of `error`, and the program's source lines among them, outermost first."""
    entries = [(frame, frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    lines = [f"{code.co_filename}:{number} {code.co_name}" for _, code, number in entries if is_program(code)]
    return [frame for frame, _, _ in entries], lines


def _classify_error(error: BaseException, text: str) -> tuple[FailureKind, str | None]:
    """Return the kind of failure of `error`, and the operator named in its message `text` (None if there is none)."""
    if isinstance(error, KeyboardInterrupt):
        return FailureKind.INTERRUPTED, None
    if isinstance(error, KernelError):
        return FailureKind.CUSTOM_KERNEL, error.kernel
    if isinstance(error, TracingError):
        return FailureKind.TRACING, None
    if _find_absent_type(text) is not None:
        return FailureKind.OTHER_THREAD, None
    for pattern in _NO_META_KERNEL_PATTERNS:
        match = pattern.search(text)
        if match:
            return FailureKind.NO_META_KERNEL, match[1].replace("::", ".")
    if isinstance(
        error, (NotImplementedError, RuntimeError, BufferError, TypeError)
    ) and _NO_META_ACCESS_PATTERN.search(text):
        return FailureKind.NO_META_KERNEL, None
    if _NEEDS_DATA_PATTERN.search(text):
        return FailureKind.CUSTOM_KERNEL, None
    return FailureKind.ERROR, None


def _mentions_meta_device(text: str, frames: Iterable[FrameType]) -> bool:
    """Return whether the error message `text` mentions meta tensors, and no source file of the program in `frames`
    does: then the message comes from the virtual GPU, which is built on meta tensors."""
    if not _META_NAME_PATTERN.search(text):
        return False
    programs = {frame.f_code.co_filename for frame in frames if is_program(frame.f_code)}
    return not any("meta" in line for name in programs for line in linecache.getlines(name))


def _depends_on_values(error: BaseException) -> bool:
    """Return whether `error` might not have occurred if a value read from a tensor had been different.

    False for misspelled names, missing libraries and wrong library versions. True for a variable that is not set in
    some branch, and for None in place of an object.
    """
    if isinstance(error, (ImportError, SyntaxError)):
        return False
    if isinstance(error, AttributeError):
        return error.obj is None
    if isinstance(error, TypeError) and _SIGNATURE_PATTERN.search(error_text(error)):
        return False
    if isinstance(error, NameError) and not isinstance(error, UnboundLocalError):
        *_, (last, _) = traceback.walk_tb(error.__traceback__)
        return any(
            instruction.opname in ("STORE_NAME", "STORE_GLOBAL") and instruction.argval == error.name
            for instruction in dis.get_instructions(last.f_code)
        )
    if isinstance(error, KeyError):  # the column of a batch, the field of a configuration
        return not (error.args and isinstance(error.args[0], str) and error.args[0].isidentifier())
    return True


def _split_location(line: str) -> tuple[str, str]:
    location, _, name = line.rpartition(" ")
    return location.rpartition(":")[0], name
