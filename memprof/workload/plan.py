"""Plan to spread a run over several GPUs: parses and checks `--parallel` before a model is built.

    ddp   fsdp   fsdp:shard_grad_op   hsdp:2x4   tp=2,fsdp=4   cp=2   ulysses=2   pp=4:1f1b:microbatches=8

The parts are separated by commas. The product of their degrees is the number of ranks; one part may omit its degree,
and gets the remaining ranks. The mesh has torchtitan's order: pipeline, replicate, shard, context, tensor
(distributed/parallel_dims.py), so that the ranks of a tensor-parallel group are adjacent.
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
_GPUS_OF_A_MACHINE = 8
_MAX_RANKS = 1 << 20
_FORMS = (
    "ddp, fsdp, fsdp:shard_grad_op, hsdp:2x4, tp=2, cp=2, ulysses=2, pp=4:1f1b:microbatches=8, with commas between; "
    "or device-map"
)


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """Numbers of ranks along each direction; 1: it is not there."""

    stages: int = 1  # of a pipeline
    replicate: int = 1  # of data parallelism: each rank has all parameters, or those of its shards
    shard: int = 1  # of fully_shard
    context: int = 1  # of torch's context_parallel (ring attention)
    ulysses: int = 1  # of sequence parallelism: each has a part of the sequence, and in attention a part of the heads
    tensor: int = 1  # of tensor parallelism
    sharded: bool = False  # whether parameters are sharded, be it over one rank
    reshard: bool = True  # whether they are released after the forward (FULL_SHARD; else SHARD_GRAD_OP)
    layers: int = 1  # GPUs of one process that has some of the layers on each
    schedule: str = "1f1b"
    microbatches: int = 1  # of a pipeline, in a step

    @property
    def size(self) -> int:
        """Return the number of all ranks."""
        return self.stages * self.data * self.sequence * self.tensor * self.layers

    @property
    def data(self) -> int:
        """Return the number of ranks with batches of their own."""
        return self.replicate * self.shard

    @property
    def sequence(self) -> int:
        """Return the number of ranks that share one sequence."""
        return self.context * self.ulysses

    @property
    def sharing(self) -> int:
        """Return ranks that work on the same sequences."""
        return self.sequence * self.tensor

    def text(self) -> str:
        """Return it as `--parallel` has it: for as many ranks, `parse_plan` reads the same plan of it."""
        if self.layers > 1:
            return DEVICE_MAP
        whole = f"pp={self.stages}:{self.schedule}:microbatches={self.microbatches}"
        parts = [whole] if self.stages > 1 else []
        named = {"cp": self.context, "ulysses": self.ulysses, "tp": self.tensor}
        parts += [f"{kind}={ranks}" for kind, ranks in named.items() if ranks > 1]
        if self.sharded:
            kind = f"hsdp:{self.replicate}x{self.shard}" if self.replicate > 1 else "fsdp"
            parts.append(kind + ("" if self.reshard else ":shard_grad_op"))
        elif self.replicate > 1 or not parts:
            parts.append("ddp")
        return ",".join(parts)

    def kinds_of_ranks(self) -> list[tuple[int, range]]:
        """Return ranks that do the same, up to the padding of shards, which are a pipeline's stage each; and of each
        kind one: the first, or the last where attention goes round, which merges a part of every other rank."""
        each = self.size // self.stages
        kinds = [range(stage * each, (stage + 1) * each) for stage in range(self.stages)]
        return [(kind[-1 if self.context > 1 else 0], kind) for kind in kinds]


def parse_plan(text: str, gpus: int) -> ParallelPlan:
    """Return the plan that `text` names for `gpus` ranks; raise UsageError with the nearest valid plan if invalid."""
    if text.strip().lower() == DEVICE_MAP:
        if gpus == 1:
            raise UsageError("layers are spread over several GPUs", value=f"--parallel {text}", hint="--gpus 2")
        return ParallelPlan(layers=gpus)
    sizes: dict[str, tuple[int, ...]] = {}
    options_by_kind: dict[str, list[str]] = {}
    for part in text.lower().split(","):
        head, *options = part.strip().split(":")
        kind, _, number = head.partition("=")
        if kind == DEVICE_MAP:
            raise UsageError(f"--parallel: {DEVICE_MAP} stands alone", value=text, hint=f"--parallel {DEVICE_MAP}")
        if kind not in KINDS:
            close = nearest(kind, KINDS)
            raise UsageError(
                "--parallel: unknown part", value=repr(kind), hint=f"did you mean {close}?" if close else _FORMS
            )
        if kind in sizes:
            raise UsageError("--parallel: a part is given twice", value=kind, hint="give one")
        if kind == "hsdp" and not number and options:
            number = options.pop(0)
        sizes[kind], options_by_kind[kind] = _parse_numbers(kind, number), options
    data = [kind for kind in ("ddp", "fsdp", "hsdp") if kind in sizes]
    for both in (data, [kind for kind in ("cp", "ulysses") if kind in sizes]):
        if len(both) > 1:
            given = ", ".join(both)
            raise UsageError("--parallel: parts exclude each other", value=given, hint=f"give one of {given}")
    plan = _make_plan(sizes, gpus, text)
    for kind, options in options_by_kind.items():
        for option in options:
            plan = _apply_option(plan, kind, option)
    if plan.stages > 1 and "microbatches" not in text:
        plan = dataclasses.replace(plan, microbatches=2 * plan.stages)
    return plan


def _parse_numbers(kind: str, number: str) -> tuple[int, ...]:
    parts = (number.split("x") if kind == "hsdp" else [number]) if number else []
    are_numbers = all(part.isdecimal() and 1 <= int(part) <= _MAX_RANKS for part in parts)
    if not are_numbers or len(parts) not in ((2,) if kind == "hsdp" else (0, 1)):
        form = "hsdp:2x4 are two replicas of four shards" if kind == "hsdp" else f"{kind}=2"
        raise UsageError("--parallel: not a number of ranks", value=f"{kind}={number}", hint=form)
    return tuple(map(int, parts))


def _make_plan(sizes: Mapping[str, tuple[int, ...]], gpus: int, text: str) -> ParallelPlan:
    given = math.prod(number for numbers in sizes.values() for number in numbers)
    unsized_kinds = [kind for kind, numbers in sizes.items() if not numbers]
    if len(unsized_kinds) > 1:
        raise UsageError(
            "--parallel: two parts without a number",
            value=", ".join(unsized_kinds),
            hint=f"{unsized_kinds[0]}=2, for instance",
        )
    left, rest = divmod(gpus, given)
    if rest or (left != 1 and not unsized_kinds):
        hint = f"--gpus {given}"
        if not rest and not {"ddp", "fsdp", "hsdp"} & sizes.keys():
            hint += f", or --parallel {text},fsdp={left}"
        raise UsageError(f"the plan is for {given} ranks, and there are {gpus}", value=f"--parallel {text}", hint=hint)
    field_of = {
        "pp": "stages",
        "ddp": "replicate",
        "fsdp": "shard",
        "cp": "context",
        "ulysses": "ulysses",
        "tp": "tensor",
    }
    ranks: dict[str, Any] = {
        field_of[kind]: numbers[0] if numbers else left for kind, numbers in sizes.items() if kind != "hsdp"
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
    offered = {"pp": "1f1b, gpipe or microbatches=8", "fsdp": "shard_grad_op", "hsdp": "shard_grad_op"}
    raise UsageError(f"--parallel: {kind} has no such option", value=option, hint=offered.get(kind, "leave it out"))


def check_plan(plan: ParallelPlan, spec: TargetSpec, task: str, config: Mapping[str, Any] | None) -> None:
    """Raise UsageError, with a valid plan, if the model (`config` None: not of transformers) cannot be
    spread this way."""
    text = f"--parallel {spec.parallel}"
    if plan.layers > 1:
        _check_layers(plan, spec, config, text)
    ranks_of = {"tp": plan.tensor, "cp": plan.context, "ulysses": plan.ulysses, "pp": plan.stages}
    inner = [kind for kind, ranks in ranks_of.items() if ranks > 1]
    if inner and (config is None or task != "causal-lm"):
        hint = "ddp, fsdp and hsdp take any model"
        raise UsageError(f"{inner[0]} is for causal language models of transformers", value=text, hint=hint)
    if plan.tensor > 1 and plan.replicate > 1 and not plan.sharded:
        hint = f"tp={plan.tensor},fsdp={plan.replicate}"
        raise UsageError("torch has no DistributedDataParallel of tensor-parallel parameters", value=text, hint=hint)
    if plan.stages > 1 and (spec.mode is Mode.INFERENCE or spec.evaluate or spec.gradient_accumulation > 1):
        hint = "leave out --mode inference, --evaluate and --gradient-accumulation; pp=4:microbatches=16"
        raise UsageError("a pipeline trains, and accumulates by its micro-batches", value=text, hint=hint)
    if spec.quantize is not None:
        raise UsageError("quantized weights are not spread over GPUs here", value=text, hint="leave out --quantize")
    whole = spec.adapter or (spec.npt and "NPT")
    if whole and (plan.tensor > 1 or plan.stages > 1):
        raise UsageError(f"{whole} beside {inner[-1]} is not here yet", value=text, hint=f"fsdp={plan.size}")
    if plan.sequence > 1 and (spec.lengths is not None or spec.new_tokens is not None):
        flag = "--lengths" if spec.lengths is not None else "--new-tokens"
        raise UsageError("parts of a sequence are of one length", value=f"{text} {flag}", hint=f"leave out {flag}")
    _check_attention(plan, spec, text)
    if config is None:
        return
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    shared_heads = int(config.get("num_key_value_heads") or heads)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    for kind, ranks, number, what in (
        ("tp", plan.tensor, math.gcd(heads, shared_heads), f"{heads} heads and {shared_heads} of keys and values"),
        ("ulysses", plan.ulysses, heads, f"{heads} heads"),
    ):
        if number % ranks:
            fits = max(n for n in range(1, ranks) if number % n == 0)
            raise UsageError(f"{what} cannot be divided by {ranks}", value=text, hint=f"{kind}={fits} can be")
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
    if plan.layers > _GPUS_OF_A_MACHINE:
        problem = f"one process has the GPUs of one machine, {_GPUS_OF_A_MACHINE} at the most"
        raise UsageError(problem, value=text, hint=f"--gpus {_GPUS_OF_A_MACHINE}")


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
