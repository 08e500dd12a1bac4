"""`memprof compare`: real captures, reports and snapshots, and files that are none."""

import gzip
import json

import pytest

MODEL = ("--model-size", "1M", "--context-length", 256, "--batch-size", 8, "--gpu-vram", 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def runs(memprof, folder):
    """before.memprof and .json, and after.memprof with checkpointing: made once."""
    before, after = folder / "before.memprof", folder / "after.memprof"
    if not after.exists():
        report = memprof("profile", *MODEL, "--save", before, "--json")
        (folder / "before.json").write_text(report.stdout)
        memprof("profile", *MODEL, "--activation-checkpointing", "--save", after, "--json")
        memprof("export", before, "--to", folder / "before.pickle")
    return folder


def names(found, key="totals"):
    return {row["name"]: row for row in found[key]}


def test_a_capture_and_its_own_report_are_the_same(memprof, runs):
    result = memprof("compare", runs / "before.memprof", runs / "before.json")
    assert result.exit_code == 0, result.stderr
    assert "All 9 totals that are compared are equal, to the byte." in result.stdout
    assert "Settings: no difference" in result.stdout
    found = memprof("compare", runs / "before.memprof", runs / "before.json", "--json").json
    assert {row["status"] for row in found["stages"]} == {"same"}
    assert found["tensors"] == found["findings"] == found["settings"] == []
    assert (found["a"]["format"], found["b"]["format"]) == ("memprof capture", "memprof report")


def test_before_and_after_checkpointing(memprof, runs):
    result = memprof("compare", runs / "before.memprof", runs / "after.memprof", "--json")
    assert result.exit_code == 4
    found = result.json
    assert [(row["name"], row["a"], row["b"]) for row in found["settings"]] == [
        ("activation_checkpointing", False, True)
    ]
    totals = names(found)
    for name in ("parameters", "gradients", "optimizer state", "buffers"):
        assert totals[name]["difference_bytes"] == 0 and totals[name]["within"]
    assert totals["all tensors"]["difference_bytes"] < 0 and totals["allocated"]["difference_bytes"] < 0
    # What the report of each says is what is compared.
    before = json.loads((runs / "before.json").read_text())
    assert totals["allocated"]["a_bytes"] == before["peak"]["allocated_bytes"]
    assert totals["device used"]["a_bytes"] == before["bridge"]["peak_reserved"]["device_used_bytes"]
    assert found["categories"][0]["category"] == "activations"
    assert found["categories"][0]["difference_bytes"] < 0
    layers = [row for row in found["stages"] if row["name"].startswith("layer ")]
    assert len(layers) == 8 and all(row["status"] == "differs" for row in layers)
    first = next(row for row in layers if row["name"] == "layer 3" and row["step"] == 2)
    assert first["b"]["delta_bytes"] < first["a"]["delta_bytes"]


def test_a_tolerance_decides_the_exit_code(memprof, runs):
    files = (runs / "before.memprof", runs / "after.memprof")
    assert memprof("compare", *files, "--tolerance", "90%").exit_code == 0
    assert memprof("compare", *files, "--tolerance", "4GiB").exit_code == 0
    assert memprof("compare", *files, "--tolerance", "0.01%").exit_code == 4


def test_a_snapshot_of_the_same_run(memprof, runs):
    """The exported snapshot has the same totals, stages and tensors; shapes and roles are not in it."""
    found = memprof("compare", runs / "before.memprof", runs / "before.pickle", "--json").json
    totals = names(found)
    for name in ("allocated", "reserved"):
        assert totals[name]["compared"] and totals[name]["difference_bytes"] == 0
    assert not totals["parameters"]["compared"]
    assert found["within"] and found["tensors"] == [] and found["tensors_matched_by"] == "bytes"
    assert {row["status"] for row in found["stages"] if row["name"] != "context"} == {"same"}
    assert found["findings"] is None
    steps = names(found, "reserved")
    for name in ("requested by tensors", "rounding", "allocated", "free in segments", "reserved"):
        assert steps[name]["difference_bytes"] == 0, name


def test_settings_of_the_allocator(memprof, runs):
    other = runs / "expandable.memprof"
    memprof("profile", *MODEL, "--alloc-conf", "expandable_segments:True", "--save", other, "--json")
    found = memprof("compare", runs / "before.memprof", other, "--json").json
    assert [row["name"] for row in found["settings"]] == ["alloc_conf"]
    assert names(found)["allocated"]["difference_bytes"] <= 0
    assert names(found)["all tensors"]["difference_bytes"] == 0


def test_a_run_measured_on_the_cpu(memprof, tmp_path):
    """Parameters, gradients and optimizer state are the simulated ones to the byte; kernels are named apart."""
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 2,
        "vocab_size": 1000, "n_positions": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = {}
    for device in ("virtual", "cpu"):
        files[device] = tmp_path / f"{device}.memprof"
        run = ("profile", "--model", tmp_path / "config.json", "--context-length", 64, "--device", device)
        assert memprof(*run, "--save", files[device], "--json").exit_code == 0
    result = memprof("compare", files["virtual"], files["cpu"], "--json")
    assert result.exit_code == 0, result.stderr
    found = result.json
    totals = names(found)
    for name in ("parameters", "gradients", "optimizer state", "buffers"):
        assert totals[name]["compared"] and totals[name]["difference_bytes"] == 0, name
    assert totals["parameters"]["a_bytes"] > 0 and totals["gradients"]["a_bytes"] == totals["parameters"]["a_bytes"]
    assert not totals["allocated"]["compared"] and totals["reserved"]["b_bytes"] is None
    assert (found["kernels_a"]["kind"], found["kernels_b"]["kind"]) == ("CUDA kernels", "CPU kernels")
    assert (found["a"]["on_gpu"], found["b"]["on_gpu"]) == (True, False)
    assert found["seconds_a"] is None and found["seconds_b"] > 0
    # The steps of both are all there, stage by stage.
    unmatched = {row["name"] for row in found["stages"] if row["status"].startswith("only")}
    assert unmatched <= {"context", "other"}, unmatched
    text = memprof("compare", files["virtual"], files["cpu"], "--full").stdout
    assert "not compared: a CPU and a GPU run other kernels" in text and "seconds A" in text


def test_measured_recordings_of_others(memprof, shared_dir):
    snapshots = shared_dir / "snapshots"
    files = (snapshots / "charlie_2.7b_128_fwd.pickle", snapshots / "charlie_2.7b_128_full.pickle")
    same = memprof("compare", files[0], files[0])
    assert same.exit_code == 0 and "Tensors at the peak: no difference" in same.stdout
    assert memprof("compare", *files, "--top", 3).exit_code == 4


def refused(result, *parts):
    assert result.exit_code == 2, result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


def test_files_that_cannot_be_compared(memprof, runs, tmp_path):
    good, file = runs / "before.memprof", tmp_path / "file"
    refused(memprof("compare", good, tmp_path / "none"), "cannot read the file", "No such file")
    refused(memprof("compare", tmp_path, good), "cannot read the file")
    for content, part in (
        (b"", "the file is empty"),
        (b"hello", "neither a capture, a report nor a snapshot"),
        (b"{", "truncated or damaged"),
        (b"[" * 100_000, "truncated or damaged"),
        (b"{\xff}", "truncated or damaged"),
        (b"[]", "not a report of memprof profile"),
        (b"{}", "not a report of memprof profile"),
        (gzip.compress(b"{}"), "not a memprof capture"),
        (b"\x80\x04N.", "snapshot"),
        (b'{"command": "analyze"}', "not a report of memprof"),
    ):
        file.write_bytes(content)
        refused(memprof("compare", good, file), part)
        refused(memprof("compare", file, good), part)


def test_damaged_reports(memprof, runs, tmp_path):
    good, file = runs / "before.json", tmp_path / "damaged.json"
    whole = json.loads(good.read_text())

    def damaged(**changes):
        file.write_text(json.dumps({**whole, **changes}))
        return memprof("compare", good, file)

    refused(damaged(schema=99), "newer memprof", "schema 99")
    refused(damaged(schema="2"), "newer memprof")
    refused(damaged(peak={}), "the report is damaged")
    refused(damaged(peak={**whole["peak"], "allocated_bytes": "many"}), "the report is damaged")
    refused(damaged(stages=[1]), "the report is damaged")
    refused(damaged(device=None), "the report is damaged")
    refused(damaged(findings={"id": 1}), "the report is damaged")
    for length in (10, len(good.read_text()) // 2):
        file.write_text(good.read_text()[:length])
        refused(memprof("compare", file, good), "truncated or damaged")


def test_a_truncated_capture(memprof, runs, tmp_path):
    whole = (runs / "before.memprof").read_bytes()
    file = tmp_path / "cut.memprof"
    for length in (5, 100, len(whole) // 2, len(whole) - 4):
        file.write_bytes(whole[:length])
        refused(memprof("compare", file, runs / "before.memprof"))


@pytest.mark.parametrize("amount", ["much", "-1", "1.5", ""])
def test_tolerances_that_are_none(memprof, runs, amount):
    files = (runs / "before.memprof", runs / "after.memprof")
    refused(memprof("compare", *files, "--tolerance", amount), "not a tolerance")


def test_wrong_use(memprof, runs):
    refused(memprof("compare", runs / "before.memprof"))
    refused(memprof("compare", runs / "before.memprof", runs / "after.memprof", "--top", 0))
