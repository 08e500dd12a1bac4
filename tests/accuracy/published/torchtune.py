"""torchtune's tables: the ladder of techniques, recipes of single models, and the LoRA tutorial.

Recipes and configurations are those of github.com/meta-pytorch/torchtune: the ladder at 1814feb1, the other two tables
at the commits that published them (30b8519e8 and 0217d44c2). `get_memory_stats` divides by 2**30 from
September 2024 on (torchtune/training/memory.py), and by 10**9 before (torchtune/utils/memory.py).
"""

from __future__ import annotations

import dataclasses

from memprof.virtual import VirtualGpu
from tests.accuracy import torchtune_recipe
from tests.accuracy.published.prediction import CARDS, RANKS, Prediction, missing, not_predicted, run
from tests.accuracy.published.rows import Row
from tests.accuracy.torchtune_recipe import LLAMA_2_7B, LLAMA_3_1_8B, Recipe

_COMPILED = "torch.compile: the eager layers that are simulated keep 327 MiB more in each of 28 layers"
_ALL_COMPILED = "compiled whole (torchtune/training/_compile.py), where the simulated model is eager"
_LOSS_COMPILED = "published with torch.compile; eager layers are simulated"
_FIRST_STEP = "met by the first step, before AdamW has its state of 0.36 GiB; which step was read is not published"
_FIRST_STEP_4_BITS = (
    "met by the first step, before AdamW has its state of 0.38 GiB; which step was read is not published"
)
_STATES = (
    "unexplained: the states alone are 5.88 GiB smaller than those of the row before, in bitsandbytes and "
    "torchao alike, and the published rows differ by 4.2 GiB"
)
_OFFLOADED = Recipe(chunked_loss=True, checkpointing=True, optimizer_in_backward=True, offloading=True)
_LORA = Recipe(chunked_loss=True, checkpointing=True, offloading=True, lora_rank=64)
LADDER: dict[str, tuple[Recipe, str]] = {
    "baseline full FT": (Recipe(length=256, packed=False), ""),
    "+ packed": (Recipe(), ""),
    "+ compile": (Recipe(), _COMPILED),
    "+ chunked CE": (Recipe(chunked_loss=True), _COMPILED),
    "+ activation checkpointing": (Recipe(chunked_loss=True, checkpointing=True), _LOSS_COMPILED),
    "+ optimizer in backward": (Recipe(chunked_loss=True, checkpointing=True, optimizer_in_backward=True), ""),
    "+ activation offloading": (_OFFLOADED, ""),
    "+ 8-bit AdamW": (dataclasses.replace(_OFFLOADED, eight_bit="torchao"), _STATES),
    "LoRA (no opt-in-bwd, AdamW)": (_LORA, _FIRST_STEP),
    "QLoRA (no opt-in-bwd, AdamW)": (dataclasses.replace(_LORA, in_4_bits=True), _FIRST_STEP_4_BITS),
}
"""Each row adds a technique to those before. Texts of the baseline are of unknown length, which decides nothing: its
peak is the end of the backward (test_baseline_does_not_depend_on_the_length)."""

_ALL = "qkvoghd"
"""Every linear layer but the head."""
_FLAGS = (
    "the flags of this row are not published: nothing says whether activations are recomputed, and how the loss is run"
)


def ladder(row: Row) -> Prediction:
    recipe, explanation = LADDER[row.method]
    return _predicted(recipe, row, explanation)


def llama_3_1(row: Row) -> Prediction:
    """Packed rows of 2,048 tokens, two at a time, compiled."""
    if "8x" in row.gpu:
        return not_predicted(RANKS)
    if row.gpu == "1x A6000":
        # Twice what the same recipe takes on the smaller card.
        return not_predicted(_FLAGS)
    common = Recipe(length=2048, chunked_loss=True, checkpointing=True, geometry=LLAMA_3_1_8B)
    if row.method == "LoRA":
        # configs/llama3_1/8B_lora_single_device.yaml then: rank 8 on queries and values; checkpointed.
        return _predicted(dataclasses.replace(common, lora_rank=8, lora_on="qv"), row, _ALL_COMPILED)
    if row.method == "QLoRA":
        # configs/llama3_1/8B_qlora_single_device.yaml then: rank 8 on all layers but the head; checkpointed.
        return _predicted(dataclasses.replace(common, lora_rank=8, lora_on=_ALL, in_4_bits=True), row, _ALL_COMPILED)
    # configs/llama3_1/8B_full_single_device.yaml: PagedAdamW8bit, in the backward; checkpointed.
    full = dataclasses.replace(common, optimizer_in_backward=True, paged=True, eight_bit="bitsandbytes")
    return _predicted(full, row, _ALL_COMPILED)


def llama_2(row: Row) -> Prediction:
    """Unpacked rows of 2,048 tokens, four at a time, eager. `get_memory_stats` of then divides by 10**9."""
    if row.gpu != "1x 4090":
        return not_predicted(RANKS)
    common = Recipe(length=2048, packed=False, checkpointing=True, batch_size=4, geometry=LLAMA_2_7B, shifts=True)
    if row.method == "LoRA":
        # configs/llama2/7B_lora_single_device.yaml then: rank 8 on queries and values.
        return _predicted(dataclasses.replace(common, lora_rank=8, lora_on="qv"), row, _NEIGHBOUR)
    if row.method == "QLoRA":
        # configs/llama2/7B_qlora_single_device.yaml then: rank 8 on all layers but the head, and not compiled.
        four_bit = dataclasses.replace(common, lora_rank=8, lora_on=_ALL, in_4_bits=True, unpacks_eagerly=True)
        return _predicted(four_bit, row, _NEIGHBOUR)
    # configs/llama2/7B_full_low_memory.yaml then: PagedAdamW, in the backward.
    return _predicted(dataclasses.replace(common, optimizer_in_backward=True, paged=True), row, _NOT_REPEATED)


_NOT_REPEATED = (
    "the project itself could not repeat this figure: its pull request 961 has 20.2 GB, for 4 rows of 2,048 tokens each"
)


_NEIGHBOUR = "unexplained; the project itself could not repeat the neighbouring row (full FT)"


def tutorial(row: Row) -> Prediction:
    return not_predicted(
        "peak reserved over Alpaca, whose texts are padded batch by batch: it is that of the longest batch, and "
        "neither its length nor the order of batches is published"
    )


def readme(row: Row) -> Prediction:
    if "2024-07" in row.source:
        return llama_2(row)
    return ladder(row) if row.model == "Llama-3.2-3B" else llama_3_1(row)


def _predicted(recipe: Recipe, row: Row, explanation: str) -> Prediction:
    wanted = [recipe.eight_bit] if recipe.eight_bit else ["bitsandbytes"] if recipe.paged else []
    lacking = missing(*wanted, *(["torchao"] if recipe.in_4_bits else []))
    if lacking:
        return not_predicted(lacking)

    def program(gpu: VirtualGpu) -> None:
        torchtune_recipe.train(recipe)

    return Prediction(run(program, CARDS[row.gpu]).allocated, explanation=explanation)
