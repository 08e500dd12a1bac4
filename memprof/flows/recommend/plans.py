"""Plans that a search chooses among: ways to reach a goal, as edits of the spec, each with its loss of precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from memprof.device.catalog import Gpu
from memprof.errors import UsageError
from memprof.fixes.spec_edits import installed_eight_bit_optimizer
from memprof.spec import Mode, TargetSpec

# The fixes that are dimensions of the search; a plan has a field for each.
CHUNKED_LOSS = "chunked-loss"
CHECKPOINTING = "activation-checkpointing"
OFFLOADED_ACTIVATIONS = "cpu-offload-activations"
CPU_OPTIMIZER = "cpu-offload-optimizer"


class Goal(StrEnum):
    """The goal of a recommendation: a kind of training, or inference."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"
    INFER = "infer"


class Activations(StrEnum):
    """The ways to keep activations between forward and backward, quickest first."""

    ON_GPU = "kept"
    OFFLOADED = "in host memory"
    CHECKPOINTED = "checkpointed"
    CHECKPOINTED_OFFLOADED = "checkpointed, in host memory"


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run a goal; `spec` returns the options of the run."""

    goal: Goal
    precision: str  # half, amp, float32, int8 or nf4
    half: str  # half precision of the GPU: bfloat16, or float16 before Ampere
    optimizer: str = "none"  # adamw (fused), adamw-8bit, torchao-adamw-8bit, adamw-cpu (states and step on the host)
    activations: Activations = Activations.ON_GPU
    chunked_loss: bool = False
    precision_loss: str = ""  # the loss of precision, in words; empty: none

    def make_spec(self, base: TargetSpec, micro_batch: int, accumulation: int = 1) -> TargetSpec:
        """Return `base` edited to run in this way.

        `accumulation` above 2 is run as 2: further micro-batches take the same memory as the second.
        """
        changes: dict[str, object] = {"batch_size": micro_batch}
        if self.precision == "amp" or self.goal is Goal.QLORA:
            # QLoRA's layer norms and head are in float32: trainers run it under autocast.
            changes |= {"amp": self.half, "dtype": None}
        else:
            changes["dtype"] = "float32" if self.precision == "float32" else self.half
        if self.precision in ("int8", "nf4"):
            changes["quantize"] = self.precision
        if self.goal is Goal.INFER:
            return base.edit(**changes)
        changes["gradient_accumulation"] = min(accumulation, 2)
        if self.goal in (Goal.LORA, Goal.QLORA):
            changes["adapter"] = "lora"
        changes["optimizer"] = self.optimizer.removesuffix("-cpu")
        if self.optimizer == "adamw":
            changes["optimizer_impl"] = "fused"
        fixes = {
            CPU_OPTIMIZER: self.optimizer == "adamw-cpu",
            CHUNKED_LOSS: self.chunked_loss,
            CHECKPOINTING: self.activations in (Activations.CHECKPOINTED, Activations.CHECKPOINTED_OFFLOADED),
            OFFLOADED_ACTIVATIONS: self.activations in (Activations.OFFLOADED, Activations.CHECKPOINTED_OFFLOADED),
        }
        return base.edit(**changes, fixes=tuple(name for name, is_on in fixes.items() if is_on))

    def format_label(self, micro_batch: int | None = None) -> str:
        """Return a short description for a row of a table."""
        half_labels = {"amp": f"float32 weights under {self.half} autocast", "half": f"{self.half} weights"}
        parts = [half_labels.get(self.precision, f"{self.precision} weights")]
        if self.goal is not Goal.INFER:
            parts.append(OPTIMIZER_TEXTS[self.optimizer])
            if self.activations is not Activations.ON_GPU:
                parts.append(f"activations {self.activations.value}")
            if self.chunked_loss:
                parts.append("chunked loss")
        if micro_batch is not None:
            parts.append(f"batch {micro_batch}" if self.goal is Goal.INFER else f"micro-batch {micro_batch}")
        return ", ".join(parts)

    @property
    def fixes(self) -> tuple[str, ...]:
        """Return the names of the fixes that `memprof.apply` switches on in the model."""
        names = self.make_spec(TargetSpec(model="-"), 1).fixes
        return tuple(name for name in names if name != CPU_OPTIMIZER)

    def minimize_memory(self) -> Plan:
        """Return the plan with all exact fixes that save GPU memory."""
        if self.goal is Goal.INFER:
            return self
        return replace(self, activations=Activations.CHECKPOINTED, chunked_loss=True)

    def list_variants(self) -> list[Plan]:
        """Return the variants of the plan with the same numerics that trade time for memory, quickest first."""
        if self.goal is Goal.INFER:
            return [self]
        return [
            replace(self, activations=activations, chunked_loss=chunked)
            for activations in Activations
            for chunked in ((False, True) if activations is not Activations.CHECKPOINTED_OFFLOADED else (True,))
        ]


OPTIMIZER_TEXTS = {
    "adamw": "fused AdamW",
    "adamw-8bit": "8-bit AdamW (bitsandbytes)",
    "torchao-adamw-8bit": "8-bit AdamW (torchao)",
    "adamw-cpu": "AdamW on the CPU",
    "none": "no optimizer",
}


def get_half_precision(gpu: Gpu) -> str:
    """Return the half precision that the GPU computes in at full speed: bfloat16 from compute capability 8.0 on."""
    return "bfloat16" if gpu.compute_capability >= (8, 0) or "bfloat16" in gpu.peak_flops else "float16"


# Option of each precision.
_OPTION_BY_PRECISION = {
    "half": "--dtype {half}", "amp": "--amp {half}", "float32": "--dtype float32", "int8": "--quantize int8",
    "nf4": "--quantize nf4",
}  # fmt: skip


def list_tiers(goal: Goal, gpu: Gpu, precision: str | None = None, half: str | None = None) -> list[Plan]:
    """Return the tiers of a goal, as plans to be varied by `list_variants`; tiers that give up no precision come first.

    A `precision` keeps only tiers of this precision; `half` defaults to the GPU's. Raises UsageError if the goal
    lacks the precision.
    """
    half = half or get_half_precision(gpu)
    rounded = f"weights in {half} are updated in {half}: small updates are lost"
    states = "states of the optimizer in 8 bits"
    eight_bit = installed_eight_bit_optimizer()
    found: list[Plan]
    if goal is Goal.INFER:
        found = [
            Plan(goal, "half", half),
            Plan(goal, "int8", half, precision_loss="weights and activations of linear layers in 8 bits"),
            Plan(goal, "nf4", half, precision_loss="weights of linear layers in 4 bits"),
        ]
        found += [Plan(goal, "float32", half)] if precision == "float32" else []
    elif goal is Goal.FULL:
        full_weights = [Plan(goal, "amp", half, optimizer) for optimizer in ("adamw", "adamw-cpu")]
        full_weights += [Plan(goal, "amp", half, eight_bit, precision_loss=states)] if eight_bit else []
        half_weights = [
            Plan(goal, "half", half, optimizer, precision_loss=rounded) for optimizer in ("adamw", "adamw-cpu")
        ]
        half_weights += (
            [Plan(goal, "half", half, eight_bit, precision_loss=f"{rounded}; {states}")] if eight_bit else []
        )
        found = [*full_weights, *(half_weights if half == "bfloat16" else [])]
        found += [Plan(goal, "float32", half, "adamw")] if precision == "float32" else []
    elif goal is Goal.LORA:
        found = [Plan(goal, "half", half, "adamw")]
        found += [Plan(goal, precision, half, "adamw")] if precision in ("amp", "float32") else []
    else:
        found = [Plan(goal, "nf4", half, "adamw", precision_loss="frozen weights in 4 bits")]
    if precision is None:
        return found
    kept = [plan for plan in found if plan.precision == precision]
    if not kept:
        raise UsageError(
            f"the goal {goal.value} is not searched with this precision",
            value=_OPTION_BY_PRECISION.get(precision, f"--quantize {precision}").format(half=half),
            hint="give "
            + " or ".join(dict.fromkeys(_OPTION_BY_PRECISION[plan.precision].format(half=half) for plan in found)),
        )
    return kept


# Tokens after the prompt: the first from the prompt's forward, the second from a step with the whole KV cache.
NEW_TOKENS = 2
DEFAULT_CONTEXT = 2048  # tokens


def make_base_spec(goal: Goal, spec: TargetSpec) -> TargetSpec:
    """Return `spec` with the mode of the goal: two training steps, or a prompt and two new tokens."""
    if goal is Goal.INFER:
        return spec.edit(mode=Mode.INFERENCE, steps=1, new_tokens=NEW_TOKENS)
    return spec.edit(mode=Mode.TRAIN, steps=2)


def set_context_length(spec: TargetSpec) -> TargetSpec:
    """Return `spec` with a context length: its own, else 2,048 tokens or the model's maximum if less."""
    from memprof.workload.models import find_source

    length = spec.context_length or min(DEFAULT_CONTEXT, find_source(spec).max_positions or DEFAULT_CONTEXT)
    return spec.edit(context_length=length)
