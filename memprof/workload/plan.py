"""Parallelism plans: the value of `--parallel`, parsed and checked before a model is built.

    ddp   fsdp   fsdp:shard_grad_op   hsdp:2x4   tp=2,fsdp=4   cp=2   ulysses=2   pp=4:1f1b:microbatches=8

The product of all sizes is the number of ranks, and a part without a size gets the remaining factor. The order of the
mesh is torchtitan's: pipeline, replicate, shard, context, tensor (distributed/parallel_dims.py), so that the ranks of a
tensor-parallel group are neighbors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memprof.errors import UsageError, nearest
from memprof.spec import Mode, TargetSpec

SCHEDULES = ("1f1b", "gpipe")
KINDS = ("ddp", "fsdp", "hsdp", "tp", "cp", "ulysses", "pp")
DEVICE_MAP = "device-map"  # a plan by itself: one process has all GPUs, and each some of the layers
_GPUS_PER_MACHINE = 8
_MAX_RANKS = 1 << 20
_EXAMPLES = (
    "ddp, fsdp, fsdp:shard_grad_op, hsdp:2x4, tp=2, cp=2, ulysses=2, pp=4:1f1b:microbatches=8, with commas between; "
    "or device-map"
)


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """Number of ranks along each dimension of a device mesh (1: not used), and options of FSDP and pipelines."""

    stages: int = 1  # of a pipeline
    replicate: int = 1  # data-parallel replicas: of all parameters, or of shards
    shard: int = 1  # of fully_shard
    context: int = 1  # of torch's context_parallel (ring attention)
    ulysses: int = 1  # of DeepSpeed Ulysses: a rank has a part of the sequence, and in attention a part of the heads
    tensor: int = 1  # of tensor parallelism
    sharded: bool = False  # whether fully_shard is used, even with one rank
    reshard: bool = True  # whether gathered parameters are freed after the forward (FULL_SHARD; else SHARD_GRAD_OP)
    layers: int = 1  # GPUs of one process that has some of the layers on each
    schedule: str = "1f1b"
    microbatches: int = 1  # of a pipeline, in a step

    @property
    def size(self) -> int:
        """Return the total number of ranks (GPUs)."""
        return self.stages * self.data * self.sequence * self.tensor * self.layers

    @property
    def data(self) -> int:
        """Return the number of data-parallel ranks, which have different batches."""
        return self.replicate * self.shard

    @property
    def sequence(self) -> int:
        """Return the number of ranks over which each sequence is split."""
        return self.context * self.ulysses

    @property
    def sharing(self) -> int:
        """Return the number of ranks that work on the same sequences: context, Ulysses and tensor parallel ones."""
        return self.sequence * self.tensor

    def text(self) -> str:
        """Return the plan as a value of `--parallel`; `parse_plan` returns an equal plan for it and `size` GPUs."""
        if self.layers > 1:
            return DEVICE_MAP
        pipeline = f"pp={self.stages}:{self.schedule}:microbatches={self.microbatches}"
        options = [pipeline] if self.stages > 1 else []
        ranks_by_kind = {"cp": self.context, "ulysses": self.ulysses, "tp": self.tensor}
        options += [f"{kind}={ranks}" for kind, ranks in ranks_by_kind.items() if ranks > 1]
        if self.sharded:
            kind = f"hsdp:{self.replicate}x{self.shard}" if self.replicate > 1 else "fsdp"
            options.append(kind + ("" if self.reshard else ":shard_grad_op"))
        elif self.replicate > 1 or not options:
            options.append("ddp")
        return ",".join(options)

    def group_similar_ranks(self) -> list[tuple[int, range]]:
        """Return (representative rank, ranks) for each set of ranks that use the same memory, up to padding of shards.
        Each pipeline stage is such a set; it is represented by its first rank, or, with ring attention, its last."""
        ranks_per_stage = self.size // self.stages
        stages = [range(stage * ranks_per_stage, (stage + 1) * ranks_per_stage) for stage in range(self.stages)]
        return [(ranks[-1 if self.context > 1 else 0], ranks) for ranks in stages]


def parse_plan(text: str, gpus: int) -> ParallelPlan:
    """Return the plan for `--parallel TEXT` and `gpus` ranks; raise UsageError, which shows a valid one, if invalid."""
    if text.strip().lower() == DEVICE_MAP:
        if gpus == 1:
            raise UsageError("layers are spread over several GPUs", value=f"--parallel {text}", hint="--gpus 2")
        return ParallelPlan(layers=gpus)
    sizes: dict[str, tuple[int, ...]] = {}
    options_by_kind: dict[str, list[str]] = {}
    for part in text.lower().split(","):
        head, *options = part.strip().split(":")
        kind, _, size = head.partition("=")
        if kind == DEVICE_MAP:
            raise UsageError(f"--parallel: {DEVICE_MAP} stands alone", value=text, hint=f"--parallel {DEVICE_MAP}")
        if kind not in KINDS:
            closest = nearest(kind, KINDS)
            raise UsageError(
                "--parallel: unknown part", value=repr(kind), hint=f"did you mean {closest}?" if closest else _EXAMPLES
            )
        if kind in sizes:
            raise UsageError("--parallel: a part is given twice", value=kind, hint="give one")
        if kind == "hsdp" and not size and options:
            size = options.pop(0)
        sizes[kind], options_by_kind[kind] = _parse_sizes(kind, size), options
    data_kinds = [kind for kind in ("ddp", "fsdp", "hsdp") if kind in sizes]
    for exclusive_kinds in (data_kinds, [kind for kind in ("cp", "ulysses") if kind in sizes]):
        if len(exclusive_kinds) > 1:
            names = ", ".join(exclusive_kinds)
            raise UsageError("--parallel: parts exclude each other", value=names, hint=f"give one of {names}")
    plan = _make_plan(sizes, gpus, text)
    for kind, options in options_by_kind.items():
        for option in options:
            plan = _apply_option(plan, kind, option)
    if plan.stages > 1 and "microbatches" not in text:
        plan = dataclasses.replace(plan, microbatches=2 * plan.stages)
    return plan


def _parse_sizes(kind: str, text: str) -> tuple[int, ...]:
    parts = (text.split("x") if kind == "hsdp" else [text]) if text else []
    are_valid = all(part.isdecimal() and 1 <= int(part) <= _MAX_RANKS for part in parts)
    if not are_valid or len(parts) not in ((2,) if kind == "hsdp" else (0, 1)):
        example = "hsdp:2x4 are two replicas of four shards" if kind == "hsdp" else f"{kind}=2"
        raise UsageError("--parallel: not a number of ranks", value=f"{kind}={text}", hint=example)
    return tuple(map(int, parts))


def _make_plan(sizes: Mapping[str, tuple[int, ...]], gpus: int, text: str) -> ParallelPlan:
    size = math.prod(number for numbers in sizes.values() for number in numbers)
    unsized_kinds = [kind for kind, numbers in sizes.items() if not numbers]
    if len(unsized_kinds) > 1:
        raise UsageError(
            "--parallel: two parts without a number",
            value=", ".join(unsized_kinds),
            hint=f"{unsized_kinds[0]}=2, for instance",
        )
    remaining, remainder = divmod(gpus, size)
    if remainder or (remaining != 1 and not unsized_kinds):
        hint = f"--gpus {size}"
        if not remainder and not {"ddp", "fsdp", "hsdp"} & sizes.keys():
            hint += f", or --parallel {text},fsdp={remaining}"
        raise UsageError(f"the plan is for {size} ranks, and there are {gpus}", value=f"--parallel {text}", hint=hint)
    field_by_kind = {
        "pp": "stages",
        "ddp": "replicate",
        "fsdp": "shard",
        "cp": "context",
        "ulysses": "ulysses",
        "tp": "tensor",
    }
    ranks: dict[str, Any] = {
        field_by_kind[kind]: numbers[0] if numbers else remaining for kind, numbers in sizes.items() if kind != "hsdp"
    }
    if "hsdp" in sizes:
        ranks["replicate"], ranks["shard"] = sizes["hsdp"]
    return ParallelPlan(**ranks, sharded="fsdp" in sizes or "hsdp" in sizes)


def _apply_option(plan: ParallelPlan, kind: str, option: str) -> ParallelPlan:
    name, _, value = option.partition("=")
    if kind in ("fsdp", "hsdp") and name in ("full_shard", "shard_grad_op"):
        return dataclasses.replace(plan, reshard=name == "full_shard")
    if kind == "pp" and name in SCHEDULES:
        return dataclasses.replace(plan, schedule=name)
    if kind == "pp" and name == "microbatches" and value.isdecimal() and 1 <= int(value) <= _MAX_RANKS:
        if plan.schedule == "1f1b" and int(value) < plan.stages:
            raise UsageError(
                "1F1B needs as many micro-batches as stages", value=option, hint=f"microbatches={plan.stages}, or gpipe"
            )
        return dataclasses.replace(plan, microbatches=int(value))
    choices = {"pp": "1f1b, gpipe or microbatches=8", "fsdp": "shard_grad_op", "hsdp": "shard_grad_op"}
    raise UsageError(f"--parallel: {kind} has no such option", value=option, hint=choices.get(kind, "leave it out"))


def check_plan(plan: ParallelPlan, spec: TargetSpec, task: str, config: Mapping[str, Any] | None) -> None:
    """Raise UsageError, with a valid plan as hint, if `plan` does not apply to `spec` or to the model.
    `task` and `config` are the model's; `config` is None for models that are not of transformers."""
    text = f"--parallel {spec.parallel}"
    if plan.layers > 1:
        _check_layers(plan, spec, config, text)
    ranks_by_kind = {"tp": plan.tensor, "cp": plan.context, "ulysses": plan.ulysses, "pp": plan.stages}
    inner_kinds = [kind for kind, ranks in ranks_by_kind.items() if ranks > 1]
    if inner_kinds and (config is None or task != "causal-lm"):
        hint = "ddp, fsdp and hsdp take any model"
        raise UsageError(f"{inner_kinds[0]} is for causal language models of transformers", value=text, hint=hint)
    if plan.tensor > 1 and plan.replicate > 1 and not plan.sharded:
        hint = f"tp={plan.tensor},fsdp={plan.replicate}"
        raise UsageError("torch has no DistributedDataParallel of tensor-parallel parameters", value=text, hint=hint)
    if plan.stages > 1 and (spec.mode is Mode.INFERENCE or spec.evaluate or spec.gradient_accumulation > 1):
        hint = "leave out --mode inference, --evaluate and --gradient-accumulation; pp=4:microbatches=16"
        raise UsageError("a pipeline trains, and accumulates by its micro-batches", value=text, hint=hint)
    if spec.quantize is not None:
        raise UsageError("quantized weights are not spread over GPUs here", value=text, hint="leave out --quantize")
    adapter = spec.adapter or (spec.npt and "NPT")
    if adapter and (plan.tensor > 1 or plan.stages > 1):
        raise UsageError(f"{adapter} beside {inner_kinds[-1]} is not here yet", value=text, hint=f"fsdp={plan.size}")
    if plan.sequence > 1 and (spec.lengths is not None or spec.new_tokens is not None):
        flag = "--lengths" if spec.lengths is not None else "--new-tokens"
        raise UsageError("parts of a sequence are of one length", value=f"{text} {flag}", hint=f"leave out {flag}")
    _check_attention(plan, spec, text)
    if config is None:
        return
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    shared_heads = int(config.get("num_key_value_heads") or heads)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    for kind, ranks, divisible, description in (
        ("tp", plan.tensor, math.gcd(heads, shared_heads), f"{heads} heads and {shared_heads} of keys and values"),
        ("ulysses", plan.ulysses, heads, f"{heads} heads"),
    ):
        if divisible % ranks:
            largest = max(n for n in range(1, ranks) if divisible % n == 0)
            raise UsageError(f"{description} cannot be divided by {ranks}", value=text, hint=f"{kind}={largest} can be")
    if plan.stages > layers:
        raise UsageError(f"{layers} layers have no {plan.stages} stages", value=text, hint=f"pp={layers} can be")


