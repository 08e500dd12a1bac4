"""In a process that a program on the virtual GPU has started: there is a GPU, and nobody can use it.

The process knows nothing of the virtual GPU. On a machine without a GPU it would choose the CPU and do for real,
unseen, what the program does on the GPU; on a machine with one it would use that. So it is told that there is a GPU,
as it would be, and its first use is an error, which is told to the run that started it. A process that leaves CUDA
alone is none the wiser. This stands alone, as sitecustomize.py does.
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
    "have the other process make host tensors, and move them to the GPU in the process that trains; a program of its "
    "own is run by itself: memprof run PROGRAM"
)


def refuse(cuda: "Any", file: str, error: "Callable[[str], Exception]" = RuntimeError) -> None:
    """Have `torch.cuda` (`cuda`) show a GPU, and raise `error` where it is used, as long as the run's `file` is there.

    `error` makes the error, of what it is to say.
    """
    bindings = sys.modules["torch"]._C

    def unless_over(name: str, value: "Any", owner: "Any" = cuda) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, lambda: value() if os.path.exists(file) else original())

    def use() -> None:
        problem = f"not yet: {_line()} {WHAT}"
        report_refusal(file, problem, HINT)
        raise error(problem)

    # What Python and C++ both call before they touch the GPU.
    unless_over("_lazy_init", use)
    unless_over("is_available", lambda: True)
    unless_over("device_count", lambda: 1)
    unless_over("is_initialized", lambda: False)
    unless_over("_accelerator_getAccelerator", lambda: bindings.device("cuda"), bindings)


def report_refusal(file: str, problem: str, hint: "str | None") -> None:
    """Tell the run that this process was refused something."""
    try:
        # Not with "a", which would make the file of a run that is over.
        opened = os.open(file, os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    try:
        os.write(opened, json.dumps([problem, hint]).encode() + b"\n")
    finally:
        os.close(opened)


def _line() -> str:
    """The line that runs now: `file:line function`, outside torch and memprof."""
    torch = os.path.dirname(sys.modules["torch"].__file__ or "")
    memprof = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((torch, memprof, "<frozen")):
            return f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "the program"
