"""Remedies as edits of the spec: what `--fix` does, so that the pipeline can run again with a remedy in force.

Some change what is run (a dtype, a micro-batch, a setting of the allocator): those replace fields of the spec. The
others change the model, and are the very ones that `memprof.apply` switches on in a user's code: the spec names them in
`fixes`, and the workload has them applied to the model that it has built.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memprof.errors import UsageError
from memprof.remedy_catalog import REMEDIES, Numerics, Remedy, check_conflicts, find_remedies
from memprof.spec import Mode, TargetSpec


@dataclass(frozen=True)
class Fix:
    """A remedy, and the value of its main option if one was given ("chunked-loss=2048")."""

    remedy: Remedy
    value: str | None = None

    def __str__(self) -> str:
        return self.remedy.name if self.value is None else f"{self.remedy.name}={self.value}"


@dataclass(frozen=True)
class _Option:
    """The option that NAME=VALUE means, and what may be said."""

    name: str
    read: Callable[[str], Any]
    required: bool = False


def _whole(text: str) -> int:
    return int(text.replace(",", "").replace("_", ""))


def _patterns(text: str) -> str:
    # Commas separate fixes.
    return text.replace("+", ",")


OPTIONS: Mapping[str, _Option] = {
    "vocabulary-cap": _Option("vocab_size", _whole, required=True),
    "freeze": _Option("frozen", _patterns, required=True),
    "lora": _Option("lora_rank", _whole),
    "qlora": _Option("lora_rank", _whole),
    "chunked-loss": _Option("chunk_size", _whole),
    "activation-checkpointing": _Option("every", _whole),
    "cpu-offload-activations": _Option("min_bytes", _whole),
    "micro-batch": _Option("micro_batch_size", _whole),
}
"""Remedy -> the option that its value is for."""

_NUMERICS = list(Numerics)


def parse_fixes(text: str) -> list[Fix]:
    """The fixes in "chunked-loss=2048,activation-checkpointing", in the order in which they are named.

    Raises:
        UsageError: an unknown remedy, one twice, two that do not go together, or a value that it has no use for.
    """
    fixes = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, equals, value = part.partition("=")
        (remedy,) = find_remedies([name.strip()])
        if equals:
            _read(remedy, value.strip())
        fixes.append(Fix(remedy, value.strip() if equals else None))
    find_remedies([fix.remedy.name for fix in fixes])
    return fixes


def _read(remedy: Remedy, value: str) -> Any:
    option = OPTIONS.get(remedy.name)
    if option is None:
        raise UsageError("this remedy takes no value", value=f"{remedy.name}={value}", hint=f"write {remedy.name}")
    try:
        return option.read(value)
    except ValueError:
        raise UsageError(
            f"{remedy.name} takes a whole number",
            value=repr(value),
            hint=f"{option.name}: {remedy.options[option.name]}",
        ) from None


def options_of(fixes: Sequence[Fix]) -> dict[str, Any]:
    """The options of `memprof.apply` that the fixes' values stand for."""
    return {OPTIONS[fix.remedy.name].name: _read(fix.remedy, fix.value) for fix in fixes if fix.value is not None}


def worst_numerics(remedies: Sequence[str]) -> Numerics:
    """What several remedies together do to the numbers of a run."""
    return max((REMEDIES[name].numerics for name in remedies), key=_NUMERICS.index, default=Numerics.EXACT)


# -- edits ------------------------------------------------------------------------------------------------------------


