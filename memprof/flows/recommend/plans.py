"""Plans that a search chooses among: precision, optimizer and memory savings for a goal, and the loss of precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from memprof.device.catalog import Gpu
from memprof.errors import UsageError
from memprof.fixes.spec_edits import find_8_bit_optimizer
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
    """One way to run a goal: precision, optimizer and memory savings; `make_spec` returns the options of the run."""

    goal: Goal
    precision: str  # half, amp, float32, int8 or nf4
    half: str  # half precision of the GPU: bfloat16, or float16 before Ampere
    optimizer: str = "none"  # adamw (fused), adamw-8bit, torchao-adamw-8bit, adamw-cpu (states and step on the host)
    activations: Activations = Activations.ON_GPU
    chunked_loss: bool = False
    precision_loss: str = ""  # the loss of precision, in words; empty: none

    def make_spec(self, base_spec: TargetSpec, micro_batch: int, accumulation: int = 1) -> TargetSpec:
        """Return `base_spec` with the options of this plan.

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
            return base_spec.edit(**changes)
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
        return base_spec.edit(**changes, fixes=tuple(name for name, is_on in fixes.items() if is_on))

    def format_label(self, micro_batch: int | None = None) -> str:
        """Return a short description for a row of a table."""
        half_labels = {"amp": f"float32 weights under {self.half} autocast", "half": f"{self.half} weights"}
        parts = [half_labels.get(self.precision, f"{self.precision} weights")]
        if self.goal is not Goal.INFER:
            parts.append(OPTIMIZER_LABELS[self.optimizer])
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
            replace(self, activations=activations, chunked_loss=chunked_loss)
            for activations in Activations
            for chunked_loss in ((False, True) if activations is not Activations.CHECKPOINTED_OFFLOADED else (True,))
        ]


OPTIMIZER_LABELS = {
    "adamw": "fused AdamW",
    "adamw-8bit": "8-bit AdamW (bitsandbytes)",
    "torchao-adamw-8bit": "8-bit AdamW (torchao)",
    "adamw-cpu": "AdamW on the CPU",
    "none": "no optimizer",
}


# Option of each precision.
_OPTION_BY_PRECISION = {
    "half": "--dtype {half}", "amp": "--amp {half}", "float32": "--dtype float32", "int8": "--quantize int8",
    "nf4": "--quantize nf4",
}  # fmt: skip


def list_tiers(goal: Goal, gpu: Gpu, precision: str | None = None, half: str | None = None) -> list[Plan]:
    """Return the tiers of a goal: a plan for each precision and optimizer, those without loss of precision first.

    `precision` selects tiers of one precision; `half` is the half-precision dtype (None: the GPU's). Raises UsageError
    if the goal has no such tier.
    """
    half = half or gpu.half_precision
    update_loss = f"weights in {half} are updated in {half}: small updates are lost"
    state_loss = "states of the optimizer in 8 bits"
    eight_bit = find_8_bit_optimizer()
    tiers: list[Plan]
    if goal is Goal.INFER:
        tiers = [
            Plan(goal, "half", half),
            Plan(goal, "int8", half, precision_loss="weights and activations of linear layers in 8 bits"),
            Plan(goal, "nf4", half, precision_loss="weights of linear layers in 4 bits"),
        ]
        tiers += [Plan(goal, "float32", half)] if precision == "float32" else []
    elif goal is Goal.FULL:
        amp_tiers = [Plan(goal, "amp", half, optimizer) for optimizer in ("adamw", "adamw-cpu")]
        amp_tiers += [Plan(goal, "amp", half, eight_bit, precision_loss=state_loss)] if eight_bit else []
        half_tiers = [
            Plan(goal, "half", half, optimizer, precision_loss=update_loss) for optimizer in ("adamw", "adamw-cpu")
        ]
        half_tiers += (
            [Plan(goal, "half", half, eight_bit, precision_loss=f"{update_loss}; {state_loss}")] if eight_bit else []
        )
        tiers = [*amp_tiers, *(half_tiers if half == "bfloat16" else [])]
        tiers += [Plan(goal, "float32", half, "adamw")] if precision == "float32" else []
    elif goal is Goal.LORA:
        tiers = [Plan(goal, "half", half, "adamw")]
        tiers += [Plan(goal, precision, half, "adamw")] if precision in ("amp", "float32") else []
    else:
        tiers = [Plan(goal, "nf4", half, "adamw", precision_loss="frozen weights in 4 bits")]
    if precision is None:
        return tiers
    selected_tiers = [plan for plan in tiers if plan.precision == precision]
    if not selected_tiers:
        raise UsageError(
            f"the goal {goal.value} is not searched with this precision",
            value=_OPTION_BY_PRECISION.get(precision, f"--quantize {precision}").format(half=half),
            hint="give "
            + " or ".join(dict.fromkeys(_OPTION_BY_PRECISION[plan.precision].format(half=half) for plan in tiers)),
        )
    return selected_tiers


# Tokens after the prompt: the first from the prompt's forward, the second from a step with the whole KV cache.
NEW_TOKENS = 2
DEFAULT_CONTEXT = 2048  # tokens


def make_base_spec(goal: Goal, spec: TargetSpec) -> TargetSpec:
    """Return `spec` set to the goal's mode: two training steps, or inference of a prompt and two new tokens."""
    if goal is Goal.INFER:
        return spec.edit(mode=Mode.INFERENCE, steps=1, new_tokens=NEW_TOKENS)
    return spec.edit(mode=Mode.TRAIN, steps=2)


def set_context_length(spec: TargetSpec) -> TargetSpec:
    """Return `spec` with a context length: its own if set, else 2,048 tokens, or the model's maximum if smaller."""
    from memprof.workload.models import find_source

    length = spec.context_length or min(DEFAULT_CONTEXT, find_source(spec).max_positions or DEFAULT_CONTEXT)
    return spec.edit(context_length=length)
