"""Why a run ended before its time: an exception turned into a `Failure`, with operator, module and line.

Everything is read off the traceback, so that a run which does not fail pays nothing for it: the dispatch mode's frame
holds the operator, the innermost wrapped module call the module.
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

from memprof.errors import MemprofError, error_text, first_line
from memprof.trace.events import NONE, Failure, FailureKind, Phase, PhaseKind
from memprof.watch.modules import MODULE_CALL
from memprof.watch.program_code import OWN_WORKLOADS, is_program
from memprof.watch.recorder import Recorder


class KernelError(RuntimeError):
    """A kernel below torch was called: it needs data and a device. `kernel` is its name."""

    def __init__(self, message: str, kernel: str) -> None:
        super().__init__(message)
        self.kernel = kernel


class TracingError(RuntimeError):
    """A model on the GPU is traced (torch.export), on torch's own tensors without data."""


_DOING = {
    PhaseKind.MODEL: "the program's own code, before its first step",
    PhaseKind.OPTIMIZER: "building the optimizer",
    PhaseKind.INPUTS: "making the inputs",
    PhaseKind.OTHER: "the program's own code",
}
# How torch says that an operator has no kernel for tensors without data (torch/csrc/autograd, Dispatcher.cpp,
# torch/_library/custom_ops.py).
_NO_META = (
    re.compile(r"([\w.]+::[\w.]+): attempted to run this operator with Meta tensors"),
    re.compile(r"Could not run '([\w.]+::[\w.]+)' (?:from|with arguments from)"),
    re.compile(r"no fake impl registered for <CustomOpDef\(([\w.]+::[\w.]+)\)>"),
)
# How torch says that there is no GPU; the virtual one is there for the thread that entered it, and its backward.
_NO_GPU = re.compile(
    r"Could not run 'aten::.* from the 'CUDA' backend|Torch not compiled with CUDA enabled|Found no NVIDIA driver|"
    r"PyTorch is not linked with support for cuda"
)
# What a thread that does not see the virtual GPU is told of a tensor on it.
_NO_DATA = "Cannot copy out of meta tensor"
_CANNOT = re.compile(
    r"Not available for 'meta' device|Cannot access storage of \w+Impl|on meta tensors|Cannot pack tensors on meta"
)
# What torch calls the device and the types of tensors without data: no program on a GPU meets it.
_SPEAKS_OF_META = re.compile(r"\b[Mm]eta(?:[A-Z]\w*)?\b")
# How extensions and Triton refuse tensors whose data is not on a real GPU.
_NEEDS_DATA = re.compile(
    r"Cannot access data pointer|data is not allocated yet|is_cuda\(\)|\b(?:must|should|expected|has) (?:to )?(?:be )?"
    r"(?:a |on )?(?:the )?(?:CUDA|GPU)\b|0 active drivers|CUDA driver|libcuda|no kernel image|invalid device function|"
    r"CUDA_HOME|no CUDA-capable device|cudaError",
    re.IGNORECASE,
)


def describe_failure(
    error: BaseException, recorder: Recorder, phase: Phase, unknown_read: tuple[int, str] | None, dispatch: CodeType
) -> Failure:
    """Return the failure that `error`, raised in `phase`, is.

    `unknown_read` is the index of the line that last read an unknown value, and what it was told; `dispatch` the code
    of the dispatch mode's method, whose frames name operators.
    """
    op: str | None = None
    module = NONE
    frames, lines = _frames_and_lines(error)
    for frame in frames:
        if frame.f_code is dispatch:
            func, place = frame.f_locals.get("func"), frame.f_locals.get("place")
            op = None if func is None else func._schema.name.replace("::", ".")
            if place is not None and place.module != NONE:
                module = place.module
        elif frame.f_code is MODULE_CALL:
            index = frame.f_locals.get("index")
            module = module if index is None else index  # None: it raised before the module was known
    source = lines[-1] if lines else None
    if isinstance(error, MemprofError):
        return make_refusal(error.problem, error.hint, source, phase, frames)
    kind, named = _kind(error, error_text(error))
    read = None
    if kind is FailureKind.ERROR and unknown_read is not None and unknown_read[0] != NONE and _may_decide(error):
        where, told = unknown_read
        line = recorder.trace.sources[where]
        if any(_function(line) == _function(other) for other in lines):  # a decision follows what was read there
            kind, read = FailureKind.UNKNOWN_VALUE, f"{line}: {told}"
    if kind is FailureKind.ERROR and _is_gap(error_text(error), frames):
        kind = FailureKind.GAP
    return Failure(
        kind=kind,
        phase=_doing(phase, frames),
        error=type(error).__name__,
        message=first_line(error),
        op=named or op,
        module=None if module == NONE else recorder.trace.modules[module].path,
        source=source,
        read=read,
        hint=registration(named or op) if kind is FailureKind.NO_META_KERNEL else None,
    )


