"""`apply`: apply a list of fixes to a model, all of them or, if one fails, none; `Applied.undo` reverts them."""

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

# The fixes that are on in each model, oldest first.
_applied: weakref.WeakKeyDictionary[nn.Module, list[Applied]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Change:
    """The description of one change (`what`), and the name of the fix that made it."""

    fix: str
    what: str

    def __str__(self) -> str:
        return f"{self.fix}: {self.what}"


class Applied:
    """The result of `apply`.

    `changes` describes the changes; `undo` reverts them; `results` maps a fix's name to the object that the fix made
    (an optimizer, the GradScaler of "amp-float16", the step of "micro-batch", the batches of "streamed-batches").
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

        Parameters whose data a fix replaced (a dtype, the vocabulary) get the data from before the fix; all other
        parameters keep their trained values.

        Raises:
            MemprofError: a later `apply` must be undone first, or the original parameters were not kept.
        """
        model = self._model()
        if not self._on:
            return
        # Changes outside the model outlive the model.
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
        """Run all undo actions, even if one of them fails."""
        with contextlib.ExitStack() as actions:
            for action in self._undo:
                actions.callback(action)  # the last runs first
            self._undo = []


class Changes:
    """The record of the changes that one fix makes, with the action that undoes each."""

    def __init__(self, applied: Applied, fix: str) -> None:
        self._applied = applied
        self.fix = fix

    def note(self, what: str) -> None:
        """Record the description of a change."""
        self._applied.changes.append(Change(self.fix, what))

    def does_not_apply(self, why: str, value: object, hint: str | None = None) -> UsageError:
        """Return the error for a fix that cannot be applied to `value`; a module is shown as its class."""
        return self._make_error(f"does not apply: {why}", value, hint)

    def already_on(self, value: object, hint: str | None = None) -> UsageError:
        """Return the error for a fix that is already on in `value`; a module is shown as its class."""
        return self._make_error("is already on", value, hint)

    def _make_error(self, why: str, value: object, hint: str | None) -> UsageError:
        shown = type(value).__name__ if isinstance(value, nn.Module) else value
        return UsageError(f"{self.fix} {why}", value=shown, hint=hint)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Record an action that `Applied.undo` runs; the action recorded last runs first."""
        self._applied._undo.append(action)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute in the `vars` of an object."""
        self.set_item(vars(owner), name, value)

    def set_item(self, owner: dict[str, Any], key: str, value: Any) -> None:
        """Set the value of a key in a dictionary."""
        if key in owner:
            before = owner[key]
            self.on_undo(lambda: owner.__setitem__(key, before))
        else:
            self.on_undo(lambda: owner.pop(key, None))
        owner[key] = value

    def set_data(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Replace the data of a parameter. If the fix is undoable, host memory keeps a copy of the original data."""
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
        """Replace a child module. If the fix is undoable, the old child is kept, with its parameters in host memory."""
        applied, before = self._applied, parent._modules[name]
        assert before is not None
        if applied._keeps_originals:
            devices = [(parameter, parameter.device) for parameter in before.parameters(recurse=False)]

            def restore() -> None:
                for parameter, device in devices:
                    parameter.data = parameter.data.to(device)
                parent._modules[name] = before

            self.on_undo(restore)
            for parameter, _ in devices:
                parameter.data = parameter.data.to("cpu")
        else:
            applied._lost = self.fix
        parent._modules[name] = module

    def result(self, value: Any) -> None:
        """Record the object that the fix returns to the user."""
        self._applied.results[self.fix] = value


def apply(model: nn.Module, fixes: str | Sequence[str], *, undoable: bool = True, **options: Any) -> Applied:
    """Switch on all `fixes` in `model`, or, on an error, none.

    `undo()` of the returned object reverts the fixes. Used as a context manager, the object undoes them at exit.

    Args:
        model: the model, built; in GPU memory or in host memory.
        fixes: names of fixes, as a list or separated by commas; `memprof.fixes.catalog.FIXES` has all names.
        undoable: whether to keep copies of replaced parameters in host memory, which `undo` needs.
        options: the options of the fixes.

    Raises:
        UsageError: an unknown fix or option, a fix that does not apply to this model or is already on, or two fixes
            that conflict. The model is unchanged.

    Example:
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        with memprof.apply(layers, ["activation-checkpointing"], modules="0,1") as applied:
            layers(torch.zeros(2, 64)).sum().backward()
            print(applied)
    """
    if not isinstance(model, nn.Module):
        raise UsageError("fixes are applied to a torch.nn.Module", value=type(model).__name__)
    _reject_wrappers(model)
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


def _reject_wrappers(model: nn.Module) -> None:
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
    """Raise UsageError unless the value of the option `name` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} must be at least {least}{unit}", value=repr(value), hint=hint)


def in_range(name: str, value: Any, most: int, what: str = "") -> None:
    """Raise UsageError unless the value of the option `name` is an integer from 1 to `most`; `what` explains `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UsageError(f"{name} is out of range", value=repr(value), hint=f"1 to {most:,}{what}")


class ReplacedForward:
    """A replacement for a module's forward: an object, because a deep copy of a closure would call the original's."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._forward: Any = module.forward
        functools.update_wrapper(cast(Any, self), self._forward, updated=())


def runs_in(module: nn.Module, kind: type[ReplacedForward]) -> bool:
    """Return whether a `ReplacedForward` of class `kind` is in the chain of replaced forwards of `module`."""
    forward = vars(module).get("forward")
    while forward is not None:
        if isinstance(forward, kind):
            return True
        forward = getattr(forward, "_forward", None)
    return False
