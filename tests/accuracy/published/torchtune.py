"""torchtune's tables: the ladder of techniques, recipes of single models, and the LoRA tutorial.

Recipes and configurations are those of github.com/meta-pytorch/torchtune: the ladder at 1814feb1, the other two tables
at the commits that published them (30b8519e8 and 0217d44c2). `get_memory_stats` divides by 2**30 from
September 2024 on (torchtune/training/memory.py), and by 10**9 before (torchtune/utils/memory.py).
"""

from __future__ import annotations

import dataclasses

from memprof.virtual import VirtualGpu
from tests.accuracy import torchtune_recipe
from tests.accuracy.published import torchtune_own
from tests.accuracy.published.libraries import MissingLibraryError
from tests.accuracy.published.prediction import (
    COMPILED,
    GPUS,
    RANKS,
    UNSAID,
    Prediction,
    missing,
    not_predicted,
    run,
)
from tests.accuracy.published.rows import Row
from tests.accuracy.torchtune_recipe import LLAMA_2_7B, LLAMA_3_1_8B, Recipe

_LAYERS = "torch.compile: the simulated layers are eager, and each of 28 keeps 327 MiB more"
_WHOLE = "compiled as a whole (torchtune/training/_compile.py); the simulated model is eager"
_ONE_LAYER = (
    "torch.compile: at the peak one layer is recomputed, and a compiled layer keeps 327 MiB less (row + compile)"
)
_HEAD = (
    "torch.compile: live at the peak, the head's backward, are {}; which of them compiled code writes in place is "
    "not known"
)
_LOSS = _HEAD.format("eight chunks of logits, a gradient of 250 MiB and a float32 copy of 96 MiB for the last norm")
_EMBEDDING = _HEAD.format("two gradients of the tied embedding (751 MiB each), their sum and those of the logits")
_STATES = (
    "torchao's step is always compiled, and what it holds for the 394 million numbers of the tied embedding is not "
    "simulated (one float32 copy of them is 1.47 GiB); in both bitsandbytes and torchao the states alone are 5.88 GiB "
    "smaller than those of the row before, and the published rows differ by 4.2 GiB"
)
_OFFLOADED = Recipe(chunked_loss=True, checkpointing=True, optimizer_in_backward=True, offloading=True)
_LORA = Recipe(chunked_loss=True, checkpointing=True, offloading=True, lora_rank=64)
# Each row adds a technique to those before. All are of compiled code, but for the first two (`OWN`).
LADDER: dict[str, tuple[Recipe, str]] = {
    "+ compile": (Recipe(), _LAYERS),
    "+ chunked CE": (Recipe(chunked_loss=True), _LAYERS),
    "+ activation checkpointing": (Recipe(chunked_loss=True, checkpointing=True), _ONE_LAYER),
    "+ optimizer in backward": (Recipe(chunked_loss=True, checkpointing=True, optimizer_in_backward=True), _EMBEDDING),
    "+ activation offloading": (_OFFLOADED, _EMBEDDING),
    "+ 8-bit AdamW": (dataclasses.replace(_OFFLOADED, eight_bit="torchao"), _STATES),
    "LoRA (no opt-in-bwd, AdamW)": (_LORA, _LOSS),
    "QLoRA (no opt-in-bwd, AdamW)": (dataclasses.replace(_LORA, in_4_bits=True), _LOSS),
}

_ALL = "qkvoghd"  # Every linear layer but the head.
_FLAGS = (
    "compiled, and neither the table nor its pull request (1664) gives this row's flags: whether activations are "
    "recomputed, and how the loss and the optimizer are run"
)


# Rows of which nothing was compiled: length of a text, and whether they are packed. Texts of the baseline are of
# unknown length, which decides nothing: its peak is the end of the backward, as test_training_rows.py shows.
OWN = {"baseline full FT": (256, False), "+ packed": (4096, True)}


def ladder(row: Row) -> Prediction:
    if row.method in OWN:
        try:
            allocated = torchtune_own.full_finetuning(GPUS[row.gpu], *OWN[row.method])
        except MissingLibraryError as absent:
            return not_predicted(f"needs {absent}")
        return Prediction(allocated, code=torchtune_own.SOURCE.title)
    recipe, explanation = LADDER[row.method]
    return _predicted(recipe, row, explanation, COMPILED)


