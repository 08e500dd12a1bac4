"""Whole scripts, unmodified: what they allocate on the virtual GPU is what they allocate on the CPU, where they really
run and no mode is active.

Loaders, optimizers, trainers, evaluation, generation and checkpoints are on both sides as the script has them. Every
allocation of the virtual GPU has one of as many bytes, by the same operator, in the same order on the CPU, but for
torch.isin, which is one kernel there; what the CPU has beyond is named in cpu_temporaries.py and script_matching.py.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.accuracy.cpu_events import Call, Change
from tests.accuracy.script_events import SCRIPTS, TO_GPU
from tests.accuracy.script_matching import Matching, longest_common, match
from tests.lanes import by_day
from tests.processes import ROOT, python


def _matching(name: str, folder: Path) -> Matching:
    result = folder / "events"
    done = python("-m", "tests.accuracy.script_events", result, name, folder=ROOT, seconds=500)
    assert not done.exit_code, done.stderr[-4000:]
    (sides,) = pickle.loads(result.read_bytes()).values()
    return match(sides["cpu"], sides["virtual"])


@pytest.mark.slow
@pytest.mark.parametrize("name", by_day(SCRIPTS, "generate"))
def test_scripts(tmp_path, name):
    found = _matching(name, tmp_path)
    assert found.virtual > 500, "nothing ran"
    assert not found.rest_virtual
    assert not found.rest_cpu
    assert found.matched == found.virtual - found.isin - found.deep_copies - found.in_pieces
    assert bool(found.in_pieces) == (name == "mistakes"), "its norm is one kernel on CUDA"
    assert bool(found.deep_copies) == (name == "images"), "its averaged model is a deep copy"
    assert found.isin == 0 or name.startswith(("generate", "seq2seq"))


def _made(num_bytes: int, op: str, block: int, *calls: str) -> Change:
    return Change(False, block, num_bytes, op, tuple(Call(f"aten::{name}", (), (), block) for name in calls))


def test_a_difference_is_seen():
    cpu = [_made(100, "aten::mm", 0, "linear", "mm"), _made(64, "aten::empty", 1, "add"), _made(8, "x", 2, "mean")]
    same = [_made(100, "aten.mm", 0), _made(64, "aten.add", 1), _made(8, "aten.mean", 2)]
    assert match(cpu, same)[:3] == (3, 3, 3)
    for missing in range(3):
        less = match(cpu, same[:missing] + same[missing + 1 :])
        assert less.matched == 2 and (less.rest_cpu or less.numbers) and not less.rest_virtual
        more = match(cpu[:missing] + cpu[missing + 1 :], same)
        assert more.matched == 2 and more.rest_virtual
    other = [same[0], _made(64, "aten.mul", 1), same[2]]
    assert match(cpu, other).rest_virtual == {("aten.mul", 64): 1}
    swapped = match(cpu, [same[1], same[0], same[2]])
    assert swapped.matched == 2 and swapped.rest_virtual
    bigger = [same[0], _made(68, "aten.add", 1), same[2]]
    assert match(cpu, bigger).rest_virtual == {("aten.add", 68): 1}


def test_what_is_explained_is_named():
    copied = _made(64, TO_GPU, 1, "clone")
    assert match([_made(100, "aten::mm", 0, "mm"), copied], [_made(100, "aten.mm", 0)]).explained == {TO_GPU: 1}


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [("", "", 0), ("abc", "abc", 3), ("abcabba", "cbabac", 4), ("xaxbxc", "abc", 3), ("abc", "xyz", 0), ("a", "", 0)],
)
def test_longest_common_subsequence(left, right, length):
    pairs = longest_common(len(left), len(right), lambda i, j: left[i] == right[j])
    assert len(pairs) == length and pairs == sorted(pairs)
    assert all(left[i] == right[j] for i, j in pairs)
