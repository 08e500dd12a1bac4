"""Messages that people reported: the right cause, every figure, devices, and the tensor where its sizes are known."""

from __future__ import annotations

import sys
from pathlib import Path

from memprof.doctor.advice import MAX_STEPS

sys.path.insert(0, str(Path(__file__).parent))
from corpus import Message, messages, wrong_figures

SEEN = messages("messages.toml")
ENGINES = messages("messages_engines.toml") + messages("messages_engines_held_out.toml")
HELD_OUT = messages("messages_held_out.toml") + messages("messages_last.toml")
ALL = SEEN + HELD_OUT + messages("messages_more.toml") + ENGINES


def _id(message: Message) -> str:
    return message.source.removeprefix("https://github.com/")


def test_there_are_enough_of_them_and_each_says_where_it_is_from():
    assert len(ALL) >= 60
    assert len(HELD_OUT) >= len(SEEN + HELD_OUT) // 3
    assert all(message.source.startswith("https://github.com/") for message in ALL)
    assert len({message.cause for message in ALL}) >= 13


def test_cause_figures_and_tensor():
    for message in ALL:
        found = message.diagnosis()
        assert found is not None
        assert found.cause == message.cause, found.explanation
        assert wrong_figures(message, found) == []
        if message.devices:
            assert found.devices == message.devices
        if message.where:
            assert any(message.where in frame for frame in found.where), found.where
        if message.tensor is not None:
            first = found.tensors[0]
            assert list(first.shape) == message.tensor["shape"]
            assert (first.dtype, first.role) == (message.tensor["dtype"], message.tensor["role"])
        assert 0 < len(found.steps) <= MAX_STEPS
        assert found.title


def test_an_engine_is_told_by_name_with_its_figures_and_options():
    for message in ENGINES:
        found = message.diagnosis()
        assert found is not None and found.engine is not None
        assert found.source.rpartition(" in ")[2] == message.program
        for name, expected in (message.engine or {}).items():
            actual = getattr(found.engine, name)
            assert (actual.text if name == "missing" else actual) == expected, name
        commands = [step.command for step in found.steps]
        assert len(commands) >= len(message.commands)
        assert all(part in command for part, command in zip(message.commands, commands, strict=False)), commands
        assert not [part for part in message.never if any(part in command for command in commands)], commands


def test_a_sound_text_has_no_error():
    import io

    from memprof.doctor import diagnose

    text = b"epoch 1 loss 0.5, memory allocated 12.3 GiB, device cuda:0\nsaved 137 checkpoints\nTests: 12 passed\n"
    assert diagnose(io.BytesIO(text), "log") == []
