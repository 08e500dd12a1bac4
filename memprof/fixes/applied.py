"""`apply`: switch fixes on in a model, all or none, and take them back."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from memprof.errors import MemprofError, UsageError
from memprof.fixes.catalog import check_conflicts, find_fixes, options_by_fix

# What is switched on in each model, oldest first.
_applied: weakref.WeakKeyDictionary[nn.Module, list[Applied]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Change:
    """One thing that was changed, in words, and the fix that did."""

    fix: str
    what: str

    def __str__(self) -> str:
        return f"{self.fix}: {self.what}"


class Applied:
    """The result of `apply`.

    Its `changes` say it in words; `undo` takes it back; `results` holds what a fix made, by the fix's name (an
    optimizer, the GradScaler of "amp-float16", the step of "micro-batch", the batches of "streamed-batches").
    """

    def __init__(self, model: nn.Module, fixes: Sequence[str], keeps_originals: bool) -> None:
        self._model = weakref.ref(model)
        self._undo: list[Callable[[], None]] = []
        self._keeps_originals = keeps_originals
        self._lost = ""
        self._on = False
        self.fixes = tuple(fixes)
        self.changes: list[Change] = []
        self.results: dict[str, Any] = {}

    def __str__(self) -> str:
        return "\n".join(str(change) for change in self.changes)

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Restore the model. A second call does nothing.

        Where a fix changed parameters themselves (a dtype, the vocabulary) they are as they were when it was
        applied; everywhere else what the model has learned since stays.

        Raises:
            MemprofError: another `apply` came later and is to be undone first, or originals were not kept.
        """
        model = self._model()
        if not self._on:
            return
        # What was changed outside the model outlives it.
        stack = [] if model is None else _applied.get(model, [])
        if stack and stack[-1] is not self:
            hint = "undo what was applied later before this"
            raise MemprofError("fixes are undone last first", value=", ".join(stack[-1].fixes), hint=hint)
        if self._lost:
            raise MemprofError(
                "this cannot be undone: the originals were not kept", value=self._lost, hint="apply(..., undoable=True)"
            )
        self._on = False
        if stack:
            stack.pop()
        if not stack and model is not None:
            _applied.pop(model, None)
        self._roll_back()

    def _roll_back(self) -> None:
        """Undo everything, even where one action fails."""
        with contextlib.ExitStack() as actions:
            for action in self._undo:
                actions.callback(action)  # the last runs first
            self._undo = []


