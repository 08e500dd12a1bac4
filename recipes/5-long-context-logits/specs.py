"""What case study 5 is about: a 4B model, 131,072 tokens, checkpointed layers, one GPU of 94.97 GiB."""

from memprof.spec import TargetSpec

TOKENS, VOCABULARY, HIDDEN = 131_072, 151_936, 2560
CHUNK = 4096
"""Tokens whose logits the report computes at a time."""
LENGTHS = (4096, 40_000, TOKENS)
"""Of the report's table on the automatic threshold."""

BEFORE = TargetSpec(
    model="qwen3-4b",
    dtype="bfloat16",
    context_length=TOKENS,
    activation_checkpointing=True,
    steps=1,
    gpu="rtx-pro-6000",
    alloc_conf="",
)
"""A model of the report's sizes with transformers' own loss, which copies the logits to float32. The report's losses,
before and after, are in losses.py."""

SMALL = {
    "vocab_size": 32_000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""The same architecture, small enough to be run for real."""
SMALL_TOKENS, SMALL_CHUNK = 1024, 128

GEOMETRY = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 80,
    "intermediate_size": 9216,
    "vocab_size": VOCABULARY,
}
"""The report's own model, as its public program has it (models named 4B in nngabe/nsa_optim, config.py)."""
ATTENTIONS = ("eager", "sdpa", "sliding", "linear", "nsa")
"""Of the runs side by side; the report's program knows dense attention and one that it calls nsa."""
PLANS = ("fsdp", "ulysses=2")
"""Two GPUs as the report recommends them, and the sequence parallelism that it leaves to the future."""
