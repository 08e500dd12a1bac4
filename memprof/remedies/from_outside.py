"""Remedies switched on in a program that knows nothing of them: `memprof run --fix`.

They are applied to each model when it is first called to be trained. By then its optimizer has its parameters, so that
only those remedies can be switched on that leave the parameters alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.errors import UsageError
from memprof.remedies.applied import apply
from memprof.remedies.catalog import Remedy, from_outside
from memprof.remedies.fixes import Fix, options_of, parse_fixes


class Switch:
    """Switches `fixes`, as NAME or NAME=VALUE, on in the models of a program.
    Raises UsageError: an unknown remedy, or one that cannot be switched on from outside."""

    def __init__(self, fixes: Sequence[str]) -> None:
        self._fixes: list[Fix] = parse_fixes(",".join(fixes)) if fixes else []
        for fix in self._fixes:
            if fix.remedy.outside is None:
                raise UsageError(
                    "this remedy cannot be switched on from outside a script",
                    value=fix.remedy.name,
                    hint="it changes parameters or the optimizer: write memprof.apply(model, ...) in the script; from "
                    f"outside there are {', '.join(from_outside())}",
                )
        # What is to be added to the allocator's settings.
        self.alloc_conf = ",".join(fix.remedy.alloc_conf for fix in self._fixes if fix.remedy.alloc_conf)
        self._in_models = [fix for fix in self._fixes if not fix.remedy.alloc_conf]
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.changes: list[str] = []  # what was changed, in words

    def before_forward(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """`model` is about to be called from outside all others; `optimizers` are the program's.
        Raises UsageError: a remedy does not apply to it."""
        if not self._in_models or model in self._seen or not torch.is_grad_enabled():
            return
        self._seen.add(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        names = [fix.remedy.name for fix in self._in_models]
        options = options_of(self._in_models)
        for remedy in (fix.remedy for fix in self._in_models):
            if "optimizer" in remedy.options:
                options["optimizer"] = _optimizer_of(model, optimizers, remedy)
        # Below the wrapper of a model that runs in more than one process.
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        applied = apply(inner, names, undoable=False, **options)
        self.changes += map(str, applied.changes)


def _optimizer_of(model: nn.Module, optimizers: Iterable[Optimizer], remedy: Remedy) -> Optimizer:
    """The one that trains `model`. Raises UsageError: there is none yet."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return optimizer
    raise UsageError(
        f"{remedy.name} does not apply: the model is called before it has an optimizer", value=type(model).__name__
    )