def edit_spec(spec: TargetSpec, fix: Fix, target: Mapping[str, Any]) -> TargetSpec:
    """`spec` with `fix` in force.

    Args:
        spec: the run as it is.
        fix: what to change.
        target: what the run as it is turned out to be: `target` of its report (dtype, vocabulary, ...).

    Raises:
        UsageError: it does not apply: it is on already, does not go with something that is, or the mode has no use for
            it. What only the model can tell is told when it is applied.
    """
    remedy = fix.remedy
    if spec.mode is Mode.INFERENCE and remedy.name in TRAINING_ONLY:
        raise _useless(remedy, "--mode inference", "it saves memory in training alone")
    for other in in_force(spec):
        if other == remedy.name:
            raise UsageError("the remedy is already on", value=remedy.name, hint="leave it out")
        if other in REMEDIES:
            check_conflicts(remedy, {other})
    option = OPTIONS.get(remedy.name)
    if option is not None and option.required and fix.value is None:
        raise UsageError(
            f"{remedy.name} needs a value",
            value=remedy.name,
            hint=f"write {remedy.name}=VALUE: {remedy.options[option.name]}",
        )
    value = None if fix.value is None else _read(remedy, fix.value)
    change = _EDITS.get(remedy.name)
    if change is None:
        return spec.edit(fixes=(*spec.fixes, str(fix)))
    return change(spec, value, target)


TRAINING_ONLY = frozenset(
    {
        "chunked-loss", "activation-checkpointing", "cpu-offload-activations", "optimizer-in-backward",
        "8-bit-optimizer", "cpu-offload-optimizer", "fused-optimizer", "lora", "qlora", "freeze", "streamed-batches",
    }
)  # fmt: skip
"""Of no use where nothing is trained."""


def in_force(spec: TargetSpec) -> list[str]:
    """Names of the remedies that `spec` has on already."""
    names = [fix.partition("=")[0] for fix in spec.fixes]
    if spec.activation_checkpointing:
        names.append("activation-checkpointing")
    if spec.adapter == "lora":
        names.append("lora" if spec.quantize is None else "qlora")
    elif spec.quantize is not None:
        names.append("8-bit-weights" if spec.quantize == "int8" else "4-bit-weights")
    if "8bit" in spec.optimizer:
        names.append("8-bit-optimizer")
    if spec.freeze is not None:
        names.append("freeze")
    if spec.optimizer_impl == "fused":
        names.append("fused-optimizer")
    if spec.npt == "low-rank":
        names.append("low-rank-npt")
    if spec.alloc_conf is not None and "expandable_segments:true" in spec.alloc_conf.lower():
        names.append("expandable-segments")
    return names


def _useless(remedy: Remedy, value: object, why: str) -> UsageError:
    return UsageError(f"{remedy.name} does not apply", value=str(value), hint=why)


