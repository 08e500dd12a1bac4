"""What case study 2 is about, as typed specifications."""

from pathlib import Path

from memprof.spec import TargetSpec

BEFORE = TargetSpec(
    model="pythia-70m",
    dtype="float32",
    batch_size=32,
    context_length=128,
    vocab_size=50_000,
    gpu="a100-80gb",
)
"""The report's batch on its 80 GB GPU, with one token for every word: 50 thousand in its reckoning."""

AFTER = BEFORE.edit(vocab_size=10_000)
"""The report's cap."""

BATCH_OF_8 = BEFORE.edit(batch_size=8)
"""What the report says is out of memory."""

EAGER = AFTER.edit(attention="eager")
"""Attention scores kept in memory, which sparse attention (--sparse) would be there to save."""

NOT_CAPPED = AFTER.edit(model=f"{Path(__file__).with_name('model.py')}:every_word")
"""The fault itself: 10,000 words are requested, and the code takes all that the corpus has."""

CAPPED = AFTER.edit(model=f"{Path(__file__).with_name('model.py')}:most_frequent")
