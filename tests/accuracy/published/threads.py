"""Figures from threads and reports that say too little of the run, and those of several ranks: listed with the
reason."""

from __future__ import annotations

from tests.accuracy.published.prediction import RANKS, Prediction, not_predicted
from tests.accuracy.published.rows import Row

_REASONS = {
    "pytorch/torchtitan": f"{RANKS}; FSDP over 8, and the figure is the highest of all ranks",
    "meta-pytorch/torchtune#1185": "reserved after 20 steps over Alpaca, padded batch by batch: neither "
    "lengths nor the order of batches are given",
    "huggingface/transformers#33902": f"{RANKS}; neither their number nor the input's length is given",
    "nvidia-cosmos/cosmos-rl#388": f"{RANKS}; reinforcement learning of unknown batch and lengths",
    "huggingface/trl#5575": "the shapes of the small, medium and big model are in a picture: the text does not "
    "give width, vocabulary, batch and length",
    "huggingface/trl#3456": "GRPO with generation: the number of generations, the optimizer, the dtype and the "
    "checkpointing of that run are not given",
}


def listed(row: Row) -> Prediction:
    return not_predicted(next(reason for name, reason in _REASONS.items() if name in row.source))