def empty_frames(error: BaseException) -> None:
    """Empty the frames of memprof and torch that `error` has passed through below the caller's.

    They stand for C++, which releases what it holds when it is left; in Python it would live as long as the traceback.
    What `describe` reads is kept: dispatch modes let go of tensors themselves, module calls have no more than torch's.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code is MODULE_CALL or code.co_name == "__torch_dispatch__" or is_program(code):
            continue
        with contextlib.suppress(RuntimeError):  # it still runs: the caller's
            frame.clear()


def registration(op: str | None) -> str | None:
    """Return what to add to the program so that an operator of a library has a kernel without data, by its schema.

    None: it is one of torch's own, or not known by its name.
    """
    namespace, _, name = (op or "").partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name.partition(".")[0], None) if name else None
    if packet is None or namespace in ("aten", "prims", "prim"):
        return None
    overload = name.partition(".")[2] or packet.overloads()[0]
    schema = getattr(packet, overload)._schema
    first = next((one.name for one in schema.arguments if str(one.type) == "Tensor"), None)
    made = [_LIKE.get(str(one.type), "...").format(first or "...") for one in schema.returns]
    return _REGISTRATION.format(
        name=schema.name if overload == "default" else f"{schema.name}.{overload}",
        arguments=", ".join(_parameters(schema)),
        result=", ".join(made) or "None",
    )


def _parameters(schema: Any) -> Iterator[str]:
    stars = False
    for one in schema.arguments:
        if one.kwarg_only and not stars:
            stars = True
            yield "*"
        yield f"{one.name}={one.default_value!r}" if one.has_default_value() else one.name


# Type of a result -> a first guess at what makes it.
_LIKE = {"Tensor": "torch.empty_like({})", "List[Tensor]": "[torch.empty_like({})]"}
_REGISTRATION = """say what it allocates, with the shapes, types and strides that its kernel gives its results
@torch.library.register_fake("{name}")
def _({arguments}):
    return {result}