def _check_layers(plan: ParallelPlan, spec: TargetSpec, config: Mapping[str, Any] | None, text: str) -> None:
    if spec.mode is not Mode.INFERENCE:
        hint = f"add --mode inference; in training pp={plan.layers} has its stages at work at once"
        raise UsageError("layers over GPUs are for inference", value=text, hint=hint)
    if config is None:
        raise UsageError(f"{DEVICE_MAP} is for models of transformers", value=text, hint="fsdp takes any model")
    if spec.rank is not None:
        raise UsageError("one process has all GPUs", value=f"{text} --rank {spec.rank}", hint="leave out --rank")
    if plan.layers > _GPUS_PER_MACHINE:
        problem = f"one process has the GPUs of one machine, {_GPUS_PER_MACHINE} at the most"
        raise UsageError(problem, value=text, hint=f"--gpus {_GPUS_PER_MACHINE}")


def _check_attention(plan: ParallelPlan, spec: TargetSpec, text: str) -> None:
    kind = spec.attention
    if kind is None:
        return
    value = f"{text} --attention {kind}"
    if plan.context > 1 and kind != "sdpa":
        raise UsageError(
            "ring attention goes round in sdpa alone", value=value, hint="leave out --attention, or ulysses=2"
        )
    if plan.ulysses > 1 and kind == "eager":
        raise UsageError("eager attention does not exchange heads for tokens", value=value, hint="--attention sdpa")
    if kind.startswith("nsa") and (plan.tensor > 1 or plan.sequence > 1 or plan.stages > 1):
        raise UsageError("native sparse attention is not divided among ranks", value=value, hint=f"fsdp={plan.size}")
