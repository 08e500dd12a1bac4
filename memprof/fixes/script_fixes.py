"""Fixes that `memprof run --fix` switches on in an unchanged script.

The fixes are applied to each model at its first forward with gradients. By then an optimizer has the model's
parameters, so that only fixes that do not replace parameters can be applied.
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
    """A list of fixes, each NAME or NAME=VALUE, to switch on in the models of a script.
    Raises UsageError: an unknown fix, or a fix that only code in the script can apply."""

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
        # The settings to add to the allocator's.
        self.alloc_conf = ",".join(chosen.fix.alloc_conf for chosen in self._fixes if chosen.fix.alloc_conf)
        self._in_models = [chosen for chosen in self._fixes if not chosen.fix.alloc_conf]
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.changes: list[str] = []  # descriptions of the changes

    def before_forward(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Apply the fixes to `model` at its first outermost call with gradients; `optimizers` are the script's.
        Raises UsageError: a fix does not apply to `model`."""
        if not self._in_models or model in self._seen or not torch.is_grad_enabled():
            return
        self._seen.add(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        names = [chosen.fix.name for chosen in self._in_models]
        options = apply_options(self._in_models)
        for fix in (chosen.fix for chosen in self._in_models):
            if "optimizer" in fix.options:
                options["optimizer"] = _find_optimizer(model, optimizers, fix)
        # The model below the wrapper of DistributedDataParallel.
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        applied = apply(inner, names, undoable=False, **options)
        self.changes += map(str, applied.changes)


def _find_optimizer(model: nn.Module, optimizers: Iterable[Optimizer], fix: Fix) -> Optimizer:
    """Return the optimizer that trains `model`. Raises UsageError: `model` has no optimizer yet."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return optimizer
    raise UsageError(
        f"{fix.name} does not apply: the model is called before it has an optimizer", value=type(model).__name__
    )
