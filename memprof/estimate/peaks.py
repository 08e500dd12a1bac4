"""The moments at which a run can be at its highest, and what is live at each: the closed form itself.

Each moment is a sum of terms; the estimate is the moment with the largest sum. Names are those of the ledger's
categories, so that they can be laid beside the virtual GPU's. Those of training are training.py.
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
    """Return every moment at which the run may be at its highest. A model without a geometry has its weights alone."""
    held = state(subject, plan)
    if plan.method.kind == "weights":
        return (PeakMoment("loaded", {"parameters": held.parameters}),)
    assert subject.geometry is not None
    setting = setting_of(subject.geometry, plan, batch_size, context_length)
    if plan.method.kind == "inference":
        return (_prompt(setting, held), _decoding(setting, held, plan.new_tokens))
    return tuple(Training(setting, plan, held, rank).moments())


def _prompt(setting: Setting, held: StaticMemory) -> PeakMoment:
    """Return the last layer of the prompt's forward: the cache is full, and the layer's tensors are live."""
    g = setting.geometry
    tape = Tape(setting.tokens, training=False)
    hidden = tape.given(g.hidden, setting.stream_item, needs_grad=False, name="hidden states")
    DecoderLayer(tape, setting).forward(hidden)
    # The model's forward holds on to the embedding's output and to the layer's input.
    around = 2 * hidden.num_bytes + positions(setting)
    return _serving("last layer of the prompt", setting, held, tape.peak + around)


def _decoding(setting: Setting, held: StaticMemory, new_tokens: int) -> PeakMoment:
    """Return the peak at the last token: the cache at its longest, one layer's keys are there twice, joined to it."""
    g = setting.geometry
    last = dataclasses.replace(setting, context_length=setting.context_length + new_tokens - 1)
    copy = g.kv_width * last.tokens * setting.compute_item
    of_token = setting.batch_size * (g.vocab + 4 * g.hidden + 3 * g.intermediate) * setting.compute_item
    return _serving("last token", last, held, copy + of_token)


def _serving(name: str, setting: Setting, held: StaticMemory, activations: int) -> PeakMoment:
    terms = {"parameters": held.parameters, "KV cache": kv_cache(setting), "activations": activations}
    return PeakMoment(name, {**terms, "library workspace": CUBLAS_WORKSPACE})


def kv_cache(setting: Setting) -> int:
    """Return keys and values of every token in every layer; right after a prompt, a window does not make them fewer."""
    g = setting.geometry
    return 2 * g.layers * g.kv_width * setting.tokens * setting.compute_item
