"""The truth cases: small, real runs that are simulated here and recorded on a real GPU by `make truth`.

`CASES` names each run and its spec; models that the catalog does not have are in models.py. Sizes are such that every
case fits a GPU of 24 GB, and all of them together are simulated in under a minute.
"""

from __future__ import annotations

from pathlib import Path

from memprof.spec import Mode, TargetSpec

MODELS = Path(__file__).resolve().parent / "models.py"
_LLAMA = TargetSpec(model="llama-3.2-1b", dtype="bfloat16", context_length=1024, attention="sdpa")
_GPT2 = TargetSpec(model="gpt2", dtype="float32", context_length=512, batch_size=4)


def _own(factory: str, **settings: object) -> TargetSpec:
    return TargetSpec(model=f"{MODELS}:{factory}", **settings)  # type: ignore[arg-type]


# By the name that the files of a recording have. The order is that of importance, for where time is short: first come
# those that have what none before them has.
CASES: dict[str, TargetSpec] = {
    "gpt2-float32": _GPT2,
    "llama-1b-sdpa": _LLAMA,
    "llama-1b-sdpa-checkpointing": _LLAMA.edit(activation_checkpointing=True, batch_size=2),
    "convolutional": _own("convolutional", batch_size=8),
    "gpt2-amp-float16": _GPT2.edit(dtype=None, amp="float16"),
    "gpt2-adamw-fused": _GPT2.edit(optimizer_impl="fused"),
    "qwen3-0.6b-generation": TargetSpec(
        model="qwen3-0.6b",
        dtype="bfloat16",
        context_length=512,
        mode=Mode.INFERENCE,
        optimizer="none",
        new_tokens=32,
        steps=1,
    ),
    "llama-1b-eager": _LLAMA.edit(attention="eager"),
    "mixture-of-experts": _own("mixture_of_experts", dtype="bfloat16", context_length=512),
    "t5-small": TargetSpec(model="t5-small", context_length=256, batch_size=4),
    "vit-base": TargetSpec(model="vit-base", batch_size=8),
    "bert-base": TargetSpec(model="bert-base-uncased", context_length=256, batch_size=8),
    "gpt2-amp-bfloat16": _GPT2.edit(dtype=None, amp="bfloat16"),
    "gpt2-adamw-single": _GPT2.edit(optimizer_impl="single"),
    "gpt2-accumulation": _GPT2.edit(gradient_accumulation=4, batch_size=1),
    "llama-1b-chunked-loss": _own("llama_with_chunked_loss", dtype="bfloat16", context_length=1024),
    "llama-1b-eager-checkpointing": _LLAMA.edit(attention="eager", activation_checkpointing=True, batch_size=2),
    "llama-1b-lora": _LLAMA.edit(adapter="lora", lora_rank=16),
    "pythia-70m": TargetSpec(model="pythia-70m", dtype="float32", context_length=1024, batch_size=2),
}
