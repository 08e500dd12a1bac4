"""The moments that may be the peak of a run, with the live bytes of each by formula.

The estimate is the moment with the most live bytes. Its terms are named like the ledger's categories. Moments of
training are in training.py.
"""

from __future__ import annotations

import dataclasses

from memprof.estimate.geometry import EstimatedModel
from memprof.estimate.layers import DecoderLayer
from memprof.estimate.methods import MethodPlan
from memprof.estimate.projections import LayerSettings
from memprof.estimate.ranks import SINGLE_GPU, Rank
from memprof.estimate.state import (
    CUBLAS_WORKSPACE,
    PeakMoment,
    StaticMemory,
    build_settings,
    compute_static_memory,
    sum_position_bytes,
)
from memprof.estimate.tape import Tape
from memprof.estimate.training import TrainingMoments


def list_moments(
    subject: EstimatedModel, plan: MethodPlan, batch_size: int, context_length: int, rank: Rank = SINGLE_GPU
) -> tuple[PeakMoment, ...]:
    """Return the moments of a run that may be its peak, on `rank`; the method "weights" has only loaded weights."""
    memory = compute_static_memory(subject, plan)
    if plan.method.kind == "weights":
        return (PeakMoment("loaded", {"parameters": memory.parameters}),)
    assert subject.geometry is not None
    setting = build_settings(subject.geometry, plan, batch_size, context_length)
    if plan.method.kind == "inference":
        return (_build_prompt_moment(setting, memory), _build_decoding_moment(setting, memory, plan.new_tokens))
    return tuple(TrainingMoments(setting, plan, memory, rank).list_moments())


def _build_prompt_moment(setting: LayerSettings, memory: StaticMemory) -> PeakMoment:
    """Return the moment in the prompt's last layer, with the KV cache of all layers and this layer's tensors."""
    g = setting.geometry
    tape = Tape(setting.tokens, training=False)
    hidden = tape.add_input(g.hidden, setting.stream_itemsize, needs_grad=False, name="hidden states")
    DecoderLayer(tape, setting).record(hidden)
    # The model's forward holds the embedding's output and the layer's input.
    outer_bytes = 2 * hidden.num_bytes + sum_position_bytes(setting)
    return _build_inference_moment("last layer of the prompt", setting, memory, tape.peak + outer_bytes)


def _build_decoding_moment(setting: LayerSettings, memory: StaticMemory, new_tokens: int) -> PeakMoment:
    """Return the moment at the last generated token, with the longest KV cache and aten.cat's copy of one layer's."""
    g = setting.geometry
    last_setting = dataclasses.replace(setting, context_length=setting.context_length + new_tokens - 1)
    cat_bytes = g.kv_width * last_setting.tokens * setting.compute_itemsize
    token_bytes = setting.batch_size * (g.vocab + 4 * g.hidden + 3 * g.intermediate) * setting.compute_itemsize
    return _build_inference_moment("last token", last_setting, memory, cat_bytes + token_bytes)


def _build_inference_moment(name: str, setting: LayerSettings, memory: StaticMemory, activations: int) -> PeakMoment:
    terms = {"parameters": memory.parameters, "KV cache": sum_kv_cache(setting), "activations": activations}
    return PeakMoment(name, {**terms, "library workspace": CUBLAS_WORKSPACE})


def sum_kv_cache(setting: LayerSettings) -> int:
    """Return the bytes of the KV cache for all tokens and layers, as without a sliding window."""
    g = setting.geometry
    return 2 * g.layers * g.kv_width * setting.tokens * setting.compute_itemsize
