"""Fixes as edits of the spec, for `--fix`: the edited spec is run again.

Some fixes change what is run (a dtype, the micro-batch, an allocator setting): they replace fields of the spec. The
others change the model, as `memprof.apply` does in a user's code: their names are added to `fixes` of the spec, and the
workload applies them to the model that it builds.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memprof.errors import UsageError
from memprof.fixes import catalog
from memprof.fixes.spec_edits import useless
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
    return ChosenFix(catalog.STEPS[name], value)


def parse_fixes(text: str, among: Mapping[str, catalog.Fix] = catalog.FIXES) -> list[ChosenFix]:
    """Return the fixes in text such as "chunked-loss=2048,activation-checkpointing", in the same order.

    `among` holds the known fixes by name (STEPS includes the ones that spread a run over GPUs). Raises UsageError: an
    unknown fix, a repeated one, two fixes that conflict, or a value that the fix does not take.
    """
    fixes = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, equals, value = part.partition("=")
        (fix,) = catalog.find_fixes([name.strip()], among)
        if equals:
            _parse_value(fix, value.strip())
        fixes.append(ChosenFix(fix, value.strip() if equals else None))
    catalog.find_fixes([chosen.fix.name for chosen in fixes], among)
    return fixes


def _parse_value(fix: catalog.Fix, value: str) -> int | str | None:
    """Return the value of the fix's main option; None if `value` is a key of `fix.named_values`."""
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


def apply_options(fixes: Sequence[ChosenFix]) -> dict[str, Any]:
    """Return the keyword options for `memprof.apply` from the values of the chosen fixes."""
    found: dict[str, Any] = {}
    for chosen in fixes:
        if chosen.value is not None:
            named = chosen.fix.named_values.get(chosen.value)
            found.update({chosen.fix.main_option: _parse_value(chosen.fix, chosen.value)} if named is None else named)
    return found


def combined_numerics(fixes: Sequence[str]) -> catalog.Numerics:
    """Return the strongest effect on numerics among several fixes."""
    return max((catalog.STEPS[name].numerics for name in fixes), key=_NUMERICS.index, default=catalog.Numerics.EXACT)


def edit_spec(spec: TargetSpec, chosen: ChosenFix, target: Mapping[str, Any]) -> TargetSpec:
    """Return `spec` with the chosen fix in force; `target` describes the baseline run's model (dtype, vocabulary, and
    `classes` of modules).

    Raises UsageError: the fix is on already, conflicts with a fix that is on, or does nothing in this mode. Errors that
    depend on the built model are raised when the fix is applied.
    """
    fix = chosen.fix
    # A fix that does nothing in this mode gets no other error.
    for other in [] if fix.training_only and spec.mode is Mode.INFERENCE else catalog.in_force(spec):
        if other == fix.name:
            raise UsageError("the fix is already on", value=fix.name, hint="leave it out")
        catalog.check_conflicts(fix, {other})
    if (reason := catalog.useless_reason(fix, spec)) is not None:
        raise useless(fix, *reason)
    option = fix.main_option
    if option in fix.required and chosen.value is None:
        hint = f"write {fix.name}=VALUE: {fix.options[option]}"
        raise UsageError(f"{fix.name} needs a value", value=fix.name, hint=hint)
    value = None if chosen.value is None else _parse_value(fix, chosen.value)
    edited: TargetSpec | None = None
    if fix.alloc_conf:
        current = spec.alloc_conf if spec.alloc_conf is not None else target.get("alloc_conf")
        edited = spec.edit(alloc_conf=",".join(part for part in (current, fix.alloc_conf) if part))
    elif fix.edits and not (fix.built_so and target.get("vocab_size") is None):
        edited = spec.edit(**{name: value if new == catalog.VALUE else new for name, new in fix.edits.items()})
    elif fix.edit:
        edited = pkgutil.resolve_name(fix.edit)(spec, fix, value, target)
    return spec.edit(fixes=(*spec.fixes, str(chosen))) if edited is None else edited
