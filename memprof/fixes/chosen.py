"""Fixes as edits of the spec, for `--fix`.

Fixes that change a setting (a dtype, the batch size, the allocator's configuration) replace fields of the spec. Other
fixes change the model, as `memprof.apply` does: the spec lists them in `fixes`, and the workload applies them to the
model that it has built.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memprof.errors import UsageError
from memprof.fixes import catalog
from memprof.fixes.spec_edits import make_error
from memprof.spec import Mode, TargetSpec

_NUMERICS = list(catalog.Numerics)


@dataclass(frozen=True)
class ChosenFix:
    """A fix, and the value of its main option if one was given ("chunked-loss=2048")."""

    fix: catalog.Fix
    value: str | None = None

    def __str__(self) -> str:
        return self.fix.name if self.value is None else f"{self.fix.name}={self.value}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled by name: an entry of the table has views of mappings, which cannot be pickled.
        return _make_chosen_fix, (self.fix.name, self.value)


def _make_chosen_fix(name: str, value: str | None) -> ChosenFix:
    return ChosenFix(catalog.ALL_FIXES[name], value)


def parse_fixes(text: str, known_fixes: Mapping[str, catalog.Fix] = catalog.FIXES) -> list[ChosenFix]:
    """Return the fixes in `text`, such as "chunked-loss=2048,activation-checkpointing", in the same order.

    `known_fixes` maps names to fixes: FIXES, or ALL_FIXES, which has those for several GPUs too. Raises UsageError for
    an unknown or repeated fix, fixes that conflict, or a value that a fix does not take.
    """
    fixes = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, separator, value = part.partition("=")
        if "+" in name:
            hint = f"write {part.replace('+', ',')}"
            raise UsageError("names of fixes have commas between them", value=repr(part), hint=hint)
        (fix,) = catalog.find_fixes([name.strip()], known_fixes)
        if separator:
            _parse_value(fix, value.strip())
        fixes.append(ChosenFix(fix, value.strip() if separator else None))
    catalog.find_fixes([chosen.fix.name for chosen in fixes], known_fixes)
    return fixes


def _parse_value(fix: catalog.Fix, value: str) -> int | str | None:
    """Return `value` parsed as the main option of `fix`; None if `value` is a key of `fix.named_values`."""
    option = fix.main_option
    if value in fix.named_values:
        return None
    if not option:
        raise UsageError("this fix takes no value", value=f"{fix.name}={value}", hint=f"write {fix.name}")
    if fix.main_type is str:
        return value.replace("+", ",")  # commas separate fixes
    try:
        return int(value.replace(",", "").replace("_", ""))
    except ValueError:
        problem = " or ".join([f"{fix.name} takes a whole number", *fix.named_values])
        raise UsageError(problem, value=repr(value), hint=f"{option}: {fix.options[option]}") from None


def make_apply_options(fixes: Sequence[ChosenFix]) -> dict[str, Any]:
    """Return keyword arguments for `memprof.apply` that set the values of the chosen fixes."""
    options: dict[str, Any] = {}
    for chosen_fix in fixes:
        if chosen_fix.value is not None:
            known = chosen_fix.fix.named_values.get(chosen_fix.value)
            options.update(
                {chosen_fix.fix.main_option: _parse_value(chosen_fix.fix, chosen_fix.value)} if known is None else known
            )
    return options


def combine_numerics(fixes: Sequence[str]) -> catalog.Numerics:
    """Return the strongest effect on numeric results among the fixes named in `fixes`."""
    return max(
        (catalog.ALL_FIXES[name].numerics for name in fixes), key=_NUMERICS.index, default=catalog.Numerics.EXACT
    )


def check_fix(spec: TargetSpec, chosen: ChosenFix) -> None:
    """Raise UsageError if the fix is on in `spec` already, conflicts with a fix that is on, has no effect in this mode,
    or lacks its value: what is known before a run."""
    fix = chosen.fix
    # A fix that does nothing in this mode gets no other error.
    for active_name in [] if fix.training_only and spec.mode is Mode.INFERENCE else catalog.list_active_fixes(spec):
        if active_name == fix.name:
            raise UsageError("the fix is already on", value=fix.name, hint="leave it out")
        catalog.check_conflicts(fix, {active_name})
    if (reason := catalog.find_useless_reason(fix, spec)) is not None:
        raise make_error(fix, *reason)
    if fix.main_option in fix.required and chosen.value is None:
        hint = f"write {fix.name}=VALUE: {fix.options[fix.main_option]}"
        raise UsageError(f"{fix.name} needs a value", value=fix.name, hint=hint)


def edit_spec(spec: TargetSpec, chosen: ChosenFix, target: Mapping[str, Any]) -> TargetSpec:
    """Return `spec` with the chosen fix on; `target` has facts about the baseline run's model, such as its dtype.

    Raises UsageError as `check_fix`. Errors that depend on the built model are raised when the fix is applied to the
    model.
    """
    check_fix(spec, chosen)
    fix = chosen.fix
    value = None if chosen.value is None else _parse_value(fix, chosen.value)
    edited: TargetSpec | None = None
    if fix.alloc_conf:
        current = spec.alloc_conf if spec.alloc_conf is not None else target.get("alloc_conf")
        edited = spec.edit(alloc_conf=",".join(part for part in (current, fix.alloc_conf) if part))
    elif fix.edits and not (fix.catalog_only and target.get("vocab_size") is None):
        edited = spec.edit(**{name: value if new == catalog.VALUE else new for name, new in fix.edits.items()})
    elif fix.edit:
        edited = pkgutil.resolve_name(fix.edit)(spec, fix, value, target)
    return spec.edit(fixes=(*spec.fixes, str(chosen))) if edited is None else edited
