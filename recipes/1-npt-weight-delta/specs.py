"""What case study 1 is about, as typed specifications."""

from memprof.spec import Mode, TargetSpec

BEFORE = TargetSpec(
    model="llama-3.1-8b",
    dtype="float32",
    batch_size=4,
    context_length=512,
    npt="dense",
    npt_rank=16,
    npt_layers="0",
    steps=1,
    gpu="a100-80gb",
)
"""One component of rank 16 at the report's batch; its d_ffn is 14336."""

AFTER = BEFORE.edit(npt="low-rank")
PER_TOKEN = BEFORE.edit(npt="per-token")

AS_WRITTEN = BEFORE.edit(model="llama-2-7b")
"""The d_ffn of 11008 that the report gives."""

ONE_TOKEN = AS_WRITTEN.edit(npt="per-token", batch_size=1, mode=Mode.INFERENCE)

_BATCH_1 = BEFORE.edit(npt_layers="16-31", batch_size=1)
AMP = AFTER.edit(npt_layers="16-31", batch_size=1, dtype=None, amp="float16")
ROWS = {
    "Original": (
        "> 80 GB, out of memory", BEFORE.edit(npt_layers="16-31"), "a delta for all tokens in each of 16 layers",
    ),
    "Basic Optimization": (
        "~79 GB, out of memory", _BATCH_1.edit(npt="per-token"),
        "a loop keeps the delta of each token for the backward: ~79 GB are the full GPU that refused the next",
    ),
    "+ CPU Offload": (
        "~78 GB", _BATCH_1.edit(npt="per-token"),
        "the same loop on the GPU, each delta computed again in the backward: made by the CPU, one of 224 MiB less; "
        "the report's GPU stays full, and its text does not say of what",
    ),
    "+ FP16": ("~40 GB", AMP, "float16 autocast over float32 weights, and from here on the low-rank form"),
    "+ Fewer Layers": ("~35 GB", AMP.edit(npt_layers="28-31"), "4 components and not 16: the frozen model stays"),
    "Small Model": ("~2 GB", AFTER.edit(model="gpt2", npt_layers=None, batch_size=1), "GPT-2, all 12 layers"),
}  # fmt: skip
"""The report's table of memory: its row, its figure, the run that is meant, and what it is. Which 16 layers the report
does not say; "Basic Optimization" is run as its loop was, without computing deltas again (audit.rows)."""

CONFIGURATIONS = {
    "Llama-8B, 16 layers, batch 4, float32": AFTER.edit(npt_layers="16-31"),
    "the same, batch 1": AFTER.edit(npt_layers="16-31", batch_size=1),
    "the same, float16 AMP": AFTER.edit(npt_layers="16-31", batch_size=1, dtype=None, amp="float16"),
    "batch 1, bfloat16": AFTER.edit(npt_layers="16-31", batch_size=1, dtype="bfloat16"),
    "the same, 4 layers": AFTER.edit(npt_layers="28-31", batch_size=1, dtype="bfloat16"),
    "GPT-2, 12 layers, batch 1, float32": AFTER.edit(model="gpt2", npt_layers=None, batch_size=1),
}
"""The report's table of configurations, each with the low-rank form. The report does not say which 16 layers."""
