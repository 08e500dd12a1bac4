"""Captures that were changed by accident or on purpose: a report or one error, never a traceback."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memprof.errors import MemprofError
from memprof.flows.account import analyze
from memprof.flows.recordings import open_file
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.trace.facts import DeviceFacts, Facts
from memprof.trace.io import load_trace, save_trace
from tests.golden.test_report import training_run
from tests.lanes import examples

_DEEP: list[Any] = []
for _ in range(300):
    _DEEP = [_DEEP]
WRONG = [
    None, True, -1, -2, 0, 1, 2**31, 2**63, 2**70, 10**400, 0.5, -1e308, float("nan"), float("inf"), "", "x", "\0",
    "cuda:x", "9" * 5000, [], [[]], [None], {}, {"a": 1}, _DEEP,
]  # fmt: skip


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    trace = training_run()
    trace.facts = Facts(device=DeviceFacts("GPU", 8 << 30, 7 << 30))
    file = tmp_path_factory.mktemp("capture") / "run"
    save_trace(trace, file)
    return json.loads(gzip.decompress(file.read_bytes()))


def change(document: Any, data: st.DataObject) -> None:
    """Replace, remove or repeat something at a place below."""
    while True:
        keys = sorted(document) if isinstance(document, dict) else range(len(document))
        key = data.draw(st.sampled_from(keys))
        below = document[key]
        if not (isinstance(below, dict | list) and below and data.draw(st.booleans(), "deeper")):
            break
        document = below
    action = data.draw(st.sampled_from(["replace", "replace", "remove", "repeat"]))
    if action == "replace":
        document[key] = copy.deepcopy(data.draw(st.sampled_from(WRONG)))
    elif action == "remove":
        del document[key]
    elif isinstance(document, list):
        document.insert(key, below)


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_ends_in_a_traceback(document, tmp_path, data) -> None:
    changed = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3))):
        change(changed, data)
        if not changed:
            break
    file = tmp_path / "run"
    file.write_bytes(gzip.compress(json.dumps(changed).encode(), 1))
    for use in (lambda: to_text(render(analyze(load_trace(file)), explain=True)), lambda: open_file(file)):
        with contextlib.suppress(MemprofError):
            use()


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bytes_that_were_changed(document, tmp_path, data) -> None:
    packed = bytearray(gzip.compress(json.dumps(document).encode(), 1))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path / "run"
    file.write_bytes(packed[: data.draw(st.integers(0, len(packed)))] if data.draw(st.booleans()) else packed)
    with contextlib.suppress(MemprofError):
        to_text(render(analyze(load_trace(file)), explain=True))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("storages", 0, 0), -5), (("storages", 0, 0), "4"), (("storages", 0, 1), [-3]), (("storages", 0, 2), [1]),
        (("storages", 0, 4), -1), (("storages", 0), []), (("storages",), {}), (("events", "ref", 3), 0),
        (("events", "ref", 3), None), (("owners", 0, 0), 10**9), (("times",), [1]), (("modules", 3, 0), "layers.x"),
        (("device",), "cuda:\0"), (("device",), "x"), (("device",), "cuda"),
        (("facts", "device", "total_bytes"), 10**400), (("phases",), _DEEP * 1),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(document, tmp_path, path, value) -> None:
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "run"
    file.write_bytes(gzip.compress(json.dumps(changed).encode()))
    with pytest.raises(MemprofError, match="damaged"):
        load_trace(file)


@pytest.mark.parametrize("inside", [b"[],", b"0,", b'"",', b'{"a":[]},', b" "])
def test_a_small_file_that_unpacks_to_a_large_one(tmp_path, inside) -> None:
    file = tmp_path / "run"
    with gzip.open(file, "wb", compresslevel=1) as packed:
        packed.write(b"[")
        for _ in range(128 // len(inside)):
            packed.write(inside * (1 << 20))
        packed.write(b"0]")
    tracemalloc.start()
    try:
        with pytest.raises(MemprofError, match="unpacks to more"):
            load_trace(file)
        assert tracemalloc.get_traced_memory()[1] < 400 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_is_only_depth(tmp_path) -> None:
    file = tmp_path / "run"
    file.write_bytes(gzip.compress(b"[" * 100_000))
    with pytest.raises(MemprofError, match="not a memprof capture"):
        load_trace(file)


def test_an_ending_that_there_is_not():
    from memprof.script import EndReason
    from memprof.trace.facts import ENDINGS, ProgramFacts

    assert set(ENDINGS) == {ended.value for ended in EndReason}
    with pytest.raises(ValueError, match="'zzz'"):
        ProgramFacts(("a.py",), "zzz", 0, 1, ())
