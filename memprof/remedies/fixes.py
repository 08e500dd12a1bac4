"""Remedies as edits of the spec: what `--fix` does, so that the pipeline can run again with a remedy in force.

Some change what is run (a dtype, a micro-batch, a setting of the allocator): those replace fields of the spec. The
others change the model, and are the very ones that `memprof.apply` switches on in a user's code: the spec names them in
`fixes`, and the workload has them applied to the model that it has built.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memprof.errors import UsageError
from memprof.remedies.catalog import (
    REMEDIES,
    STEPS,
    VALUE,
    Numerics,
    Remedy,
    check_conflicts,
    find_remedies,
    in_force,
    why_useless,
)
from memprof.remedies.spec_edits import useless
from memprof.spec import Mode, TargetSpec

_NUMERICS = list(Numerics)


@dataclass(frozen=True)
class Fix:
    """A remedy, and the value of its main option if one was given ("chunked-loss=2048")."""

    remedy: Remedy
    value: str | None = None

    def __str__(self) -> str:
        return self.remedy.name if self.value is None else f"{self.remedy.name}={self.value}"

    def __reduce__(self) -> tuple[Any, ...]:
        # For another process by name: an entry of the table has views of mappings, which cannot be pickled.
        return _named, (self.remedy.name, self.value)


def _named(name: str, value: str | None) -> Fix:
    return Fix(STEPS[name], value)


def parse_fixes(text: str, among: Mapping[str, Remedy] = REMEDIES) -> list[Fix]:
    """Return the fixes in "chunked-loss=2048,activation-checkpointing", in the order in which they are named.

    `among` are those that there are: STEPS are also those that spread a run over cards. Raises UsageError: an unknown
    remedy, one twice, two that do not go together, or a value that it has no use for.
    """
    fixes = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, equals, value = part.partition("=")
        (remedy,) = find_remedies([name.strip()], among)
        if equals:
            _read(remedy, value.strip())
        fixes.append(Fix(remedy, value.strip() if equals else None))
    find_remedies([fix.remedy.name for fix in fixes], among)
    return fixes


def _read(remedy: Remedy, value: str) -> int | str | None:
    """The value of the main option; None: it is a word for other options."""
    option = remedy.main_option
    if value in remedy.named_values:
        return None
    if not option:
        raise UsageError("this remedy takes no value", value=f"{remedy.name}={value}", hint=f"write {remedy.name}")
    if remedy.main_type is str:
        return value.replace("+", ",")  # commas separate fixes
    try:
        return int(value.replace(",", "").replace("_", ""))
    except ValueError:
        raise UsageError(
            " or ".join([f"{remedy.name} takes a whole number", *remedy.named_values]),
            value=repr(value),
            hint=f"{option}: {remedy.options[option]}",
        ) from None


def options_of(fixes: Sequence[Fix]) -> dict[str, Any]:
    """The options of `memprof.apply` that the fixes' values stand for."""
    found: dict[str, Any] = {}
    for fix in fixes:
        if fix.value is not None:
            named = fix.remedy.named_values.get(fix.value)
            found.update({fix.remedy.main_option: _read(fix.remedy, fix.value)} if named is None else named)
    return found


def worst_numerics(remedies: Sequence[str]) -> Numerics:
    """What several remedies together do to the numbers of a run."""
    return max((STEPS[name].numerics for name in remedies), key=_NUMERICS.index, default=Numerics.EXACT)


def edit_spec(spec: TargetSpec, fix: Fix, target: Mapping[str, Any]) -> TargetSpec:
    """Return `spec` with `fix` in force; `target` is the run's, as it turned out (dtype, vocabulary), with `classes` of
    modules.

    Raises UsageError: it is on already, does not go with something that is, or the mode has no use for it. What only
    the model can tell is told when it is applied.
    """
    remedy = fix.remedy
    # Of what the mode has no use for, nothing else is said.
    for other in [] if remedy.training_only and spec.mode is Mode.INFERENCE else in_force(spec):
        if other == remedy.name:
            raise UsageError("the remedy is already on", value=remedy.name, hint="leave it out")
        check_conflicts(remedy, {other})
    if (said := why_useless(remedy, spec)) is not None:
        raise useless(remedy, *said)
    option = remedy.main_option
    if option in remedy.required and fix.value is None:
        raise UsageError(
            f"{remedy.name} needs a value",
            value=remedy.name,
            hint=f"write {remedy.name}=VALUE: {remedy.options[option]}",
        )
    value = None if fix.value is None else _read(remedy, fix.value)
    edited: TargetSpec | None = None
    if remedy.alloc_conf:
        now = spec.alloc_conf if spec.alloc_conf is not None else target.get("alloc_conf")
        edited = spec.edit(alloc_conf=",".join(part for part in (now, remedy.alloc_conf) if part))
    elif remedy.edits and not (remedy.built_so and target.get("vocab_size") is None):
        edited = spec.edit(**{name: value if new == VALUE else new for name, new in remedy.edits.items()})
    elif remedy.edit:
        edited = pkgutil.resolve_name(remedy.edit)(spec, remedy, value, target)
    return spec.edit(fixes=(*spec.fixes, str(fix))) if edited is None else edited
