"""The report's table of stages beside the same readings here; its other runs: kinds of attention, and two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import transformers
from specs import ATTENTIONS, BEFORE, CHUNK, GEOMETRY, PLANS, TOKENS, VOCABULARY

import memprof
from memprof.flows.profile import profile
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.units import GIB, format_bytes

COPIES = 2 * TOKENS * (GEOMETRY["num_attention_heads"] - GEOMETRY["num_key_value_heads"]) * GEOMETRY["head_dim"] * 2
"""Bytes of keys and values in bfloat16 that are copied so that each head of queries has its own."""


class Reading(NamedTuple):
    """One row of the report's table: its figure in "GB", which are GiB, what is here, and why they differ."""

    after: str
    report: str
    num_bytes: int
    why: str


def readings(caches_bytes: int, loop: Report) -> list[Reading]:
    """The report's five figures, as its profiler read them, on a model of transformers with the report's sizes.

    Its profiler calls the embedding and the first layer by themselves, with gradients and without checkpoints, holds on
    to what they give, and runs the whole model without gradients after that.

    Args:
        caches_bytes: of the cosines and sines that the report's model keeps in each layer, and this one does not.
        loop: a training forward and backward with the report's loop over chunks.
    """
    config = transformers.LlamaConfig(**GEOMETRY, max_position_embeddings=TOKENS, use_cache=False)
    with memprof.virtual_gpu(BEFORE.gpu, alloc_conf=BEFORE.alloc_conf) as gpu:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
            ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        sizes = [gpu.allocated_bytes]
        hidden = model.model.embed_tokens(ids)
        sizes.append(gpu.allocated_bytes)
        turned = model.model.rotary_emb(hidden, torch.arange(TOKENS, device="cuda")[None])
        with torch.autocast("cuda", torch.bfloat16):
            hidden = model.model.layers[0](hidden, position_embeddings=turned)
        sizes.append(gpu.allocated_bytes)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=ids).logits
        sizes.append(gpu.allocated_bytes)
        del hidden, logits
    parameters = sum(parameter.numel() for parameter in model.parameters())
    own, kept = sizes[2] - sizes[1], TOKENS * VOCABULARY * 2
    layers_end = next(row for row in reversed(loop.stages) if row.name == "final norm").allocated_bytes
    loss_end = next(row for row in reversed(loop.stages) if row.name == "loss").allocated_bytes
    with_caches = [size + caches_bytes for size in sizes]
    return [
        Reading(
            "the model is made", "8.72", with_caches[0],
            f"{parameters / 1e9:.2f}B parameters, and rotary caches of {format_bytes(caches_bytes)}, added here",
        ),
        Reading("the embedding", "9.35", with_caches[1], "hidden states of 640 MiB, and token numbers of 1 MiB"),
        Reading(
            "the first layer", "25.87", with_caches[2],
            f"{format_bytes(own)} that autograd keeps of one layer run by itself, without a checkpoint; the report's "
            f"copies keys and values for each of its heads, up to {format_bytes(COPIES)} more",
        ),
        Reading(
            "the whole forward", "62.97", with_caches[3],
            f"without gradients: the {format_bytes(kept)} of logits come on top of what the layer left; none of it is "
            "activations of all layers",
        ),
        Reading(
            "the loss in chunks", "~66", loss_end,
            f"here a training forward with checkpoints, {format_bytes(layers_end)} before the loss; a loop keeps "
            f"{format_bytes(loss_end - layers_end)}. What the report read is not said: what the first layer "
            f"left, and one chunk's float32 logits, would be {format_bytes(with_caches[2] + CHUNK * VOCABULARY * 4)}",
        ),
    ]  # fmt: skip


def kinds() -> Iterator[tuple[str, Report]]:
    """A forward and backward with each kind of attention, checkpoints and the loss in chunks."""
    for kind in ATTENTIONS:
        yield kind, profile(_chunked(attention=kind))[1]


def gpus() -> Iterator[tuple[str, Report]]:
    """Two steps with AdamW on two GPUs: the document of the rank that takes most."""
    for plan in PLANS:
        yield plan, profile(_chunked(gpus=2, parallel=plan, steps=2))[1]


def _chunked(**changes: object) -> TargetSpec:
    return BEFORE.edit(fixes=(f"chunked-loss={CHUNK}",), **changes)


def holds(reading: Reading) -> str:
    """Whether the report's figure is this one, to one in a hundred."""
    figure = float(reading.report.lstrip("~"))
    return "holds" if abs(reading.num_bytes / GIB - figure) < 0.01 * figure else "differs"
