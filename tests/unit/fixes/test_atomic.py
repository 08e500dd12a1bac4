"""`apply` is all or nothing: it fails at every line of every installer, and the model is as it was before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memprof
from memprof.errors import UsageError
from memprof.fixes import applied as applied_module
from memprof.fixes.catalog import FIXES
from tests.lanes import by_day, examples
from tests.unit.fixes import models

_FOLDER = str(Path(applied_module.__file__).parent)
OPTIONS = {
    "vocabulary-cap": {"vocab_size": 50},
    "freeze": {"frozen": "*embed_tokens*"},
    "lora": {"lora_rank": 2},
    "optimizer-in-backward": {"optimizer": torch.optim.SGD},
}


class Injected(BaseException):
    """What no installer expects."""


class Lines:
    """Counts the lines of the installers that run, and raises at number `fail_at`; None: at none."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.places: list[tuple[str, int]] = []

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame, event, argument):
        code = frame.f_code
        # Not the way back, nor `apply` itself around its `try`: what is tested is what comes in between.
        if not code.co_filename.startswith(_FOLDER) or code.co_name in ("_roll_back", "apply"):
            return None
        return self._line

    def _line(self, frame, event, argument):
        if event == "line" and (self.fail_at is None or len(self.places) <= self.fail_at):
            if len(self.places) == self.fail_at:
                self.places.append((frame.f_code.co_filename, frame.f_lineno))
                raise Injected(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            self.places.append((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def make():
    model = models.llama(attn_implementation="eager", num_hidden_layers=2).train()
    model.model.layers[0].eval()  # flags that differ
    model.model.norm.weight.requires_grad_(False)
    model.model.norm.register_forward_hook(lambda module, args, output: None)
    return model


def whole_state(model):
    """`models.state`, and what belongs to no module of the model."""
    found = models.state(model)
    found["training"] = {name: module.training for name, module in model.named_modules()}
    found["gradients"] = {name: p.grad is None for name, p in model.named_parameters()}
    found["on"] = [list(one.fixes) for one in applied_module._applied.get(model, [])]
    found["config attributes"] = dict(vars(model.config))
    return found


def lines_of(name):
    try:
        memprof.apply(make(), name, **OPTIONS.get(name, {}))  # what it imports is imported then
    except UsageError as error:
        pytest.skip(f"{error.problem} ({error.value})")
    with Lines() as lines:
        memprof.apply(make(), name, **OPTIONS.get(name, {}))
    return lines.places


# QLoRA fails at the lines of LoRA, which is tried by day.
@pytest.mark.parametrize("name", by_day(FIXES, *({*[*FIXES][::3], "lora"} - {"qlora", "4-bit-weights"})))
def test_a_failure_at_any_line_leaves_nothing(name):
    places = lines_of(name)
    # The first two times that a line runs, and the last: loops are the same in between.
    chosen: dict[tuple[str, int], list[int]] = {}
    for index, place in enumerate(places):
        chosen.setdefault(place, []).append(index)
    indices = sorted({i for found in chosen.values() for i in (*found[:2], found[-1])})
    assert len(indices) > 5
    model = make()
    before = whole_state(model)
    for index in indices:
        with Lines(index) as lines, pytest.raises(Injected):
            memprof.apply(model, name, **OPTIONS.get(name, {}))
        assert whole_state(model) == before, lines.places[-1]
    memprof.apply(model, name, **OPTIONS.get(name, {})).undo()
    assert whole_state(model) == before


SETS = ["bfloat16", "freeze", "sdpa-attention", "chunked-loss", "activation-checkpointing", "cpu-offload-activations"]


@settings(max_examples=examples(200), deadline=None)
@given(names=st.lists(st.sampled_from(SETS), min_size=1, unique=True), where=st.floats(0, 1, exclude_max=True))
def test_a_failure_among_several_leaves_nothing(names, where):
    given_options = {key: value for name in names for key, value in OPTIONS.get(name, {}).items()}
    count = _COUNTS.get(frozenset(names))
    if count is None:
        memprof.apply(make(), names, **given_options)
        with Lines() as lines:
            memprof.apply(make(), names, **given_options)
        count = _COUNTS[frozenset(names)] = len(lines.places)
    model = make()
    before = whole_state(model)
    with Lines(int(where * count)), pytest.raises(Injected):
        memprof.apply(model, names, **given_options)
    assert whole_state(model) == before


_COUNTS: dict[frozenset[str], int] = {}
