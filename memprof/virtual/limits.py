"""Errors for operations that the virtual GPU does not support, with the program's source line."""

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

CUDA_IN_WORKER = "uses CUDA in a worker process of a DataLoader"
SEND_NUMBERS_HINT = "send numbers (`.item()`, `.tolist()`) or shapes instead"
# Called with the problem, the hint and the source line of an unsupported operation.
UnsupportedHandler = Callable[[str, str | None, str | None], None]
_handler: UnsupportedHandler | None = None


def set_unsupported_handler(handler: UnsupportedHandler | None) -> None:
    """Set the handler that `unsupported_error` calls; None: no handler."""
    global _handler
    _handler = handler


def unsupported_error(problem: str, hint: str) -> MemprofError:
    """Return the error for an unsupported operation, with the program's innermost source line; call the handler."""
    return _make_error(problem, hint, "not yet: ")


def invalid_on_cuda_error(problem: str, hint: str) -> MemprofError:
    """Return the error for an operation that fails on a real GPU as well; call the handler."""
    return _make_error(problem, hint)


def _make_error(problem: str, hint: str, prefix: str = "") -> MemprofError:
    line = find_program_line()
    error = MemprofError(f"{prefix}{line} {problem}", hint=hint)
    if _handler is not None:
        _handler(error.problem, hint, line)
    return error


def find_program_line() -> str:
    """Return the program's line that runs now, outside torch and memprof, as `file:line function`."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_program(frame.f_code):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the program"


class HostOnlyMode(TorchFunctionMode):
    """Mode for code that a real run executes without a GPU; functions that return GPU tensors raise MemprofError."""

    def __init__(self, is_on_gpu: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._is_on_gpu = is_on_gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if any(self._is_on_gpu(tensor) for tensor in find_tensors(result)):
            # Not noted: a forked worker fails so on a GPU too, and a program that catches the error goes on as there.
            raise MemprofError(f"not yet: {find_program_line()} {CUDA_IN_WORKER}", hint=no_gpu.HINT)
        return result
