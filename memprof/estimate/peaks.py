"""The closed form: the moments that may be the peak of a run, and the bytes that are live at each.

Each moment is a sum of terms; the estimate is the moment with the largest sum. Terms have the names of the ledger's
categories, so that they can be compared with a virtual GPU's. Moments of training steps are in training.py.
"""

from __future__ import annotations

import dataclasses

from memprof.estimate.geometry import Subject
from memprof.estimate.layers import DecoderLayer
from memprof.estimate.methods import MethodPlan
from memprof.estimate.projections import Setting
from memprof.estimate.ranks import ALONE, Rank
from memprof.estimate.state import CUBLAS_WORKSPACE, PeakMoment, StaticMemory, positions, setting_of, state
from memprof.estimate.tape import Tape
from memprof.estimate.training import Training


def moments(
    subject: Subject, plan: MethodPlan, batch_size: int, context_length: int, rank: Rank = ALONE
) -> tuple[PeakMoment, ...]:
    """Return every moment that may be the peak. A model without a geometry has only its weights."""
    held = state(subject, plan)
    if plan.method.kind == "weights":
        return (PeakMoment("loaded", {"parameters": held.parameters}),)
    assert subject.geometry is not None
    setting = setting_of(subject.geometry, plan, batch_size, context_length)
    if plan.method.kind == "inference":
        return (_prompt_moment(setting, held), _decoding_moment(setting, held, plan.new_tokens))
    return tuple(Training(setting, plan, held, rank).moments())


def _prompt_moment(setting: Setting, held: StaticMemory) -> PeakMoment:
    """Return the moment in the last layer of the prompt's forward, with the whole cache and the layer's tensors."""
    g = setting.geometry
    tape = Tape(setting.tokens, training=False)
    hidden = tape.given(g.hidden, setting.stream_item, needs_grad=False, name="hidden states")
    DecoderLayer(tape, setting).forward(hidden)
    # The model's forward holds on to the embedding's output and to the layer's input.
    around = 2 * hidden.num_bytes + positions(setting)
    return _serving_moment("last layer of the prompt", setting, held, tape.peak + around)


def _decoding_moment(setting: Setting, held: StaticMemory, new_tokens: int) -> PeakMoment:
    """Return the moment at the last token: the longest cache, and a second copy of one layer's keys (joined)."""
    g = setting.geometry
    last = dataclasses.replace(setting, context_length=setting.context_length + new_tokens - 1)
    copy = g.kv_width * last.tokens * setting.compute_item
    of_token = setting.batch_size * (g.vocab + 4 * g.hidden + 3 * g.intermediate) * setting.compute_item
    return _serving_moment("last token", last, held, copy + of_token)


def _serving_moment(name: str, setting: Setting, held: StaticMemory, activations: int) -> PeakMoment:
    terms = {"parameters": held.parameters, "KV cache": kv_cache(setting), "activations": activations}
    return PeakMoment(name, {**terms, "library workspace": CUBLAS_WORKSPACE})


def kv_cache(setting: Setting) -> int:
    """Return the bytes of keys and values of all tokens and layers; a window does not reduce them after a prompt."""
    g = setting.geometry
    return 2 * g.layers * g.kv_width * setting.tokens * setting.compute_item
