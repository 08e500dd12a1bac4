"""Options of the analytical estimate, as fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.estimate.methods import CHECKPOINT_FORMATS
from memprof.spec import BITSANDBYTES_FORMATS, DEFAULT_LORA_RANK, OPTIMIZERS, option, repeat_option

CLOSED_FORM_OPTIMIZERS = tuple(name for name in OPTIMIZERS if name != "adafactor")


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """Options of an estimate; sizes are numbers of tokens, sequences and GPUs."""

    dtype: str | None = repeat_option("dtype", note="The column to look at.", unset="bfloat16")
    quantize: str | None = repeat_option(
        "quantize", note="The same; fp8, gptq and awq are stored checkpoints', for inference.",
        choices=BITSANDBYTES_FORMATS + CHECKPOINT_FORMATS,
    )  # fmt: skip
    context_length: int | None = repeat_option("context_length")
    batch_size: int = repeat_option("batch_size", note="On each GPU.")
    lengths: str | None = repeat_option("lengths")
    empties_cache: bool = option(
        False, "Memory", "With --lengths: torch.cuda.empty_cache() is called in the loop, or segments are expandable."
    )
    new_tokens: int | None = repeat_option("new_tokens", unset="1: the prompt alone")
    lora_rank: int = repeat_option("lora_rank", default=DEFAULT_LORA_RANK)
    lora_targets: str | None = repeat_option("lora_targets")
    optimizer: str = repeat_option("optimizer", choices=CLOSED_FORM_OPTIMIZERS)
    optimizer_impl: str | None = repeat_option("optimizer_impl", choices=("foreach", "fused"))
    gpus: int = repeat_option("gpus", note="Training is spread over them: DDP, ZeRO stages and FSDP.")
    parallel: str | None = repeat_option(
        "parallel", note="In closed form, of the rank that needs most.", unset="DDP, ZeRO stages and FSDP side by side"
    )
    chunked_loss: bool = option(
        False, "Memory", "Training computes its loss some tokens at a time (--fix chunked-loss)."
    )
