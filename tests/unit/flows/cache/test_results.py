"""Which answers are kept, and that one that is found again is the answer."""

import json

import pytest

from memprof.flows.cache import results
from memprof.flows.cache.results import find_cache_entry, is_torch_without_cuda
from memprof.flows.profile import profile
from memprof.report.documents.report import Report
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.spec import TargetSpec

TINY = TargetSpec(model="gpt2", context_length=64)
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 8, "n_head": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(results, "stamp_loaded_files", list)  # this process is older than what it tests
    return tmp_path


def key(spec: TargetSpec = TINY, **asked: object) -> str | None:
    place = find_cache_entry("profile", spec, asked, ["profile"])
    return None if place is None else place.key


def test_every_option_makes_another_question():
    changes = {
        "context_length": 65, "batch_size": 2, "dtype": "bfloat16", "optimizer": "sgd", "gpu": "rtx-4090", "steps": 3,
        "gpu_vram_bytes": 1 << 30, "fixes": ("chunked-loss",), "mode": "inference",
        "alloc_conf": "expandable_segments:True",
    }  # fmt: skip
    keys = [key(), key(ladder=True), *(key(TINY.edit(**{name: value})) for name, value in changes.items())]
    assert None not in keys and len(set(keys)) == len(keys)
    assert key() == key()
    assert find_cache_entry("recommend", TINY, {}, []).key != key()


@pytest.mark.parametrize(
    "spec",
    [
        TINY.edit(device="cpu"),
        TINY.edit(compile=True),
        TINY.edit(trust_remote_code=True),
        TINY.edit(model="model.py:build"),
        TINY.edit(model="some-one/on-the-hub"),
        TINY.edit(model="nothing"),
    ],
)
def test_what_may_read_anything_is_not_kept(spec):
    assert key(spec) is None


def test_nothing_is_kept_where_there_is_no_cache(monkeypatch):
    monkeypatch.setenv("MEMPROF_CACHE", "off")
    assert key() is None


def test_a_local_configuration_counts_by_its_content(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    of_folder, of_file = key(TINY.edit(model=str(tmp_path))), key(TINY.edit(model=str(file)))
    assert of_folder and of_file
    file.write_text(json.dumps({**CONFIG, "n_layer": 2}))
    assert key(TINY.edit(model=str(tmp_path))) not in (of_folder, of_file)
    file.write_text(json.dumps({**CONFIG, "auto_map": {"AutoModel": "modeling.Own"}}))
    assert key(TINY.edit(model=str(tmp_path))) is None
    file.write_text("{")
    assert key(TINY.edit(model=str(tmp_path))) is None


def test_a_file_of_lengths_counts_by_its_content(tmp_path):
    file = tmp_path / "lengths,of all.txt"
    file.write_text("5\n6\n")
    spec = TINY.edit(lengths=f"{file},bucket=2", steps=2)
    before = key(spec), key(lengths=str(file))
    file.write_text("5\n7\n")
    assert key(spec) not in before and key(lengths=str(file)) not in before
    assert key(TINY.edit(lengths="alpaca")) is not None
    assert key(TINY.edit(lengths="/dev/stdin")) is None


SPECS = {
    "training": TINY,
    "inference": TargetSpec(model="gpt2", context_length=16, mode="inference", new_tokens=2),
    "does not fit": TargetSpec(model="gpt2", context_length=256, gpu_vram_bytes=2 << 30),
    "lengths": TargetSpec(model="gpt2", context_length=64, lengths="alpaca", steps=4),
    "spread": TargetSpec(model="gpt2", context_length=64, gpus=2, parallel="fsdp"),
}


@pytest.mark.parametrize("name", ["training", *(pytest.param(one, marks=pytest.mark.nightly) for one in [*SPECS][1:])])
def test_a_kept_answer_is_the_answer(name):
    document = profile(SPECS[name])[1]
    place = find_cache_entry("profile", SPECS[name], {}, ["profile", "--model", "gpt2"])
    assert place is not None and place.find(Report) is None
    place.save(document)
    found, seconds = place.find(Report)
    assert 0 <= seconds < 60
    for explain in (False, True):
        shown = [to_text(render(one, explain=explain, quiet=False)) for one in (found, document)]
        assert shown[0] == shown[1]
    assert json.dumps(found.to_json()) == json.dumps(document.to_json())
    tables = [{name: frame.to_csv() for name, frame in one.frames().items()} for one in (found, document)]
    assert tables[0] == tables[1]


def test_one_of_changed_files_or_another_form_is_none(tmp_path, monkeypatch):
    file = tmp_path / "modeling.py"
    file.write_text("")
    document = profile(TINY)[1]
    place = find_cache_entry("profile", TINY, {}, [])
    monkeypatch.setattr(results, "stamp_loaded_files", lambda: [(str(file), 0, file.stat().st_mtime_ns)])
    place.save(document)
    assert place.find(Report) is not None
    file.write_text("changed")
    assert place.find(Report) is None
    for entry in ({}, {"files": []}, {"files": [], "given": 1, "answer": {}}, {"files": [], "given": "x", "answer": 3}):
        place.store.save(place.key, entry)
        assert place.find(Report) is None
    monkeypatch.setattr(results, "stamp_loaded_files", lambda: None)
    place.save(document)
    assert place.find(Report) is None


def test_an_answer_that_does_not_come_back_as_it_is_is_not_kept(monkeypatch):
    document = profile(TINY)[1]
    place = find_cache_entry("profile", TINY, {}, [])
    monkeypatch.setattr(Report, "to_json", lambda self: {"peak": id(self)})
    place.save(document)
    assert place.store.list_entries() == []


@pytest.mark.parametrize(
    ("line", "without"),
    [
        ("cuda: Optional[str] = None", True),
        ("cuda = None", True),
        ("cuda: Optional[str] = '13.0'", False),
        ("hip: Optional[str] = None", False),
    ],
)
def test_a_build_without_cuda_is_told_by_its_file(tmp_path, monkeypatch, line, without):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('it is not to be imported')")
    (tmp_path / "torch" / "version.py").write_text(f"from typing import Optional\n{line}\n")
    monkeypatch.setattr(
        results.importlib.util,
        "find_spec",
        lambda name: __import__("importlib.machinery").machinery.PathFinder.find_spec(name, [str(tmp_path)]),
    )
    assert is_torch_without_cuda() is without
