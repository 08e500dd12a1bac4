"""`apply` switches on a list of fixes in a model, or none of them if one fails; `Applied.undo` reverts them."""

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
from memprof.fixes.catalog import check_conflicts, find_fixes, group_options

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
        self._is_active = False
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
        if not self._is_active:
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
        self._is_active = False
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

    def note(self, description: str) -> None:
        """Record the description of a change."""
        self._applied.changes.append(Change(self.fix, description))

    def does_not_apply(self, reason: str, value: object, hint: str | None = None) -> UsageError:
        """Return the error for a fix that cannot be applied to `value`; a module is shown as its class."""
        return self._make_error(f"does not apply: {reason}", value, hint)

    def already_on(self, value: object, hint: str | None = None) -> UsageError:
        """Return the error for a fix that is already on in `value`; a module is shown as its class."""
        return self._make_error("is already on", value, hint)

    def _make_error(self, problem: str, value: object, hint: str | None) -> UsageError:
        displayed = type(value).__name__ if isinstance(value, nn.Module) else value
        return UsageError(f"{self.fix} {problem}", value=displayed, hint=hint)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Record an `action` that `Applied.undo` runs; actions run in reverse order."""
        self._applied._undo.append(action)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set attribute `name` in `vars(owner)`, and record how to restore it."""
        self.set_item(vars(owner), name, value)

    def set_item(self, owner: dict[str, Any], key: str, value: Any) -> None:
        """Set `owner[key]` to `value`, and record how to restore it."""
        if key in owner:
            previous = owner[key]
            self.on_undo(lambda: owner.__setitem__(key, previous))
        else:
            self.on_undo(lambda: owner.pop(key, None))
        owner[key] = value

    def set_data(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Replace the data of `parameter` by `value`; if undoable, keep a copy of the original data in host memory."""
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
        """Replace child `name` of `parent`; if undoable, keep the old child, with its parameters in host memory."""
        applied, previous = self._applied, parent._modules[name]
        assert previous is not None
        if applied._keeps_originals:
            devices = [(parameter, parameter.device) for parameter in previous.parameters(recurse=False)]

            def restore() -> None:
                for parameter, device in devices:
                    parameter.data = parameter.data.to(device)
                parent._modules[name] = previous

            self.on_undo(restore)
            for parameter, _ in devices:
                parameter.data = parameter.data.to("cpu")
        else:
            applied._lost = self.fix
        parent._modules[name] = module

    def result(self, value: Any) -> None:
        """Record the object that the fix returns to the user, such as an optimizer."""
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
    ordered_fixes = find_fixes(fixes)
    options_by_fix = group_options(ordered_fixes, options)
    active_names = {name for applied in _applied.get(model, []) for name in applied.fixes}
    for fix in ordered_fixes:
        if fix.name in active_names:
            raise UsageError("the fix is already on", value=fix.name, hint="undo it before applying it again")
        check_conflicts(fix, active_names)
    applied = Applied(model, [fix.name for fix in ordered_fixes], undoable)
    try:
        for fix in ordered_fixes:
            pkgutil.resolve_name(fix.install)(model, Changes(applied, fix.name), **options_by_fix[fix.name])
    except BaseException:
        applied._roll_back()
        raise
    applied._is_active = True
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


def check_at_least(minimum: int, name: str, value: Any, unit: str = "", hint: str | None = None) -> None:
    """Raise UsageError, with `hint`, unless `value` of the option `name` is an integer of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise UsageError(f"{name} must be at least {minimum}{unit}", value=repr(value), hint=hint)


def check_in_range(name: str, value: Any, maximum: int, explanation: str = "") -> None:
    """Raise UsageError unless option `name` has an integer `value` from 1 to `maximum`; `explanation` ends the hint."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
        raise UsageError(f"{name} is out of range", value=repr(value), hint=f"1 to {maximum:,}{explanation}")


class ReplacedForward:
    """Callable that replaces a module's forward. Not a closure: its deep copy would call the original module."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._forward: Any = module.forward
        functools.update_wrapper(cast(Any, self), self._forward, updated=())


def has_forward(module: nn.Module, kind: type[ReplacedForward]) -> bool:
    """Return whether a `ReplacedForward` of class `kind` is in the chain of replaced forwards of `module`."""
    forward = vars(module).get("forward")
    while forward is not None:
        if isinstance(forward, kind):
            return True
        forward = getattr(forward, "_forward", None)
    return False
