"""Fixes switched on in a program that knows nothing of them: `memprof run --fix`.

They are applied to each model when it is first called to be trained. By then its optimizer has its parameters, so that
only those fixes can be switched on that leave the parameters alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.errors import UsageError
from memprof.fixes.applied import apply
from memprof.fixes.catalog import Fix, script_fix_names
from memprof.fixes.chosen import ChosenFix, apply_options, parse_fixes


class ScriptFixes:
    """Switches `fixes`, as NAME or NAME=VALUE, on in the models of a program.
    Raises UsageError: an unknown fix, or one that cannot be switched on from outside."""

    def __init__(self, fixes: Sequence[str]) -> None:
        self._fixes: list[ChosenFix] = parse_fixes(",".join(fixes)) if fixes else []
        for chosen in self._fixes:
            if chosen.fix.outside is None:
                raise UsageError(
                    "this fix cannot be switched on from outside a script",
                    value=chosen.fix.name,
                    hint="it changes parameters or the optimizer: write memprof.apply(model, ...) in the script; from "
                    f"outside there are {', '.join(script_fix_names())}",
                )
        # What is to be added to the allocator's settings.
        self.alloc_conf = ",".join(chosen.fix.alloc_conf for chosen in self._fixes if chosen.fix.alloc_conf)
        self._in_models = [chosen for chosen in self._fixes if not chosen.fix.alloc_conf]
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.changes: list[str] = []  # what was changed, in words

    def before_forward(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """`model` is about to be called from outside all others; `optimizers` are the program's.
        Raises UsageError: a fix does not apply to it."""
        if not self._in_models or model in self._seen or not torch.is_grad_enabled():
            return
        self._seen.add(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        names = [chosen.fix.name for chosen in self._in_models]
        options = apply_options(self._in_models)
        for fix in (chosen.fix for chosen in self._in_models):
            if "optimizer" in fix.options:
                options["optimizer"] = _optimizer_of(model, optimizers, fix)
        # Below the wrapper of a model that runs in more than one process.
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        applied = apply(inner, names, undoable=False, **options)
        self.changes += map(str, applied.changes)


def _optimizer_of(model: nn.Module, optimizers: Iterable[Optimizer], fix: Fix) -> Optimizer:
    """Return the optimizer that trains `model`. Raises UsageError: there is none yet."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return optimizer
    raise UsageError(
        f"{fix.name} does not apply: the model is called before it has an optimizer", value=type(model).__name__
    )
