"""`--alloc-conf`, and what the report says of reserved memory."""

from __future__ import annotations

import pytest

MIB, GIB = 1 << 20, 1 << 30
SMALL = ("--model", "pythia-70m", "--context-length", 512)
EXPANDABLE = "expandable_segments:True"

OUTGROWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 100)

    def forward(self, ids):
        for num_bytes in (400 << 20, 410 << 20):
            torch.empty(num_bytes, dtype=torch.uint8, device=ids.device)
        return self.head(self.embed(ids))

def build():
    return Model()
"""


def test_settings_change_what_is_reserved(memprof, tmp_path):
    capture = tmp_path / "run.memprof"
    plain = memprof("profile", *SMALL, "--json", "--save", capture).json
    other = memprof("profile", *SMALL, "--json", "--alloc-conf", EXPANDABLE).json
    assert plain["allocator"]["alloc_conf"] is plain["target"]["alloc_conf"] is None
    assert other["allocator"]["alloc_conf"] == other["target"]["alloc_conf"] == EXPANDABLE
    assert other["allocator"]["alloc_conf_from"] == "--alloc-conf"
    assert any(EXPANDABLE in sentence for sentence in other["assumptions"])
    assert other["peak"]["reserved_bytes"] < plain["peak"]["reserved_bytes"]
    # Segments that expand split every rest off.
    assert "fragmentation" in plain["peak"]["categories"] and "fragmentation" not in other["peak"]["categories"]

    shown = memprof("show", capture, "--json", "--alloc-conf", EXPANDABLE).json
    assert shown["peak"] == other["peak"] and shown["stages"] == other["stages"]
    assert shown["target"]["alloc_conf"] == EXPANDABLE
    assert memprof("show", capture, "--json").json["peak"] == plain["peak"]


def test_a_torch_release(memprof):
    report = memprof("profile", *SMALL, "--json", "--torch-release", "2.9", "--gpu", "b200").json
    assert report["allocator"]["torch"] == report["target"]["torch_release"] == "2.9"
    # Of both threads, and of cuBLASLt in the forward.
    assert report["peak"]["categories"]["library workspace"] == 2 * 8_519_680 + MIB


@pytest.mark.parametrize(
    ("value", "more", "problem"),
    [("latest", (), "not a torch version"), ("1.13", (), "this torch release is not known"),
     ("2.9", ("--device", "cpu"), "a measured run has the installed torch")],
)  # fmt: skip
def test_a_release_that_cannot_be_simulated(memprof, value, more, problem):
    result = memprof("profile", *SMALL, "--torch-release", value, *more)
    assert result.exit_code == 2 and problem in result.stderr


def test_settings_of_the_environment(memprof, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    capture = tmp_path / "run.memprof"
    report = memprof("profile", *SMALL, "--json", "--save", capture).json
    assert report["allocator"]["alloc_conf_from"] == "PYTORCH_CUDA_ALLOC_CONF"
    assert report["target"]["alloc_conf"] == EXPANDABLE
    # A saved run is shown as it was, whatever is set when it is shown.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert memprof("show", capture, "--json").json["allocator"] == report["allocator"]
    assert memprof("profile", *SMALL, "--json", "--alloc-conf", "").json["allocator"]["alloc_conf"] == ""


@pytest.mark.parametrize(
    ("settings", "problem", "hint"),
    [
        ("expandable_segment:True", "unknown allocator setting 'expandable_segment'", "'expandable_segments'"),
        ("expandable_segments:true", "expandable_segments is 'true'", "True or False"),
        ("max_split_size_mb:1", "max_split_size_mb is 1", "at least 20"),
        ("garbage_collection_threshold:2", "garbage_collection_threshold is 2.0", "less than 1"),
        ("backend:cudaMallocAsync", "only torch's native allocator", "no public rules"),
    ],
)
@pytest.mark.parametrize("where", ["--alloc-conf", "PYTORCH_CUDA_ALLOC_CONF"])
def test_bad_settings(memprof, monkeypatch, settings, problem, hint, where):
    arguments = ["profile", *SMALL]
    if where.startswith("--"):
        arguments += [where, settings]
    else:
        monkeypatch.setenv(where, settings)
    result = memprof(*arguments)
    assert result.exit_code == 2 and not result.stdout
    assert problem in result.stderr and hint in result.stderr and settings in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_settings_of_show(memprof, tmp_path):
    capture = tmp_path / "run.memprof"
    memprof("profile", *SMALL, "--save", capture)
    result = memprof("show", capture, "--alloc-conf", "no_such_key:1")
    assert result.exit_code == 2 and "no_such_key" in result.stderr


def test_fragmentation_decides_the_verdict(memprof, tmp_path):
    """On a GPU between the two needs, the same run fits with segments that expand, and the report says so."""
    capture = tmp_path / "run.memprof"
    options = ("--model", "pythia-70m", "--context-length", 2048, "--batch-size", 4)
    plain = memprof("profile", *options, "--json").json
    expanding = memprof("profile", *options, "--json", "--alloc-conf", EXPANDABLE).json
    context = plain["device"]["context_bytes"]
    # Beside the context, exactly what expandable segments need.
    vram = f"{(expanding['peak']['reserved_bytes'] + context) / GIB:.9f}"
    result = memprof("profile", *options, "--json", "--gpu-vram", vram, "--save", capture)
    assert result.json["verdict"]["required_bytes"] > result.json["device"]["total_bytes"]
    helped = memprof("show", capture, "--json", "--alloc-conf", EXPANDABLE)
    assert helped.exit_code == 0 and helped.json["verdict"]["fits"] and helped.json["verdict"]["retries"] == 0
    assert result.exit_code == 3
    finding = next(finding for finding in result.json["findings"] if finding["id"] == "fragmentation")
    assert finding["fixes"] == ["expandable-segments"] and "free when the GPU is full" in finding["title"]
    assert any("and fits where it does not fit now" in line["text"] for line in finding["evidence"])


def test_fits_by_giving_the_cache_back(memprof, tmp_path):
    """Tensors of 400 and of 410 MiB, one after the other: on 674 MiB, the first segment has to go for the second."""
    file = tmp_path / "model.py"
    file.write_text(OUTGROWN, encoding="utf-8")
    options = ("--model", f"{file}:build", "--mode", "inference", "--steps", 1, "--gpu-vram", "1100MiB")
    report = memprof("profile", *options, "--json").json
    verdict = report["verdict"]
    assert verdict["fits"] and verdict["retries"] == 1
    assert verdict["required_bytes"] > report["device"]["total_bytes"] >= report["peak"]["device_used_bytes"]
    result = memprof("profile", *options)
    assert result.exit_code == 0 and "Fits, with allocator retries: the GPU is full once" in result.stdout


def test_a_workspace_that_pins_a_segment(memprof, tmp_path):
    """In the second step cuBLAS' 8 MiB lie in the segment of 410 MiB, which can then not be released: the stage is
    marked although what is allocated in it would fit."""
    file = tmp_path / "model.py"
    file.write_text(OUTGROWN, encoding="utf-8")
    options = ("--model", f"{file}:build", "--mode", "inference", "--gpu-vram", "1100MiB")
    result = memprof("profile", *options)
    assert result.exit_code == 3
    assert [line for line in result.stdout.splitlines() if "code outside modules" in line and "out of memory" in line]
    report = memprof("profile", *options, "--json").json
    finding = next(finding for finding in report["findings"] if finding["id"] == "fragmentation")
    assert any("pinned by" in line["text"] and "cublas workspace" in line["text"] for line in finding["evidence"])


def test_text_shows_the_message_of_torch(memprof):
    text = memprof("profile", "--full", "--model", "gpt2", "--gpu-vram", "2").stdout
    shown = " ".join(text.split())
    assert "Does not fit: a real GPU runs out of memory in" in shown
    assert "CUDA out of memory. Tried to allocate" in shown and "GPU 0 has a total capacity of 2.00 GiB" in shown
    assert "reserved by PyTorch but unallocated. ..." in shown
    assert max(map(len, text.splitlines())) <= 110