or choose another implementation of it, or measure the run on a GPU"""


def make_refusal(
    problem: str, hint: str | None, source: str | None, phase: Phase, frames: Iterable[FrameType] | None = None
) -> Failure:
    """Return the failure of a run in which something was refused, whether or not the program went on without it.

    `frames` are those that it passed through; None: those that are running.
    """
    doing = _doing(phase, (frame for frame, _ in traceback.walk_stack(sys._getframe())) if frames is None else frames)
    return Failure(FailureKind.REFUSED, doing, MemprofError.__name__, problem, None, None, source, None, hint)


def _doing(phase: Phase, frames: Iterable[FrameType]) -> str:
    doing = _DOING.get(phase.kind, phase.kind.value)
    if phase.kind is PhaseKind.MODEL and any(map(_builds, frames)):
        doing = "building the model"
    return f"{doing} of step {phase.step}" if phase.step else doing


def _builds(frame: FrameType) -> bool:
    """Return whether this is a function that makes or moves a module, or the step of memprof's own workloads that does.

    A program's phase is the model's until it calls one: it may be anywhere.
    """
    code = frame.f_code
    if code.co_name in ("__init__", "_apply", "to"):
        return isinstance(frame.f_locals.get(next(iter(code.co_varnames), "")), nn.Module)
    return code.co_filename.startswith(OWN_WORKLOADS)


def is_missing_gpu_error(error: BaseException) -> bool:
    """Return whether a thread that raised `error` wanted the virtual GPU, which it does not see."""
    return bool(_NO_GPU.search(error_text(error))) or _NO_DATA in error_text(error)


def is_caused_by_oom(error: BaseException | None) -> bool:
    """Return whether `error` is, or was raised because of, a GPU that was full."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def measured_failure(error: BaseException, phase: Phase) -> Failure:
    """Return the failure that `error` is, raised on a real device in `phase`."""
    text = error_text(error)
    full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator: can't allocate" in text
    frames, lines = _frames_and_lines(error)
    source = lines[-1] if lines else None
    if isinstance(error, MemprofError):
        return make_refusal(error.problem, error.hint, source, phase, frames)
    kind = FailureKind.OUT_OF_MEMORY if full else _kind(error, "")[0]
    return Failure(kind, _doing(phase, frames), type(error).__name__, first_line(error), None, None, source, None)


def _frames_and_lines(error: BaseException) -> tuple[list[FrameType], list[str]]:
    """Return the frames that `error` has passed through, and the program's lines among them, outermost first."""
    passed = [(frame, frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    lines = [f"{code.co_filename}:{number} {code.co_name}" for _, code, number in passed if is_program(code)]
    return [frame for frame, _, _ in passed], lines


def _kind(error: BaseException, text: str) -> tuple[FailureKind, str | None]:
    """Return the kind, and the operator that the message names."""
    if isinstance(error, KeyboardInterrupt):
        return FailureKind.INTERRUPTED, None
    if isinstance(error, KernelError):
        return FailureKind.CUSTOM_KERNEL, error.kernel
    if isinstance(error, TracingError):
        return FailureKind.TRACING, None
    if _NO_GPU.search(text):
        return FailureKind.OTHER_THREAD, None
    for pattern in _NO_META:
        match = pattern.search(text)
        if match:
            return FailureKind.NO_META_KERNEL, match[1].replace("::", ".")
    if isinstance(error, (NotImplementedError, RuntimeError, BufferError, TypeError)) and _CANNOT.search(text):
        return FailureKind.NO_META_KERNEL, None
    if _NEEDS_DATA.search(text):
        return FailureKind.CUSTOM_KERNEL, None
    return FailureKind.ERROR, None


def _is_gap(text: str, frames: Iterable[FrameType]) -> bool:
    """Return whether an error with this message is the virtual GPU's, and not what the program did.

    A program that asks for the meta device itself may meet its name in an error of its own.
    """
    if not _SPEAKS_OF_META.search(text):
        return False
    programs = {frame.f_code.co_filename for frame in frames if is_program(frame.f_code)}
    return not any("meta" in line for name in programs for line in linecache.getlines(name))


def _may_decide(error: BaseException) -> bool:
    """Return whether another number could have spared the program this error.

    What is misspelt, not installed or of another version of a library is so with any number. What a branch that was not
    taken would have set is not: a variable, or an object where None is.
    """
    if isinstance(error, (ImportError, SyntaxError)):
        return False
    if isinstance(error, AttributeError):
        return error.obj is None
    if isinstance(error, NameError) and not isinstance(error, UnboundLocalError):
        *_, (last, _) = traceback.walk_tb(error.__traceback__)
        return any(
            instruction.opname in ("STORE_NAME", "STORE_GLOBAL") and instruction.argval == error.name
            for instruction in dis.get_instructions(last.f_code)
        )
    if isinstance(error, KeyError):  # the column of a batch, the field of a configuration
        return not (error.args and isinstance(error.args[0], str) and error.args[0].isidentifier())
    return True


def _function(line: str) -> tuple[str, str]:
    place, _, name = line.rpartition(" ")
    return place.rpartition(":")[0], name
