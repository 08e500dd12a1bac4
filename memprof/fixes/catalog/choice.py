"""Searches in the table of fixes: by name, by order, by the problem that a fix helps against, and by spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from memprof.device.catalog import Gpu
from memprof.errors import UsageError, unknown_name
from memprof.fixes.catalog.fix import Fix, Tier
from memprof.fixes.catalog.packages import find_missing_backend
from memprof.fixes.catalog.spreads import ALL_FIXES, PARALLEL_FIXES
from memprof.fixes.catalog.table import FIXES
from memprof.spec import Mode, TargetSpec
from memprof.trace.facts import DeviceFacts


def list_ladder(gpus: int = 1) -> list[str]:
    """Return the names of the fixes that `--ladder` tries, in the order in which they are tried.
    For several GPUs the list includes the fixes that change the parallel plan."""
    return _sort_names((fix.ladder_order, fix) for fix in (ALL_FIXES if gpus > 1 else FIXES).values())


def script_fix_names() -> list[str]:
    """Return the names of the fixes that `memprof run --fix` can switch on in an unchanged script, cheapest first."""
    return _sort_names((fix.script_order, fix) for fix in FIXES.values())


def list_tiers() -> list[tuple[str, list[str]]]:
    """Return (description, names of fixes) of each tier of `--fix auto`, which uses the first tier that fits."""
    fixes = sorted(FIXES.values(), key=lambda fix: fix.search_order)
    return [(tier.value, [fix.name for fix in fixes if tier in fix.tiers]) for tier in Tier]


def list_headroom_fixes() -> list[str]:
    """Return the names of the fixes that leave more of the GPU and slow no step down, as `--fix auto` adds them."""
    return _sort_names((fix.headroom_order, fix) for fix in FIXES.values())


def find_fixes_for(problem: str) -> list[Fix]:
    """Return the fixes recommended against `problem`, best first: a memory category, finding, or case of the doctor."""
    return sorted((fix for fix in FIXES.values() if problem in fix.helps), key=lambda fix: fix.helps[problem])


# The allocator's setting against fragmentation.
EXPANDABLE_SEGMENTS: Final = find_fixes_for("fragmentation")[0].alloc_conf


def _sort_names(entries: Iterable[tuple[int | None, Fix]]) -> list[str]:
    numbered = [(position, fix.name) for position, fix in entries if position is not None]
    return [name for _, name in sorted(numbered, key=lambda pair: pair[0])]


def list_active_fixes(spec: TargetSpec) -> list[str]:
    """Return the names of the fixes that are already on in `spec`."""
    return [fix.name for fix in ALL_FIXES.values() if fix.is_on(spec)]


def find_useless_reason(fix: Fix, spec: TargetSpec) -> tuple[str, str] | None:
    """Return (option, reason) if an option in `spec` makes `fix` useless, such as "--mode inference"; else None."""
    if fix.training_only and spec.mode is Mode.INFERENCE:
        return "--mode inference", "it saves memory in training alone"
    if not fix.accumulates and spec.gradient_accumulation > 1:
        return f"--gradient-accumulation {spec.gradient_accumulation}", "gradients cannot add up"
    for name, (value, reason) in fix.useless_if.items():
        if getattr(spec, name) == value:
            flag = "--" + name.replace("_", "-")
            return (f"no {flag}" if value is None else f"{flag} {value}"), reason
    return None


def find_device_reason(fix: Fix, device: Gpu | DeviceFacts) -> str | None:
    """Return why `fix` is not for this device; None if it is."""
    if device.unified_bytes is not None and fix.moves_to_host:
        return "GPU and host share one memory"
    if fix.alloc_conf and device.backend != "cuda":
        # ROCm has it since pull request 177974 of pytorch/pytorch, and may hang with it (issue 192259).
        return "it is a setting of CUDA's allocator"
    if fix.compiles and device.backend in ("mps", "xpu"):
        return "what torch.compile saves there is not simulated"
    if device.backend == "mps":
        return next(filter(None, map(find_missing_backend, fix.packages)), None)
    return None


def find_precision_reason(fix: Fix, device: Gpu, *, trains: bool) -> str | None:
    """Return why a search does not take `fix`, whose half precision is not the one that it takes on this device; None
    if it takes it. Who names the fix gets it all the same."""
    if not fix.half_precision:
        return None
    if fix.half_precision != device.half_precision:
        other = "is slow" if fix.half_precision == "bfloat16" else "has fewer exponents than bfloat16"
        return f"{fix.half_precision} {other} on {device.name}"
    return "gradients and updates in float16 vanish" if trains and fix.updates_vanish else None


def check_device(fixes: Iterable[Fix], device: Gpu | DeviceFacts) -> None:
    """Raise UsageError if one of `fixes` is not for this device."""
    for fix in fixes:
        if (reason := find_device_reason(fix, device)) is not None:
            raise UsageError(f"{fix.name} does not apply", value=f"on {device.name}", hint=reason)


def find_conflict(fix: Fix, other_name: str) -> str | None:
    """Return the reason why `fix` conflicts with the fix named `other_name`; None if it does not."""
    return fix.conflicts.get(other_name) or ALL_FIXES[other_name].conflicts.get(fix.name)


def find_fixes(names: str | Sequence[str], known_fixes: Mapping[str, Fix] = FIXES) -> list[Fix]:
    """Return the fixes called `names` (a list, or a string with commas), in the order in which they are applied.

    `known_fixes` maps names to fixes: FIXES, or ALL_FIXES, which has those that change the parallel plan too. Raises
    UsageError for no name, an unknown or repeated name, or two fixes that conflict.
    """
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    if not names:
        raise UsageError("no fix is named", hint="known: " + ", ".join(known_fixes))
    names_seen: set[str] = set()
    for name in names:
        if name in PARALLEL_FIXES and name not in known_fixes:
            hint = "memprof profile --gpus 2 --fix takes it; of a script it is its own code"
            raise UsageError("how a run is spread over GPUs is no fix of a script or a module", value=name, hint=hint)
        if name not in known_fixes:
            raise unknown_name("fix", name, known_fixes)
        if name in names_seen:
            raise UsageError("a fix is named twice", value=repr(name), hint="name it once")
        names_seen.add(name)
    fixes = [fix for fix in known_fixes.values() if fix.name in names_seen]
    for fix in fixes:
        check_conflicts(fix, names_seen - {fix.name})
    return fixes


def check_conflicts(fix: Fix, other_names: set[str]) -> None:
    """Raise UsageError if `fix` conflicts with one of the fixes named in `other_names`."""
    for other_name in sorted(other_names):
        reason = find_conflict(fix, other_name)
        if reason is not None:
            raise UsageError(
                "two fixes do not go together", value=f"{fix.name!r} and {other_name!r}", hint=f"use one: {reason}"
            )


def group_options(chosen: Sequence[Fix], options: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return, for the name of each chosen fix, the `options` that this fix takes.
    Raises UsageError if no chosen fix takes an option, or a required option is missing."""
    for name in options:
        if not any(name in fix.options for fix in chosen):
            owner = next((fix.name for fix in FIXES.values() if name in fix.options), None)
            if owner is not None:
                raise UsageError("an option of a fix that is not named", value=repr(name), hint=f"add {owner!r}")
            raise unknown_name("option", name, [option_name for fix in chosen for option_name in fix.options])
    for fix in chosen:
        for name in fix.required:
            if name not in options:
                raise UsageError(f"{fix.name} needs an option", value=name, hint=f"{name}=...: {fix.options[name]}")
    return {fix.name: {name: value for name, value in options.items() if name in fix.options} for fix in chosen}
