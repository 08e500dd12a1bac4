"""Search for an evaluation in a program's code, which a run that is stopped after some training steps may not reach."""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path
from types import FrameType

from memprof.script import program
from memprof.watch.program_code import is_own_file

# Calls by which training code evaluates: `model.eval()`, `trainer.evaluate()`, `run_validation(...)`; and what trainers
# of libraries are given or define for it.
_EVALUATION = re.compile(
    r"\.eval\(\)|\binference_mode\b|\b(?:eval|valid)_\w+\("
    r"|\b(?:\w+_)?(?:evaluate|evaluation|validate|validation)(?:_\w+)?\("
    r"|\beval_dataset\b|\beval_strategy\b|\bval_dataloaders?\b"
)


def has_evaluation(frame: FrameType | None) -> bool:
    """Return whether the program that runs `frame` has code that evaluates: in the files of `frame` and its callers, or
    in modules of its own, which lie in the folder of its main file or below."""
    files = set()
    main_file = None
    while frame is not None and frame.f_code.co_filename != program.__file__:  # what runs the program is not its own
        if is_own_file(frame.f_code.co_filename):
            main_file = frame.f_code.co_filename  # that of the outermost frame, at the end
            files.add(main_file)
        frame = frame.f_back
    if main_file is not None:
        folder = Path(main_file).resolve().parent
        modules = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        files |= {file for file in modules if file and is_own_file(file) and Path(file).is_relative_to(folder)}
    return any(_EVALUATION.search("".join(linecache.getlines(file))) for file in files)
