"""A run in which layers are repeated, and what is done where that turns out wrong: it is run again, layer by layer."""

import pytest

import memprof
from memprof.flows import capture
from memprof.trace.facts import Target
from memprof.virtual import repeat

SPEC = memprof.TargetSpec(model="gpt2", context_length=32)
FACTORY = """
from torch import nn

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12))

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

def build():
    return Tokens()
"""


@pytest.fixture
def asked(monkeypatch):
    """Of each run: whether layers may be repeated, and how many were."""
    runs = []
    gpu = capture.VirtualGpu

    class Noted(gpu):
        def __init__(self, *args, repeats=False, **kwargs):
            super().__init__(*args, repeats=repeats, **kwargs)
            runs.append(lambda: self.repeats.times if self.repeats else None)

    monkeypatch.setattr(capture, "VirtualGpu", Noted)
    return lambda: [times() for times in runs]


def same(one, other):
    """Whether two traces tell the same but for when they were made."""
    return all(getattr(one, name) == getattr(other, name) for name in ("events", "storages", "modules", "work"))


def test_layers_are_repeated_unless_it_is_switched_off(asked, monkeypatch):
    trace, report = memprof.profile(SPEC)
    monkeypatch.setenv(repeat.VARIABLE, "off")
    run, of_run = memprof.profile(SPEC)
    assert asked() == [14, None]
    assert same(trace, run)
    assert report.to_json() == of_run.to_json()
    assert isinstance(trace.facts.target, Target)


def test_what_turns_out_wrong_is_run_again(asked, monkeypatch):
    def settle(self):
        raise repeat.RunAgain("as if")

    monkeypatch.setattr(repeat.Repeats, "settle", settle)
    trace, _ = memprof.profile(SPEC)
    monkeypatch.setenv(repeat.VARIABLE, "off")
    run, _ = memprof.profile(SPEC)
    assert asked() == [14, None, None]
    assert same(trace, run)


def test_code_of_the_users_own_is_run_as_it_is(asked, tmp_path):
    (tmp_path / "own.py").write_text(FACTORY)
    memprof.profile(memprof.TargetSpec(model=f"{tmp_path / 'own.py'}:build", batch_size=2))
    assert asked() == [None]


@pytest.mark.slow
def test_a_compiled_model_is_run_as_it_is(asked):
    # The compiler takes a third of a minute for gpt2.
    memprof.profile(memprof.TargetSpec(model="1M", model_is_size=True, context_length=32, compile=True, steps=1))
    assert asked() == [None]
