"""Errors on CUDA use in a process that a program on the virtual GPU has started.

Such a process has no virtual GPU. On a machine without a GPU the process would use the CPU, unseen, for work that
belongs on the GPU; on a machine with a GPU, that GPU. So torch.cuda reports a GPU, and the first use of CUDA raises an
error, which is reported to the run. A process that does not use CUDA is unaffected. Like sitecustomize.py, this file
imports nothing of memprof.
"""

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WHAT = "uses CUDA in another process"
HINT = (
    "have the other process make host tensors, and move them to the GPU in the process that trains; start ranks by "
    "torchrun or torch.multiprocessing.spawn; a program of its own is run by itself: memprof run PROGRAM"
)


def refuse(cuda: "Any", file: str, make_error: "Callable[[str], Exception]" = RuntimeError) -> None:
    """Patch `cuda` (torch.cuda) to report a GPU, and to raise `make_error` on use, as long as the run's `file` exists.

    `make_error` returns the exception for a message.
    """
    torch_c = sys.modules["torch"]._C

    def patch_during_run(name: str, get_value: "Any", owner: "Any" = cuda) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, lambda *args: get_value() if os.path.exists(file) else original(*args))

    def refuse_use() -> None:
        problem = f"not yet: {_find_program_line()} {WHAT}"
        report_refusal(file, problem, HINT)
        raise make_error(problem)

    # Functions that Python and C++ call before any GPU use; the others do not initialize CUDA.
    for name in ("_lazy_init", "set_device", "_exchange_device"):
        patch_during_run(name, refuse_use)
    patch_during_run("is_available", lambda: True)
    patch_during_run("device_count", lambda: 1)
    patch_during_run("is_initialized", lambda: False)
    patch_during_run("_accelerator_getAccelerator", lambda: torch_c.device("cuda"), torch_c)


def report_refusal(file: str, problem: str, hint: "str | None") -> None:
    """Append to the run's `file` that this process had an unsupported operation; do nothing without the file."""
    try:
        # Not with "a", which would create the file after the run's end.
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    try:
        os.write(descriptor, json.dumps([problem, hint]).encode() + b"\n")
    finally:
        os.close(descriptor)


def _find_program_line() -> str:
    """Return `file:line function` of the line that runs now, outside torch and memprof."""
    torch = os.path.dirname(sys.modules["torch"].__file__ or "")
    memprof = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((torch, memprof, "<frozen")):
            return f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "the program"
