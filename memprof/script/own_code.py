"""Search in a program's own code for what a run may not reach: an evaluation, or parameters that are unfrozen, if it is
stopped after some training steps; and training, if memory runs out in its first call of a model, or as an engine is
ready."""

from __future__ import annotations

import ast
import itertools
import linecache
import re
import sys
import tokenize
import traceback
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import FrameType

from memprof.script.loops import find_position, list_frames, list_loop_texts, list_periods, list_texts_after_loops
from memprof.watch.program_code import is_own_file, is_program

# Calls by which training code evaluates: `model.eval()` (but no `net = make().eval()`, as of a frozen model),
# `trainer.evaluate()`, `run_validation(...)`; and what trainers of libraries are given or define for it. (Trainer of
# transformers evaluates a data set only by a strategy.)
_EVALUATION = re.compile(
    r"(?m:^)(?:[^=!<>#\n]|[=!<>]=)*\.eval\(\)|\binference_mode\b|\b(?:eval|valid)_\w+\("
    r"|\b(?:\w+_)?(?:evaluate|evaluation|validate|validation)(?:_\w+)?\("
    r"|\beval_strategy\b(?!['\"]?\s*[=:]\s*['\"]no['\"])|\bval_dataloaders?\b"
)


# Calls that move something to a GPU.
_MOVING = re.compile(r"\.(?:to|cuda)\(")


# Statements by which a training loop unfreezes parameters: of a loop over them, of a module, or by a function's name.
_UNFREEZING = re.compile(
    r"parameters\(.*\n?.*\brequires_grad(?: = True\b|_\((?:True)?\))"
    r"|\brequires_grad_\((?:True)?\) for \w+ in .*parameters\("
    r"|\w*(?:model|net|backbone|encoder|decoder|layer|module|block|head)\w*(?:\[[^]]*\])?\.requires_grad_\((?:True)?\)"
    r"|\bunfreeze\w*\(|\bset_requires_grad\(.*\bTrue\b"
)


# Names in code that trains: without any of them nothing is trained by the program's own code.
_TRAINING = re.compile(r"\w*backward\w*|grad|\w*[oO]ptim\w*|\w*Trainer|fit|[tT]rain(?:ing|_\w+)?|\w*loss\w*")


# Names in functions that train, also in those of libraries, whose models have a loss and ask whether they are trained.
_TRAINING_CALL = re.compile(r"\w*backward\w*|\w*[oO]ptim\w*|_?fit(?:_\w+)?|train|train_\w+|training_\w+|zero_grad")


_WORDS = (tokenize.NAME, tokenize.OP)


def has_evaluation(frame: FrameType | None) -> bool:
    """Return whether the program that runs `frame` has code of its own that evaluates."""
    return any(_EVALUATION.search("".join(linecache.getlines(file))) for file in _list_running_files(frame))


def has_later_evaluation(frame: FrameType | None) -> bool:
    """Return whether a line after the loops that `frame` is in evaluates what it moves to a GPU: more than before may
    lie there then."""
    lines = (line for text in list_texts_after_loops(frame) for line in text.splitlines())
    return any(_EVALUATION.search(line) and _MOVING.search(line) for line in lines)


def find_evaluation_step(frame: FrameType, completed: int) -> int | None:
    """Return the training step after which the program that runs `frame`, which has made `completed` steps, evaluates:
    every so many of them (`if step % 1000 == 0`), else after the innermost of several loops; None: not known."""
    periods = [period for period in list_periods(frame, _EVALUATION) if period > completed]
    loops = find_position(completed, frame).loops
    if not periods and len(loops) > 1 and loops[-1].bounds:
        bound = loops[-1].bounds[0]
        periods = [bound.total] if bound.total is not None and not bound.is_counter else []
    return min((period for period in periods if period > completed), default=None)


def has_training(frame: FrameType | None) -> bool:
    """Return whether the program that runs `frame` has code of its own that trains."""
    return any(map(_TRAINING.fullmatch, itertools.chain(*map(_list_names, _list_running_files(frame)))))


def has_unfreezing(frame: FrameType | None) -> bool:
    """Return whether the loops that `frame` is in unfreeze parameters, or call a function of the program that does."""
    text = "".join(list_loop_texts(frame))
    if _UNFREEZING.search(text):
        return True
    # Not a function that is running: it has come to its loop already, and `model.train()` does not call `train`.
    running = {caller.f_code.co_name for caller in list_frames(frame)}
    called = {*re.findall(r"\b(\w+)\(", text)} - running
    return any(_UNFREEZING.search(body) for body in _list_functions(_list_running_files(frame), called))


def _list_functions(files: Iterable[str], names: Collection[str]) -> Iterator[str]:
    """Yield the source text of the functions of `files` that have one of `names`."""
    for file in files:
        lines = linecache.getlines(file)
        try:
            tree = ast.parse("".join(lines))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name in names:
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def may_train(error: BaseException) -> bool:
    """Return whether the program that raised `error` may train: its own code has a name of it, or cannot be read; or
    a function of a library that was running has."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    libraries = [code for code in codes if is_program(code) and not is_own_file(code.co_filename)]
    called = {name for code in libraries for name in (code.co_name, *code.co_names)}
    if any(map(_TRAINING_CALL.fullmatch, called)):
        return True
    names = [_list_names(file) for file in _list_own_files(code.co_filename for code in codes)]
    return not names or any(not own or any(map(_TRAINING.fullmatch, own)) for own in names)


def _list_running_files(frame: FrameType | None) -> set[str]:
    """Return the files of the own code of the program that runs `frame`."""
    running = [caller.f_code.co_filename for caller in list_frames(frame)]
    return _list_own_files(reversed(running))


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
    """Return the names in a file of Python code, without comments and strings; none if it cannot be read.

    Without those that models have that are not trained: `training` as an attribute or argument, `.train(False)`.
    """
    lines = iter(linecache.getlines(file))
    try:
        tokens = [token.string for token in tokenize.generate_tokens(lambda: next(lines, "")) if token.type in _WORDS]
    except (tokenize.TokenError, SyntaxError):
        return set()
    padded = ["", *tokens, "", ""]
    return {
        word
        for before, word, after, last in zip(padded, padded[1:], padded[2:], padded[3:], strict=False)
        if word.isidentifier()
        and not (word == "training" and (before == "." or after == "="))
        and not (word == "train" and (after, last) == ("(", "False"))
    }
