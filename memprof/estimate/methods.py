"""The rows and columns of an estimate's table: methods (inference, LoRA, full training, ...) and dtypes of weights."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.spec import DEFAULT_LORA_RANK

# Dtypes of the weights. int8 is bitsandbytes' LLM.int8, int4 its nf4 with double quantization.
WEIGHT_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")

# Formats of checkpoints with quantized linear layers, for inference.
CHECKPOINT_FORMATS = ("fp8", "gptq-int8", "gptq-int4", "awq-int4")

_ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Method:
    """A way to run a model, such as inference or full training: a row of an estimate's table."""

    key: str
    title: str
    kind: str  # weights, inference, lora, full, mixed or adamw-8bit.
    checkpointing: bool = False

    @property
    def trains(self) -> bool:
        """Return whether the method is a training method, with a backward."""
        return self.kind not in ("weights", "inference")

    def supports(self, column: str) -> bool:
        """Return whether the method supports weights in the dtype or format `column`; quantized ones are frozen."""
        if column in CHECKPOINT_FORMATS:
            return self.kind in ("weights", "inference")
        if self.kind in ("full", "adamw-8bit"):
            return column in _ITEMSIZES
        if self.kind == "mixed":  # autocast keeps float32 weights beside products in half precision
            return column in ("float16", "bfloat16")
        return True


METHODS = (
    Method("weights", "weights alone", "weights"),
    Method("inference", "inference", "inference"),
    Method("lora", "LoRA (int8, int4: QLoRA)", "lora"),
    Method("lora-checkpointing", "  with checkpointing", "lora", True),
    Method("full", "full training, AdamW", "full"),
    Method("full-checkpointing", "  with checkpointing", "full", True),
    Method("mixed", "full, AdamW, autocast", "mixed"),
    Method("mixed-checkpointing", "  with checkpointing", "mixed", True),
    Method("adamw-8bit", "full, 8-bit AdamW", "adamw-8bit"),
    Method("adamw-8bit-checkpointing", "  with checkpointing", "adamw-8bit", True),
)

# The kinds of methods that have bands of their own (bands.json).
BANDED_KINDS = ("inference", "lora", "full", "mixed", "adamw-8bit")

METHOD_BY_KEY = {method.key: method for method in METHODS}


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """A method with a dtype of weights, and the options that determine the bytes of its tensors."""

    method: Method
    column: str  # Dtype or quantized format of the weights.
    lora_rank: int = DEFAULT_LORA_RANK
    lora_targets: str | None = None  # Modules to adapt; None: those that PEFT chooses.
    optimizer: str = "adamw"  # Not used by the rows of 8-bit AdamW.
    fused: bool = False  # A fused optimizer makes no temporaries.
    new_tokens: int = 1  # Generated tokens; the forward of the prompt gives the first.
    padded: bool = False  # Batches have an attention mask.
    empties_cache: bool = False  # The program empties the allocator's cache, or uses expandable segments.
    chunked_loss: bool = False  # The loss is computed in chunks of tokens.

    @property
    def quantized(self) -> str:
        """Return the quantization (int8, int4 or a checkpoint format), or "" for weights that are not quantized."""
        return "" if self.column in _ITEMSIZES else self.column

    @property
    def amp(self) -> bool:
        """Return whether autocast is on: in mixed precision, and in QLoRA as in transformers' Trainer."""
        return self.method.kind == "mixed" or (self.method.kind == "lora" and bool(self.quantized))

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element of weights that are not quantized."""
        if self.amp:
            return 4
        return 2 if self.quantized else _ITEMSIZES[self.column]

    def build_spec_fields(self) -> dict[str, object]:
        """Return the fields of TargetSpec for a simulated run of the plan."""
        half_dtype = "float16" if self.column == "float16" else "bfloat16"
        dtype = "bfloat16" if self.quantized else self.column
        fields: dict[str, object] = {"amp": half_dtype} if self.amp else {"dtype": dtype}
        if self.quantized:
            fields["quantize"] = "nf4" if self.quantized == "int4" else self.quantized
        if self.method.kind == "inference":
            return {**fields, "mode": "inference", "new_tokens": self.new_tokens}
        if self.method.kind == "lora":
            fields |= {"adapter": "lora", "lora_rank": self.lora_rank, "lora_targets": self.lora_targets}
        fields["optimizer"] = "adamw-8bit" if self.method.kind == "adamw-8bit" else self.optimizer
        if self.fused:
            fields["optimizer_impl"] = "fused"
        if self.chunked_loss:
            fields["fixes"] = ("chunked-loss",)
        return {**fields, "activation_checkpointing": self.method.checkpointing}
