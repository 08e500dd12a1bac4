"""Limits of the virtual GPU: the error for an unsupported operation, with the program's own source line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memprof.errors import MemprofError
from memprof.monitor.probe import no_gpu
from memprof.virtual.operator_call import find_tensors
from memprof.watch.program_code import is_program

IN_WORKER = "uses CUDA in a worker process of a DataLoader"
SEND_NUMBERS = "send numbers (`.item()`, `.tolist()`) or shapes instead"
# Called with the problem, the hint and the source line of an unsupported operation.
Note = Callable[[str, str | None, str | None], None]
_note: Note | None = None


def set_unsupported_handler(note: Note | None) -> None:
    """Set the handler that `unsupported_error` calls; None: no handler."""
    global _note
    _note = note


def unsupported_error(what: str, hint: str) -> MemprofError:
    """Return the error for an unsupported operation at the program's innermost source line."""
    return _make_error(what, hint, "not yet: ")


def invalid_on_cuda_error(what: str, hint: str) -> MemprofError:
    """Return the error for an operation that fails on a GPU as well, with the requested options."""
    return _make_error(what, hint)


def _make_error(what: str, hint: str, prefix: str = "") -> MemprofError:
    line = program_line()
    error = MemprofError(f"{prefix}{line} {what}", hint=hint)
    if _note is not None:
        _note(error.problem, hint, line)
    return error


def program_line() -> str:
    """Return the source line that runs now, as `file:line function`, outside torch and memprof."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_program(frame.f_code):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the program"


class HostOnly(TorchFunctionMode):
    """Mode of code that a real run executes without a GPU: functions that return GPU tensors end the run."""

    def __init__(self, on_gpu: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._on_gpu = on_gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if any(self._on_gpu(tensor) for tensor in find_tensors(result)):
            # Not noted: a forked worker fails so on a GPU too, and a program that catches the error goes on as there.
            raise MemprofError(f"not yet: {program_line()} {IN_WORKER}", hint=no_gpu.HINT)
        return result
