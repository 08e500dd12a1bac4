"""Fixes that `memprof run --fix` switches on in an unchanged script.

The fixes are applied to each model at its first forward with gradients. By then an optimizer has the model's
parameters, so only fixes that do not replace parameters can be applied. Where there is no optimizer, a program that
only computes is given those that are not for training alone at its first forward without gradients.
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
from memprof.fixes.chosen import ChosenFix, make_apply_options, parse_fixes


class ScriptFixes:
    """List of fixes, each NAME or NAME=VALUE, to switch on in the models of a script.
    Raises UsageError for an unknown fix, or one that only code in the script can apply."""

    def __init__(self, fixes: Sequence[str]) -> None:
        self._fixes: list[ChosenFix] = parse_fixes(",".join(fixes)) if fixes else []
        for chosen_fix in self._fixes:
            if chosen_fix.fix.script_order is None:
                raise UsageError(
                    "this fix cannot be switched on from outside a script",
                    value=chosen_fix.fix.name,
                    hint="it changes parameters or the optimizer: write memprof.apply(model, ...) in the script; from "
                    f"outside there are {', '.join(script_fix_names())}",
                )
        # The settings to add to the allocator's.
        self.alloc_conf = ",".join(chosen_fix.fix.alloc_conf for chosen_fix in self._fixes if chosen_fix.fix.alloc_conf)
        self._model_fixes = [chosen_fix for chosen_fix in self._fixes if not chosen_fix.fix.alloc_conf]
        self._seen_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inference_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.changes: list[str] = []  # descriptions of the changes

    def before_forward(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Apply the fixes to `model`, unless done already; `optimizers` are all of the script's. Without gradients only
        where there are no optimizers, and not those for training alone.
        Raises UsageError if a fix does not apply to `model`."""
        fixes = self._model_fixes
        if not fixes or model in self._seen_models:
            return
        if not torch.is_grad_enabled():
            fixes = [chosen_fix for chosen_fix in fixes if not chosen_fix.fix.training_only]
            if not fixes or model in self._inference_models or any(True for _ in optimizers):
                return
            self._inference_models.add(model)
        else:
            self._seen_models.add(model)
            if model in self._inference_models:
                fixes = [chosen_fix for chosen_fix in fixes if chosen_fix.fix.training_only]
            if not fixes or not any(parameter.requires_grad for parameter in model.parameters()):
                return
        names = [chosen_fix.fix.name for chosen_fix in fixes]
        options = make_apply_options(fixes)
        for fix in (chosen_fix.fix for chosen_fix in fixes):
            if "optimizer" in fix.options:
                options["optimizer"] = _find_optimizer(model, optimizers, fix)
        # The model below the wrapper of DistributedDataParallel.
        unwrapped = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        applied = apply(unwrapped, names, undoable=False, **options)
        self.changes += map(str, applied.changes)


def _find_optimizer(model: nn.Module, optimizers: Iterable[Optimizer], fix: Fix) -> Optimizer:
    """Return the one of `optimizers` that has parameters of `model`; raise UsageError if there is none."""
    parameter_ids = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if any(id(parameter) in parameter_ids for group in optimizer.param_groups for parameter in group["params"]):
            return optimizer
    raise UsageError(
        f"{fix.name} does not apply: the model is called before it has an optimizer", value=type(model).__name__
    )