def _half(name: str) -> Callable[[TargetSpec, Any, Mapping[str, Any]], TargetSpec]:
    def edit(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
        if spec.amp is None and target.get("dtype") in ("float16", "bfloat16"):
            raise _useless(REMEDIES[name], f"dtype {target['dtype']}", "the parameters have two bytes each already")
        return spec.edit(dtype=name, amp=None)

    return edit


def _amp(name: str) -> Callable[[TargetSpec, Any, Mapping[str, Any]], TargetSpec]:
    def edit(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
        if spec.amp == name:
            raise UsageError("the remedy is already on", value=f"amp-{name}", hint="leave it out")
        return spec.edit(amp=name, dtype=None)

    return edit


def _vocabulary_cap(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    size = target.get("vocab_size")
    if size is None:
        return spec.edit(fixes=(*spec.fixes, f"vocabulary-cap={value}"))
    if value >= size:
        raise _useless(REMEDIES["vocabulary-cap"], value, f"the vocabulary has {size:,} tokens")
    return spec.edit(vocab_size=value)


def _freeze(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    return spec.edit(freeze=value)


def _lora(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    return spec.edit(adapter="lora", lora_rank=value)


def _quantized(kind: str, adapter: str | None = None) -> Callable[[TargetSpec, Any, Mapping[str, Any]], TargetSpec]:
    """What transformers loads quantized; a model of the user's own is quantized by `memprof.apply`."""
    name = "qlora" if adapter else "4-bit-weights" if kind == "nf4" else "8-bit-weights"

    def edit(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
        if spec.quantize is not None:
            raise _useless(REMEDIES[name], f"--quantize {spec.quantize}", "the weights are quantized already")
        if target.get("vocab_size") is None:
            return spec.edit(fixes=(*spec.fixes, name if value is None else f"{name}={value}"))
        return spec.edit(quantize=kind, **({"adapter": adapter, "lora_rank": value} if adapter else {}))

    return edit


def _eight_bit_optimizer(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    remedy = REMEDIES["8-bit-optimizer"]
    if spec.optimizer not in ("adamw", "adam"):
        raise _useless(remedy, f"--optimizer {spec.optimizer}", "it stands for AdamW")
    for package, optimizer in (("bitsandbytes", "adamw-8bit"), ("torchao", "torchao-adamw-8bit")):
        if importlib.util.find_spec(package) is not None:
            return spec.edit(optimizer=optimizer, optimizer_impl=None)
    raise UsageError(
        "8-bit-optimizer needs bitsandbytes or torchao", value="neither is installed", hint="pip install bitsandbytes"
    )


def _micro_batch(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    """The same number of sequences in a step, fewer at a time."""
    size = 1 if value is None else value
    if spec.batch_size == 1:
        raise _useless(REMEDIES["micro-batch"], "--batch-size 1", "there is one sequence in a micro-batch already")
    if not 1 <= size < spec.batch_size or spec.batch_size % size:
        divisors = [d for d in range(1, spec.batch_size) if spec.batch_size % d == 0]
        raise _useless(REMEDIES["micro-batch"], size, f"give one of {', '.join(map(str, divisors))}")
    if spec.mode is Mode.INFERENCE:
        return spec.edit(batch_size=size)
    return spec.edit(batch_size=size, gradient_accumulation=spec.gradient_accumulation * (spec.batch_size // size))


def _expandable_segments(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    now = spec.alloc_conf if spec.alloc_conf is not None else target.get("alloc_conf")
    return spec.edit(alloc_conf=",".join(part for part in (now, "expandable_segments:True") if part))


def _fused_optimizer(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    return spec.edit(optimizer_impl="fused")


def _low_rank_npt(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    if spec.npt is None:
        raise _useless(REMEDIES["low-rank-npt"], "no --npt", "the model has no NPT components")
    return spec.edit(npt="low-rank")


def _streamed_batches(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    if spec.dataset_batches is None:
        raise _useless(REMEDIES["streamed-batches"], "no --dataset-batches", "batches are made one at a time already")
    return spec.edit(dataset_batches=None)


def _cpu_offload_optimizer(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    if spec.optimizer == "none":
        raise _useless(REMEDIES["cpu-offload-optimizer"], "--optimizer none", "there is no optimizer")
    return spec.edit(fixes=(*spec.fixes, "cpu-offload-optimizer"))


def _optimizer_in_backward(spec: TargetSpec, value: Any, target: Mapping[str, Any]) -> TargetSpec:
    remedy = REMEDIES["optimizer-in-backward"]
    if spec.gradient_accumulation > 1:
        raise _useless(remedy, f"--gradient-accumulation {spec.gradient_accumulation}", "gradients cannot add up")
    if spec.amp == "float16":
        raise _useless(remedy, "--amp float16", "the scaler must see all gradients before a step")
    if spec.optimizer == "none":
        raise _useless(remedy, "--optimizer none", "there is no optimizer")
    return spec.edit(fixes=(*spec.fixes, remedy.name))


_EDITS: dict[str, Callable[[TargetSpec, Any, Mapping[str, Any]], TargetSpec]] = {
    "bfloat16": _half("bfloat16"),
    "float16": _half("float16"),
    "vocabulary-cap": _vocabulary_cap,
    "amp-bfloat16": _amp("bfloat16"),
    "amp-float16": _amp("float16"),
    "streamed-batches": _streamed_batches,
    "cpu-offload-optimizer": _cpu_offload_optimizer,
    "freeze": _freeze,
    "8-bit-weights": _quantized("int8"),
    "4-bit-weights": _quantized("nf4"),
    "qlora": _quantized("nf4", "lora"),
    "8-bit-optimizer": _eight_bit_optimizer,
    "lora": _lora,
    "micro-batch": _micro_batch,
    "expandable-segments": _expandable_segments,
    "fused-optimizer": _fused_optimizer,
    "low-rank-npt": _low_rank_npt,
    "optimizer-in-backward": _optimizer_in_backward,
}
"""Those that change what is run; the others are applied to the model."""
