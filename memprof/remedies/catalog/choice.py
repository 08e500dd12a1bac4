"""What is asked of the table: remedies by name, by place, by what they help against, and those in force."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from memprof.errors import UsageError, unknown_name
from memprof.remedies.catalog.remedy import Remedy, Tier
from memprof.remedies.catalog.spreads import SPREADS, STEPS
from memprof.remedies.catalog.table import REMEDIES
from memprof.spec import Mode, TargetSpec


def ladder(gpus: int = 1) -> list[str]:
    """What a ladder tries: of the remedies against one and the same bottleneck the first is taken first.

    Over several cards that is also how the run is spread.
    """
    return _by_place((remedy.ladder, remedy) for remedy in (STEPS if gpus > 1 else REMEDIES).values())


def from_outside() -> list[str]:
    """Those that can be switched on in a program that knows nothing of them, the cheaper ones first."""
    return _by_place((remedy.outside, remedy) for remedy in REMEDIES.values())


def tiers() -> list[tuple[str, list[str]]]:
    """The sets of `--fix auto`, what is given up in words; the first that fits when all of it is on is searched."""
    members = sorted(REMEDIES.values(), key=lambda remedy: remedy.search)
    return [(tier.value, [remedy.name for remedy in members if tier in remedy.tiers]) for tier in Tier]


def helping(problem: str) -> list[Remedy]:
    """What is recommended against a category of memory, a finding, or a case of the doctor; best first."""
    return sorted(
        (remedy for remedy in REMEDIES.values() if problem in remedy.helps), key=lambda remedy: remedy.helps[problem]
    )


EXPANDABLE_SEGMENTS: Final = helping("fragmentation")[0].alloc_conf  # the allocator's setting against fragmentation


def _by_place(places: Iterable[tuple[int | None, Remedy]]) -> list[str]:
    found = [(place, remedy.name) for place, remedy in places if place is not None]
    return [name for _, name in sorted(found, key=lambda pair: pair[0])]


def in_force(spec: TargetSpec) -> list[str]:
    """Names of the remedies that `spec` has on already."""
    return [remedy.name for remedy in STEPS.values() if remedy.is_on(spec)]


def why_useless(remedy: Remedy, spec: TargetSpec) -> tuple[str, str] | None:
    """The option with which `remedy` does nothing in this run, and why; None if it may help."""
    if remedy.training_only and spec.mode is Mode.INFERENCE:
        return "--mode inference", "it saves memory in training alone"
    if not remedy.accumulates and spec.gradient_accumulation > 1:
        return f"--gradient-accumulation {spec.gradient_accumulation}", "gradients cannot add up"
    for name, (value, why) in remedy.useless_if.items():
        if getattr(spec, name) == value:
            flag = "--" + name.replace("_", "-")
            return (f"no {flag}" if value is None else f"{flag} {value}"), why
    return None


def why_not_together(remedy: Remedy, other: str) -> str | None:
    """Why `remedy` and `other` do not go together; None if they do."""
    return remedy.conflicts.get(other) or STEPS[other].conflicts.get(remedy.name)


def find_remedies(names: str | Sequence[str], among: Mapping[str, Remedy] = REMEDIES) -> list[Remedy]:
    """Return the remedies of these names (a list, or one string with commas), in the order in which they are switched
    on.

    `among` are those that there are, with how a run is spread over cards or without. Raises UsageError: no name, an
    unknown one, one twice, or two that do not go together.
    """
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    if not names:
        raise UsageError("no remedy is named", hint="known: " + ", ".join(among))
    seen: set[str] = set()
    for name in names:
        if name in SPREADS and name not in among:
            raise UsageError(
                "how a run is spread over cards is no remedy of a script or a module", value=name,
                hint="memprof profile --gpus 2 --fix takes it; of a script it is its own code",
            )  # fmt: skip
        if name not in among:
            raise unknown_name("remedy", name, among)
        if name in seen:
            raise UsageError("a remedy is named twice", value=repr(name), hint="name it once")
        seen.add(name)
    chosen = [remedy for remedy in among.values() if remedy.name in seen]
    for remedy in chosen:
        check_conflicts(remedy, seen - {remedy.name})
    return chosen


def check_conflicts(remedy: Remedy, others: set[str]) -> None:
    """See that `remedy` goes with `others`. Raises UsageError: it does not; says with which, and why."""
    for other in sorted(others):
        reason = why_not_together(remedy, other)
        if reason is not None:
            raise UsageError(
                "two remedies do not go together", value=f"{remedy.name!r} and {other!r}", hint=f"use one: {reason}"
            )


def options_by_remedy(chosen: Sequence[Remedy], options: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """`options` sorted by the remedy that takes each.
    Raises UsageError: no chosen remedy takes an option, or one lacks what it needs."""
    for name in options:
        if not any(name in remedy.options for remedy in chosen):
            owner = next((remedy.name for remedy in REMEDIES.values() if name in remedy.options), None)
            if owner is not None:
                raise UsageError("an option of a remedy that is not named", value=repr(name), hint=f"add {owner!r}")
            raise unknown_name("option", name, [known for remedy in chosen for known in remedy.options])
    for remedy in chosen:
        for name in remedy.required:
            if name not in options:
                raise UsageError(
                    f"{remedy.name} needs an option", value=name, hint=f"{name}=...: {remedy.options[name]}"
                )
    return {
        remedy.name: {name: value for name, value in options.items() if name in remedy.options} for remedy in chosen
    }
