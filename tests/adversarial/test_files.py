"""Captures, snapshots, reports, logs and lengths that were changed at random, before every command that reads them."""

from __future__ import annotations

import copy
import gc
import gzip
import json
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.cli.main import run
from tests.adversarial.documents import capture, snapshot
from tests.lanes import of_lane

EACH = 25  # Inputs of a test.
_DEEP: list[Any] = []
for _ in range(300):
    _DEEP = [_DEEP]
WRONG = (
    None, True, -1, 0, 2**31, 2**63, 2**70, 0.5, -1e308, float("nan"), float("inf"), "", "x", "\0", "9" * 5000,
    "n" * 300, "\x1b]0;t\x07\u202e[/x]", [], [[]], {}, {"a": 1}, _DEEP,
)  # fmt: skip
LOG = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n    loss.backward()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.52 GiB "
    "of which 1.00 GiB is free. Including non-PyTorch memory, this process has 22.00 GiB memory in use.\n"
)
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def change(document: Any, chance: random.Random) -> None:
    """Replace, remove or repeat something at a place below."""
    while True:
        key = chance.choice(sorted(document) if isinstance(document, dict) else range(len(document)))
        below = document[key]
        if not (isinstance(below, dict | list) and below and chance.random() < 0.7):
            break
        document = below
    action = chance.choice(("replace", "replace", "remove", "repeat"))
    if action == "replace":
        document[key] = copy.deepcopy(chance.choice(WRONG))
    elif action == "remove":
        del document[key]
    elif isinstance(document, list):
        document.insert(key, below)


def changed(document: Any, chance: random.Random) -> Any:
    """A copy that was changed in one to three places."""
    made = copy.deepcopy(document)
    for _ in range(chance.randint(1, 3)):
        if made:
            change(made, chance)
    return made


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Bytes of which some were changed, and some are missing."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        made[chance.randrange(len(made))] = chance.randrange(256)
    return bytes(made[: chance.randint(0, len(made))] if chance.random() < 0.3 else made)


def a_capture(chance: random.Random) -> bytes:
    return gzip.compress(json.dumps(changed(capture(), chance)).encode(), 1)


def a_packed_capture(chance: random.Random) -> bytes:
    return damaged(gzip.compress(json.dumps(capture()).encode(), 1), chance)


def a_snapshot(chance: random.Random) -> bytes:
    return pickle.dumps(changed(snapshot(), chance), protocol=chance.choice((0, 2, 4)))


def a_pickled_snapshot(chance: random.Random) -> bytes:
    return damaged(pickle.dumps(snapshot(), protocol=4), chance)


def a_log(chance: random.Random) -> bytes:
    lines = LOG.replace("2.00", chance.choice(("2.00", "9" * 5000, "-1", "nan"))).splitlines(keepends=True)
    chance.shuffle(lines)
    return damaged("".join(lines).encode() * chance.randint(1, 9), chance)


def some_lengths(chance: random.Random) -> bytes:
    return (
        "[" * chance.randint(0, 1) + ",".join(str(chance.choice([*WRONG[:14], 5, 9, 100])) for _ in range(9))
    ).encode()


def a_configuration(chance: random.Random) -> bytes:
    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "torch_dtype": "bfloat16", "rope_scaling": {"factor": 2},
    }  # fmt: skip
    return json.dumps(changed(config, chance)).encode()


def a_corpus(chance: random.Random) -> bytes:
    rows = [json.dumps(changed({"text": "a b c", "n": [1, 2]}, chance)) for _ in range(5)]
    return damaged("\n".join(rows).encode(), chance)


READERS: dict[str, tuple[Callable[[random.Random], bytes], tuple[tuple[str, ...], ...]]] = {
    "captures with other values": (
        a_capture,
        (("show",), ("analyze",), ("compare", "FILE"), ("export", "--to", "x.json")),
    ),
    "captures with other bytes": (a_packed_capture, (("show",), ("analyze", "--json"))),
    "snapshots with other values": (a_snapshot, (("analyze",), ("compare", "FILE"), ("export", "--to", "x.pickle"))),
    "snapshots with other bytes": (a_pickled_snapshot, (("analyze",), ("export", "--to", "x.json"))),
    "logs": (a_log, (("doctor",), ("doctor", "--json"))),
    "lengths": (some_lengths, (("estimate", "--params", "1M", "--lengths"),)),
    "configurations": (a_configuration, (("estimate", "--model"),)),
    "corpora": (a_corpus, (("vocab",), ("vocab", "--column", "text"))),
}
INPUTS = dict.fromkeys(READERS, 8 * EACH)
_NAMES = {"configurations": "config.json", "corpora": "rows.jsonl"}


def _cases() -> list[Any]:
    marks = {True: (), False: (pytest.mark.nightly,)}
    return [
        pytest.param(name, seed, marks=marks[seed == 0], id=f"{name}-{seed}") for name in READERS for seed in range(8)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), of_lane(_cases()))
def test_changed_files(tmp_path: Path, monkeypatch, capsys, name: str, seed: int) -> None:
    monkeypatch.chdir(tmp_path)
    make, commands = READERS[name]
    file = tmp_path / _NAMES.get(name, "file")
    for number in range(EACH):
        chance = random.Random(f"{name} {seed} {number}")
        data = make(chance)
        file.write_bytes(data)
        command, *rest = commands[number % len(commands)]
        words = [command, *rest, str(file)] if command in ("estimate", "doctor") else [command, str(file), *rest]
        collects = gc.isenabled()
        try:
            with pytest.raises(SystemExit) as stopped:
                run([str(file) if word == "FILE" else word for word in words])
        finally:
            if collects:
                gc.enable()
        captured = capsys.readouterr()
        said = captured.out + captured.err
        assert stopped.value.code in (0, 1, 2, 3), (number, said[-500:])
        assert not _OBEYED.search(said), (number, ascii(said)[-500:])
        assert file.read_bytes() == data
