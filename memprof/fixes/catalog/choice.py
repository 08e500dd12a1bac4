"""Look-ups in the table of fixes: by name, order, problem that a fix reduces, and spec that a fix applies to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from memprof.errors import UsageError, unknown_name
from memprof.fixes.catalog.fix import Fix, Tier
from memprof.fixes.catalog.spreads import SPREADS, STEPS
from memprof.fixes.catalog.table import FIXES
from memprof.spec import Mode, TargetSpec


def ladder(gpus: int = 1) -> list[str]:
    """Return the names of the fixes that `--ladder` tries, in order; against one bottleneck, the first is tried first.

    For several GPUs the list includes the fixes that spread the run.
    """
    return _sort_by_place((fix.ladder, fix) for fix in (STEPS if gpus > 1 else FIXES).values())


def script_fix_names() -> list[str]:
    """Return the names of the fixes that `memprof run --fix` can switch on in an unchanged script, cheapest first."""
    return _sort_by_place((fix.outside, fix) for fix in FIXES.values())


def tiers() -> list[tuple[str, list[str]]]:
    """Return the tiers of `--fix auto`: what each gives up, and its fixes. The first tier that fits is searched."""
    members = sorted(FIXES.values(), key=lambda fix: fix.search)
    return [(tier.value, [fix.name for fix in members if tier in fix.tiers]) for tier in Tier]


def find_helpful(problem: str) -> list[Fix]:
    """Return the fixes against a category of memory, a finding, or a case of the doctor; best first."""
    return sorted((fix for fix in FIXES.values() if problem in fix.helps), key=lambda fix: fix.helps[problem])


# The allocator's setting against fragmentation.
EXPANDABLE_SEGMENTS: Final = find_helpful("fragmentation")[0].alloc_conf


def _sort_by_place(places: Iterable[tuple[int | None, Fix]]) -> list[str]:
    found = [(place, fix.name) for place, fix in places if place is not None]
    return [name for _, name in sorted(found, key=lambda pair: pair[0])]


def in_force(spec: TargetSpec) -> list[str]:
    """Return the names of the fixes that are on in `spec`."""
    return [fix.name for fix in STEPS.values() if fix.is_on(spec)]


def useless_reason(fix: Fix, spec: TargetSpec) -> tuple[str, str] | None:
    """Return the option that makes `fix` useless in this run, and the reason; None if `fix` may help."""
    if fix.training_only and spec.mode is Mode.INFERENCE:
        return "--mode inference", "it saves memory in training alone"
    if not fix.accumulates and spec.gradient_accumulation > 1:
        return f"--gradient-accumulation {spec.gradient_accumulation}", "gradients cannot add up"
    for name, (value, why) in fix.useless_if.items():
        if getattr(spec, name) == value:
            flag = "--" + name.replace("_", "-")
            return (f"no {flag}" if value is None else f"{flag} {value}"), why
    return None


def conflict_reason(fix: Fix, other: str) -> str | None:
    """Return the reason why `fix` and `other` conflict; None if they do not."""
    return fix.conflicts.get(other) or STEPS[other].conflicts.get(fix.name)


def find_fixes(names: str | Sequence[str], among: Mapping[str, Fix] = FIXES) -> list[Fix]:
    """Return the fixes of these names (a list, or one string with commas), in the order in which they are applied.

    `among` holds the known fixes by name: FIXES, or STEPS with the fixes that spread a run over GPUs. Raises
    UsageError: no name, an unknown or repeated name, or two fixes that conflict.
    """
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    if not names:
        raise UsageError("no fix is named", hint="known: " + ", ".join(among))
    seen: set[str] = set()
    for name in names:
        if name in SPREADS and name not in among:
            hint = "memprof profile --gpus 2 --fix takes it; of a script it is its own code"
            raise UsageError("how a run is spread over GPUs is no fix of a script or a module", value=name, hint=hint)
        if name not in among:
            raise unknown_name("fix", name, among)
        if name in seen:
            raise UsageError("a fix is named twice", value=repr(name), hint="name it once")
        seen.add(name)
    chosen = [fix for fix in among.values() if fix.name in seen]
    for fix in chosen:
        check_conflicts(fix, seen - {fix.name})
    return chosen


def check_conflicts(fix: Fix, others: set[str]) -> None:
    """Raise UsageError if `fix` conflicts with one of `others`."""
    for other in sorted(others):
        reason = conflict_reason(fix, other)
        if reason is not None:
            raise UsageError(
                "two fixes do not go together", value=f"{fix.name!r} and {other!r}", hint=f"use one: {reason}"
            )


def options_by_fix(chosen: Sequence[Fix], options: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the options of each chosen fix, by the fix's name.
    Raises UsageError: no chosen fix takes an option, or a required option is missing."""
    for name in options:
        if not any(name in fix.options for fix in chosen):
            owner = next((fix.name for fix in FIXES.values() if name in fix.options), None)
            if owner is not None:
                raise UsageError("an option of a fix that is not named", value=repr(name), hint=f"add {owner!r}")
            raise unknown_name("option", name, [known for fix in chosen for known in fix.options])
    for fix in chosen:
        for name in fix.required:
            if name not in options:
                raise UsageError(f"{fix.name} needs an option", value=name, hint=f"{name}=...: {fix.options[name]}")
    return {fix.name: {name: value for name, value in options.items() if name in fix.options} for fix in chosen}