class Changes:
    """The record of an installer: how to take back each thing that it does, before or as it does it."""

    def __init__(self, applied: Applied, fix: str) -> None:
        self._applied = applied
        self.fix = fix

    def note(self, what: str) -> None:
        """Say what was changed."""
        self._applied.changes.append(Change(self.fix, what))

    def does_not_apply(self, why: str, value: object, hint: str | None = None) -> UsageError:
        """Return the error of a fix that cannot be switched on here; of a module, `value` is its class."""
        return self._refused(f"does not apply: {why}", value, hint)

    def already_on(self, value: object, hint: str | None = None) -> UsageError:
        """Return the error of a fix that is on already; of a module, `value` is its class."""
        return self._refused("is already on", value, hint)

    def _refused(self, why: str, value: object, hint: str | None) -> UsageError:
        shown = type(value).__name__ if isinstance(value, nn.Module) else value
        return UsageError(f"{self.fix} {why}", value=shown, hint=hint)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Have `action` run when this is undone; the last recorded runs first."""
        self._applied._undo.append(action)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Give one object an attribute of its own, or another value for it."""
        self.set_item(vars(owner), name, value)

    def set_item(self, owner: dict[str, Any], key: str, value: Any) -> None:
        """Give a dictionary a value, or another one, for a key."""
        if key in owner:
            before = owner[key]
            self.on_undo(lambda: owner.__setitem__(key, before))
        else:
            self.on_undo(lambda: owner.pop(key, None))
        owner[key] = value

    def set_data(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Give a parameter other data. The original waits in host memory if this is to be undone."""
        applied = self._applied
        if applied._keeps_originals:
            device = parameter.device
            original = parameter.detach().to("cpu", copy=True)

            def restore() -> None:
                parameter.grad = None
                parameter.data = original.to(device)

            self.on_undo(restore)
        else:
            applied._lost = self.fix
        parameter.data = value

    def set_module(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Put `module` in the place of a child, which waits, its parameters in host memory, if it is to be undone."""
        applied, before = self._applied, parent._modules[name]
        assert before is not None
        if applied._keeps_originals:
            homes = [(parameter, parameter.device) for parameter in before.parameters(recurse=False)]

            def restore() -> None:
                for parameter, device in homes:
                    parameter.data = parameter.data.to(device)
                parent._modules[name] = before

            self.on_undo(restore)
            for parameter, _ in homes:
                parameter.data = parameter.data.to("cpu")
        else:
            applied._lost = self.fix
        parent._modules[name] = module

    def result(self, value: Any) -> None:
        """Record what the user gets from this fix."""
        self._applied.results[self.fix] = value


def apply(model: nn.Module, fixes: str | Sequence[str], *, undoable: bool = True, **options: Any) -> Applied:
    """Switch `fixes` on in `model`; all of them, or, on an error, none.

    `undo()` of what is returned takes them back. It is a context manager too: leaving the block undoes it.

    Args:
        model: the model, built; on the GPU or on its way there.
        fixes: names, as a list or with commas. `memprof.fixes.catalog.FIXES` has them all.
        undoable: keep in host memory what `undo` needs to restore parameters that are changed themselves.
        options: the fixes' options.

    Raises:
        UsageError: an unknown fix or option, a fix that does not apply to this model, one that is on already, or
            two that do not go together. The model is as before.

    Example:
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        with memprof.apply(layers, ["activation-checkpointing"], modules="0,1") as applied:
            layers(torch.zeros(2, 64)).sum().backward()
            print(applied)
    """
    if not isinstance(model, nn.Module):
        raise UsageError("fixes are applied to a torch.nn.Module", value=type(model).__name__)
    _refuse_wrappers(model)
    chosen = find_fixes(fixes)
    sorted_options = options_by_fix(chosen, options)
    active = {name for applied in _applied.get(model, []) for name in applied.fixes}
    for fix in chosen:
        if fix.name in active:
            raise UsageError("the fix is already on", value=fix.name, hint="undo it before applying it again")
        check_conflicts(fix, active)
    applied = Applied(model, [fix.name for fix in chosen], undoable)
    try:
        for fix in chosen:
            pkgutil.resolve_name(fix.install)(model, Changes(applied, fix.name), **sorted_options[fix.name])
    except BaseException:
        applied._roll_back()
        raise
    applied._on = True
    _applied.setdefault(model, []).append(applied)
    return applied


def _refuse_wrappers(model: nn.Module) -> None:
    if hasattr(model, "_orig_mod"):
        hint = "apply them to the model, then compile it"
        raise UsageError("fixes are applied before torch.compile", value=type(model).__name__, hint=hint)
    if isinstance(model, nn.DataParallel):
        raise UsageError(
            "fixes do not go with torch.nn.DataParallel, whose replicas would run the first GPU's layers",
            value=type(model).__name__,
            hint="use DistributedDataParallel, and apply them to the model before it is wrapped",
        )


def at_least(least: int, name: str, value: Any, unit: str = "", hint: str | None = None) -> None:
    """Check that the option's `value` is a whole number of `least` or more. Raises UsageError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} must be at least {least}{unit}", value=repr(value), hint=hint)


def in_range(name: str, value: Any, most: int, what: str = "") -> None:
    """Raise UsageError unless the option's `value` is a whole number from 1 to `most`, which `what` explains."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UsageError(f"{name} is out of range", value=repr(value), hint=f"1 to {most:,}{what}")


class ReplacedForward:
    """A replacement of a module's forward; an object and no closure, so that a deep copy calls its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._forward: Any = module.forward
        functools.update_wrapper(cast(Any, self), self._forward, updated=())


def runs_in(module: nn.Module, kind: type[ReplacedForward]) -> bool:
    """Return whether a forward of class `kind` replaces the module's own, here or in what it was copied from."""
    forward = vars(module).get("forward")
    while forward is not None:
        if isinstance(forward, kind):
            return True
        forward = getattr(forward, "_forward", None)
    return False
