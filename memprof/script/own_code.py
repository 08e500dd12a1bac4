"""Search in a program's own code for what a run may not reach: an evaluation, if it is stopped after some training
steps, and training, if memory runs out in its first call of a model."""

from __future__ import annotations

import linecache
import re
import sys
import tokenize
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from memprof.script import program
from memprof.watch.program_code import is_own_file, is_program

# Calls by which training code evaluates: `model.eval()`, `trainer.evaluate()`, `run_validation(...)`; and what trainers
# of libraries are given or define for it.
_EVALUATION = re.compile(
    r"\.eval\(\)|\binference_mode\b|\b(?:eval|valid)_\w+\("
    r"|\b(?:\w+_)?(?:evaluate|evaluation|validate|validation)(?:_\w+)?\("
    r"|\beval_dataset\b|\beval_strategy\b|\bval_dataloaders?\b"
)


# Names in code that trains: without any of them nothing is trained by the program's own code.
_TRAINING = re.compile(r"\w*backward\w*|grad|\w*[oO]ptim\w*|\w*Trainer|fit|[tT]rain(?:ing|_\w+)?|\w*loss\w*")


# Names in functions that train, also in those of libraries, whose models have a loss and ask whether they are trained.
_TRAINING_CALL = re.compile(r"\w*backward\w*|\w*[oO]ptim\w*|_?fit(?:_\w+)?|train|train_\w+|training_\w+|zero_grad")


def has_evaluation(frame: FrameType | None) -> bool:
    """Return whether the program that runs `frame` has code of its own that evaluates."""
    frames = []
    while frame is not None and frame.f_code.co_filename != program.__file__:  # what runs the program is not its own
        frames.append(frame)
        frame = frame.f_back
    files = _list_own_files(frame.f_code.co_filename for frame in reversed(frames))
    return any(_EVALUATION.search("".join(linecache.getlines(file))) for file in files)


def may_train(error: BaseException) -> bool:
    """Return whether the program that raised `error` may train: its own code has a name of it, or cannot be read; or
    a function of a library that was running has."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = {name for code in codes if is_program(code) for name in (code.co_name, *code.co_names)}
    if any(map(_TRAINING_CALL.fullmatch, called)):
        return True
    names = [_list_names(file) for file in _list_own_files(code.co_filename for code in codes)]
    return not names or any(not own or any(map(_TRAINING.fullmatch, own)) for own in names)


def _list_own_files(running: Iterable[str]) -> set[str]:
    """Return the files of the program's own code: of the `running` ones, outermost first, and of modules of its own,
    which lie in the folder of its main file or below."""
    files = [file for file in running if is_own_file(file)]
    if not files:
        return set()
    folder = Path(files[0]).resolve().parent
    modules = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {*files, *(f for f in modules if f and is_own_file(f) and Path(f).is_relative_to(folder))}


def _list_names(file: str) -> set[str]:
    """Return the names in a file of Python code, without comments and strings; none if it cannot be read."""
    lines = iter(linecache.getlines(file))
    try:
        return {
            token.string for token in tokenize.generate_tokens(lambda: next(lines, "")) if token.type == tokenize.NAME
        }
    except (tokenize.TokenError, SyntaxError):
        return set()