def llama_3_1(row: Row) -> Prediction:
    """Packed rows of 2,048 tokens, two at a time, compiled."""
    if "8x" in row.gpu:
        return not_predicted(RANKS)
    if row.gpu == "1x A6000":
        # Twice what the same recipe takes on the smaller GPU.
        return not_predicted(_FLAGS)
    common = Recipe(length=2048, chunked_loss=True, checkpointing=True, geometry=LLAMA_3_1_8B)
    if row.method == "LoRA":
        # configs/llama3_1/8B_lora_single_device.yaml then: rank 8 on queries and values; checkpointed.
        return _predicted(dataclasses.replace(common, lora_rank=8, lora_on="qv"), row, _WHOLE, COMPILED)
    if row.method == "QLoRA":
        # configs/llama3_1/8B_qlora_single_device.yaml then: rank 8 on all layers but the head; checkpointed.
        return _predicted(dataclasses.replace(common, lora_rank=8, lora_on=_ALL, in_4_bits=True), row, _WHOLE, COMPILED)
    # configs/llama3_1/8B_full_single_device.yaml: PagedAdamW8bit, in the backward; checkpointed.
    full = dataclasses.replace(common, optimizer_in_backward=True, paged=True, eight_bit="bitsandbytes")
    return _predicted(full, row, _WHOLE, COMPILED)


def llama_2(row: Row) -> Prediction:
    """Unpacked rows of 2,048 tokens, four at a time, eager. `get_memory_stats` of then divides by 10**9."""
    if row.gpu != "1x 4090":
        return not_predicted(RANKS)
    common = Recipe(length=2048, packed=False, checkpointing=True, batch_size=4, geometry=LLAMA_2_7B, shifts=True)
    if row.method == "LoRA":
        # configs/llama2/7B_lora_single_device.yaml then: rank 8 on queries and values.
        return _predicted(dataclasses.replace(common, lora_rank=8, lora_on="qv"), row, _NEIGHBOUR, UNSAID)
    if row.method == "QLoRA":
        # configs/llama2/7B_qlora_single_device.yaml then: rank 8 on all layers but the head, and not compiled.
        four_bit = dataclasses.replace(common, lora_rank=8, lora_on=_ALL, in_4_bits=True, unpacks_eagerly=True)
        return _predicted(four_bit, row, _UNPACKING, COMPILED)
    # configs/llama2/7B_full_low_memory.yaml then: PagedAdamW, in the backward.
    return _predicted(dataclasses.replace(common, optimizer_in_backward=True, paged=True), row, _NOT_REPEATED, UNSAID)


_NOT_REPEATED = (
    "the source contradicts itself: its pull request 961 measured 20.2 GB on one GPU and 22.3 on another for this "
    "configuration and length, and the table has 24.1"
)
_NEIGHBOUR = (
    "not confirmed by the source, whose pull request 961 has 20.2 and 22.3 GB for the neighbouring row (full FT, 24.1 "
    "in the table); the table before it, two weeks older, has 17.2 GB for this recipe with two texts"
)
_UNPACKING = (
    "compiled, as the table's footnote says: unpacking 4-bit weights and the layers' temporaries are eager in the "
    "simulation"
)


def tutorial(row: Row) -> Prediction:
    return not_predicted(
        "peak reserved over Alpaca, whose texts are padded batch by batch: it is that of the longest batch, and "
        "the configuration's order is random (shuffle: True, seed: null)"
    )


def readme(row: Row) -> Prediction:
    if "2024-07" in row.source:
        return llama_2(row)
    return ladder(row) if row.model == "Llama-3.2-3B" else llama_3_1(row)


def _predicted(recipe: Recipe, row: Row, explanation: str, differs: str) -> Prediction:
    wanted = [recipe.eight_bit] if recipe.eight_bit else ["bitsandbytes"] if recipe.paged else []
    lacking = missing(*wanted, *(["torchao"] if recipe.in_4_bits else []))
    if lacking:
        return not_predicted(lacking)

    def program(gpu: VirtualGpu) -> None:
        torchtune_recipe.train(recipe)

    return Prediction(run(program, GPUS[row.gpu]).allocated, explanation=explanation, differs=differs)
