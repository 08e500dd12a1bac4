"""Formulas for the live bytes at each moment that may be the peak of a run.

The estimate is the largest sum over all moments. Its terms have the names of the ledger's categories. training.py has
the moments of training.
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
    """Return all moments that may be the peak. A model without a geometry has only its weights."""
    memory = compute_static_memory(subject, plan)
    if plan.method.kind == "weights":
        return (PeakMoment("loaded", {"parameters": memory.parameters}),)
    assert subject.geometry is not None
    setting = build_settings(subject.geometry, plan, batch_size, context_length)
    if plan.method.kind == "inference":
        return (_prompt_moment(setting, memory), _decoding_moment(setting, memory, plan.new_tokens))
    return tuple(TrainingMoments(setting, plan, memory, rank).list_moments())


def _prompt_moment(setting: LayerSettings, memory: StaticMemory) -> PeakMoment:
    """Return the moment in the last layer of the prompt's forward: the whole KV cache and the layer's tensors."""
    g = setting.geometry
    tape = Tape(setting.tokens, training=False)
    hidden = tape.add_input(g.hidden, setting.stream_itemsize, needs_grad=False, name="hidden states")
    DecoderLayer(tape, setting).record(hidden)
    # The model's forward holds the embedding's output and the layer's input.
    around = 2 * hidden.num_bytes + sum_position_bytes(setting)
    return _serving_moment("last layer of the prompt", setting, memory, tape.peak + around)


def _decoding_moment(setting: LayerSettings, memory: StaticMemory, new_tokens: int) -> PeakMoment:
    """Return the moment at the last generated token: the longest KV cache, and a copy of a layer's keys (aten.cat)."""
    g = setting.geometry
    last = dataclasses.replace(setting, context_length=setting.context_length + new_tokens - 1)
    copy = g.kv_width * last.tokens * setting.compute_itemsize
    of_token = setting.batch_size * (g.vocab + 4 * g.hidden + 3 * g.intermediate) * setting.compute_itemsize
    return _serving_moment("last token", last, memory, copy + of_token)


def _serving_moment(name: str, setting: LayerSettings, memory: StaticMemory, activations: int) -> PeakMoment:
    terms = {"parameters": memory.parameters, "KV cache": sum_kv_cache(setting), "activations": activations}
    return PeakMoment(name, {**terms, "library workspace": CUBLAS_WORKSPACE})


def sum_kv_cache(setting: LayerSettings) -> int:
    """Return the bytes of the KV cache of all tokens and layers; a sliding window does not reduce the prompt's."""
    g = setting.geometry
    return 2 * g.layers * g.kv_width * setting.tokens * setting.compute_itemsize
