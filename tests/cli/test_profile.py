"""`memprof profile` end to end, for catalog models and for models of one's own."""

import textwrap
from pathlib import Path

import pytest

GIB = 2**30


def check_consistency(report: dict) -> None:
    """What must hold of every report."""
    peak, context = report["peak"], report["device"]["context_bytes"]
    assert sum(row["bytes"] for row in peak["rows"]) == peak["allocated_bytes"]
    assert sum(peak["categories"].values()) == peak["allocated_bytes"]
    unsplit = peak["categories"].get("fragmentation", 0)
    assert sum(tensor["total_bytes"] for tensor in peak["tensors"]) + unsplit == peak["allocated_bytes"]
    assert max(stage["peak_allocated_bytes"] for stage in report["stages"]) == peak["allocated_bytes"]
    assert peak["categories"].get("unattributed", 0) < 0.01 * peak["allocated_bytes"]
    allocated = 0
    for stage in report["stages"]:
        allocated += stage["delta_bytes"]
        assert stage["allocated_bytes"] == allocated
        assert stage["requested_bytes"] <= stage["allocated_bytes"] <= stage["peak_allocated_bytes"]
        assert stage["allocated_bytes"] <= stage["reserved_bytes"] <= stage["peak_reserved_bytes"]
        assert stage["device_used_bytes"] == stage["reserved_bytes"] + context
    assert report["source"] == "simulated"
    assert max(stage["peak_reserved_bytes"] for stage in report["stages"]) == peak["reserved_bytes"]
    assert peak["device_used_bytes"] == peak["reserved_bytes"] + context
    oom = [(stage["step"], stage["name"]) for stage in report["stages"] if stage["oom"]]
    verdict = report["verdict"]
    if (
        verdict["fits"] and verdict["retries"]
    ):  # what was reserved before the cache was emptied would have gone beyond the GPU
        assert verdict["required_bytes"] > peak["device_used_bytes"]
    else:
        assert verdict["required_bytes"] == peak["device_used_bytes"]
    assert oom == ([] if verdict["fits"] else [(verdict["oom_step"], verdict["oom_stage"])])
    assert verdict["fits"] == (verdict["oom_message"] is None)
    if verdict["fits"]:
        assert peak["device_used_bytes"] <= report["device"]["total_bytes"]
    else:
        in_use = verdict["reserved_bytes"] + verdict["free_bytes"]
        assert in_use == report["device"]["usable_bytes"] >= verdict["in_use_bytes"] + verdict["free_bytes"]
        assert verdict["tried_to_allocate_bytes"] > verdict["free_bytes"]


def test_4b_at_131072_tokens(memprof):
    result = memprof("profile", "--model-size", "4B", "--context-length", 131072, "--json")
    report = result.json
    assert result.exit_code == 3
    check_consistency(report)
    tensors = {(t["bytes"], t["dtype"]) for t in report["peak"]["tensors"]}
    assert (39_829_110_784, "bfloat16") in tensors
    assert (79_658_221_568, "float32") in tensors
    assert (671_088_640, "bfloat16") in tensors
    logits = next(t for t in report["peak"]["tensors"] if t["bytes"] == 39_829_110_784)
    assert logits["shape"] == [131072, 151936]
    assert logits["module"] == "lm_head"
    assert logits["category"] == "logits and loss"
    assert report["target"]["num_parameters"] == 4_022_468_096
    assert report["device"]["name"] == "NVIDIA H100 80GB HBM3"
    assert not report["verdict"]["fits"]
    ids = [finding["id"] for finding in report["findings"]]
    assert ids[0] == "does-not-fit"
    assert "logits-explosion" in ids


@pytest.mark.parametrize(
    ("model", "options", "num_parameters", "stages"),
    [
        (
            "gpt2",
            ("--batch-size", 4, "--context-length", 1024, "--dtype", "float32"),
            124_439_808,
            {"layer 11", "loss"},
        ),
        ("pythia-70m", (), 70_426_624, {"layer 5", "logits"}),
        pytest.param("llama-3.1-8b", (), 8_030_261_248, {"layer 31", "final norm"}, marks=pytest.mark.nightly),
        pytest.param(
            "mixtral-8x7b", ("--context-length", 256), 46_702_792_704, {"layer 31"}, marks=pytest.mark.nightly
        ),
        ("bert-base-uncased", (), 109_514_298, {"layer 11", "logits"}),
        pytest.param(
            "t5-base",
            (),
            222_903_552,
            {"encoder layer 11", "decoder embedding", "decoder layer 11"},
            marks=pytest.mark.nightly,
        ),
        ("vit-base", (), 86_567_656, {"vit.embeddings ViTEmbeddings", "layer 11", "classifier Linear"}),
        ("whisper-tiny", (), 37_760_640, {"encoder layer 3", "decoder layer 3"}),
    ],
)
def test_catalog_model(memprof, model, options, num_parameters, stages):
    result = memprof("profile", "--model", model, *options, "--json")
    report = result.json
    check_consistency(report)
    assert report["target"]["num_parameters"] == num_parameters
    names = {stage["name"] for stage in report["stages"]}
    assert names >= stages | {"context", "parameters", "backward", "optimizer step"}
    assert ("embedding" in names) == (model != "vit-base")  # images are no tokens
    parameters = next(stage for stage in report["stages"] if stage["name"] == "parameters")
    width = {"float32": 4, "bfloat16": 2}[report["target"]["dtype"]]
    # Buffers and rounding come on top.
    assert num_parameters * width <= parameters["allocated_bytes"] <= 1.01 * num_parameters * width + GIB // 64
    assert result.exit_code == (0 if report["verdict"]["fits"] else 3)


@pytest.mark.nightly
def test_deepseek_v3(memprof):
    report = memprof("profile", "--model", "deepseek-v3", "--context-length", 512, "--json").json
    check_consistency(report)
    assert report["target"]["num_parameters"] == 671_026_404_352


MODEL = textwrap.dedent(
    """
    import torch
    from torch import nn

    class Rope(nn.Module):
        def __init__(self, size, on_device):
            super().__init__()
            self.on_device = on_device
            self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, size, 2).float() / size))

        def forward(self, length):
            if self.on_device:
                t = torch.arange(length, dtype=self.inv_freq.dtype, device=self.inv_freq.device)
            else:
                t = torch.arange(length, dtype=self.inv_freq.dtype)  # the bug
            return torch.outer(t, self.inv_freq)  # meets it

    class Model(nn.Module):
        def __init__(self, on_device=True, vocabulary=1000):
            super().__init__()
            self.embed = nn.Embedding(vocabulary, 128)
            self.rope = Rope(128, on_device)
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
            self.head = nn.Linear(128, vocabulary, bias=False)

        def forward(self, ids):
            hidden = self.embed(ids) + self.rope(ids.shape[1]).repeat(1, 2)
            for layer in self.layers:
                hidden = hidden + layer(hidden).relu()
            return self.head(hidden)

    class WeightDelta(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(1000, 4096)
            self.A = nn.Parameter(torch.randn(4096, 16))
            self.B = nn.Parameter(torch.randn(16, 14336))

        def forward(self, ids):
            hidden = self.embed(ids)
            modulation = hidden @ self.A
            delta_w = torch.einsum("bsr,dr,rf->bsdf", modulation, self.A, self.B)  # case study 1
            return torch.einsum("bsd,bsdf->bsf", hidden, delta_w)

    def model(): return Model()
    def buggy(): return Model(on_device=False)
    def sized(vocab_size=1000): return Model(vocabulary=vocab_size)
    def weight_delta(): return WeightDelta()
    def raises(): raise ValueError("no weights here")
    def returns_none(): return None
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
        def forward(self, x):
            return self.layer(x) @ torch.zeros(3, 4, device=x.device)  # does not multiply
    def fails(): return Fails()
    """
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(MODEL.splitlines(), 1) if text in line)


def test_factory(memprof, file):
    result = memprof("profile", "--model", f"{file}:model", "--batch-size", 2, "--context-length", 64, "--json")
    assert result.exit_code == 0, result.stderr
    report = result.json
    check_consistency(report)
    assert report["target"]["num_parameters"] == 2 * 1000 * 128 + 4 * (128 * 128 + 128)
    assert {"embedding", "layer 3", "logits", "loss"} <= {stage["name"] for stage in report["stages"]}
    assert not report["findings"]


def test_factory_takes_what_it_asks_for(memprof, file):
    report = memprof("profile", "--model", f"{file}:sized", "--vocab-size", 5000, "--json").json
    assert report["target"]["num_parameters"] == 2 * 5000 * 128 + 4 * (128 * 128 + 128)


def test_rope_bug_is_a_device_mismatch(memprof, file):
    result = memprof("profile", "--model", f"{file}:buggy", "--context-length", 64, "--json")
    assert result.exit_code == 1
    found = next(f for f in result.json["findings"] if f["id"] == "device-mismatch")
    assert found["severity"] == "error"
    text = found["title"] + " ".join(evidence["text"] for evidence in found["evidence"])
    assert f"my_model.py:{line_of('the bug')}" in text
    assert f"my_model.py:{line_of('meets it')}" in text
    assert "cuda:0" in text and "cpu" in text


def test_weight_delta_has_its_true_bytes(memprof, file):
    options = ("--batch-size", 4, "--context-length", 512)
    result = memprof("profile", "--model", f"{file}:weight_delta", *options, "--json")
    assert result.exit_code == 3
    found = next(f for f in result.json["findings"] if f["id"] == "weight-delta-per-token")
    delta = 4 * 512 * 4096 * 14336 * 4
    evidence = [e for e in found["evidence"] if e["bytes"] == delta]
    assert evidence
    assert any(f"my_model.py:{line_of('case study 1')}" in (e["source"] or "") for e in evidence)
    assert delta in {tensor["bytes"] for tensor in result.json["peak"]["tensors"]}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("raises", "the factory raises raised ValueError"),
        ("returns_none", "did not return a module"),
        ("modle", "did you mean 'model'?"),
    ],
)
def test_wrong_factories(memprof, file, factory, message):
    result = memprof("profile", "--model", f"{file}:{factory}")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_model_that_raises_names_its_line(memprof, file):
    result = memprof("profile", "--model", f"{file}:fails")
    assert result.exit_code == 1
    assert "the run failed in forward of step 1 with RuntimeError" in result.stderr
    assert f"my_model.py:{line_of('does not multiply')}" in result.stderr


def test_debug_shows_the_traceback(file, capsys):
    from memprof.cli.main import run

    with pytest.raises(Exception, match="the factory raises raised"):
        run(["profile", "--model", f"{file}:raises", "--debug"])


def test_config_json(memprof, tmp_path):
    config = {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 3, "vocab_size": 500, "n_positions": 128}
    (tmp_path / "config.json").write_text(__import__("json").dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        report = memprof("profile", "--model", path, "--json").json
        check_consistency(report)
        assert report["target"]["context_length"] == 128
        assert {"layer 0", "layer 2"} <= {stage["name"] for stage in report["stages"]}


def test_save_and_show_give_the_same_report(memprof, tmp_path):
    capture = tmp_path / "run.memprof"
    options = ("--model", "pythia-70m", "--context-length", 128)
    first = memprof("profile", *options, "--save", capture, "--json")
    again = memprof("show", capture, "--json")
    assert again.json == first.json
    assert again.exit_code == first.exit_code == 0
    shown = memprof("profile", *options, "--no-cache").stdout
    assert shown.startswith("Fits: ") and memprof("show", capture).stdout == shown


@pytest.mark.nightly
def test_options_change_what_they_say(memprof):
    base = ("profile", "--model", "pythia-70m", "--context-length", 512, "--batch-size", 2, "--json")

    def peak(*options):
        return memprof(*base, *options).json["peak"]

    plain = peak()
    checkpointed = peak("--activation-checkpointing")
    assert checkpointed["categories"]["activations"] < 0.6 * plain["categories"]["activations"]
    assert peak("--attention", "eager")["categories"]["activations"] > plain["categories"]["activations"]
    assert "optimizer state" not in peak("--optimizer", "sgd")["categories"]
    assert "gradients" not in peak("--mode", "inference")["categories"]
    assert "library workspace" not in peak("--no-workspaces")["categories"]
    math = peak("--sdpa-backend", "math")["categories"]["activations"]
    assert math > 1.5 * peak("--sdpa-backend", "efficient")["categories"]["activations"]

    def optimizer_peak(implementation):
        # A fused step moves no memory, and a stage in which none moves is left out.
        stages = memprof(*base, "--optimizer-impl", implementation).json["stages"]
        steps = [stage for stage in stages if stage["name"] == "optimizer step" and stage["step"] == 2]
        return max((stage["peak_allocated_bytes"] for stage in steps), default=0)

    assert optimizer_peak("foreach") > optimizer_peak("single") > optimizer_peak("fused")
    mixed = memprof(*base, "--amp", "bfloat16").json
    assert mixed["target"]["dtype"] == "float32"
    assert {tensor["dtype"] for tensor in mixed["peak"]["tensors"]} >= {"float32", "bfloat16"}
    assert mixed["peak"]["categories"]["parameters"] == 2 * plain["categories"]["parameters"]
    small = memprof(*base, "--vocab-size", 1000).json
    assert small["target"]["num_parameters"] == 70_426_624 - 2 * (50304 - 1000) * 512
    accumulated = memprof(*base, "--gradient-accumulation", 3).json
    assert {stage["micro_batch"] for stage in accumulated["stages"]} == {0, 1, 2, 3}
    assert memprof(*base, "--gpu-vram", "0.9").exit_code == 3
    assert memprof(*base, "--gpu", "rtx-4090").json["device"]["total_bytes"] < 24 * GIB


def test_the_report_is_not_lost_when_saving_fails(memprof, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memprof.trace.files.os.replace", full)
    capture = tmp_path / "run.memprof"
    result = memprof("profile", "--model", "pythia-70m", "--context-length", 64, "--save", capture, "--json")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    check_consistency(result.json)
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_uses_no_gpu_is_one_clear_error():
    import memprof as library
    from memprof.errors import MemprofError

    with library.virtual_gpu("t4") as gpu:
        pass
    with pytest.raises(MemprofError, match="no allocation on the GPU"):
        gpu.report()


class TestNpt:
    """Case study 1 from the command line."""

    DIMENSIONS = ("--model", "llama-3.1-8b", "--dtype", "float32", "--batch-size", 4, "--context-length", 512)

    def test_dense_is_found_and_named(self, memprof):
        result = memprof("profile", *self.DIMENSIONS, "--npt", "dense", "--npt-layers", "0,1", "--steps", 1, "--json")
        assert result.exit_code == 3
        found = next(f for f in result.json["findings"] if f["id"] == "weight-delta-per-token")
        assert "448.00 GiB" in found["title"] and "in model.layers.*.mlp.gate_proj.npt" in found["title"]
        assert {line["module"] for line in found["evidence"]} == {"model.layers.*.mlp.gate_proj.npt"}
        # Layer 1's delta is kept for the gradient of its input; layer 0's needs none, for all before it is frozen.
        assert found["bytes"] == 2 * 448 * 2**30
        assert found["fixes"][0] == "low-rank-npt"

    def test_low_rank_is_not(self, memprof):
        options = ("--npt", "low-rank", "--npt-rank", 8, "--npt-layers", "0,1", "--steps", 1, "--gpu", "a100-80gb")
        result = memprof("profile", *self.DIMENSIONS, *options, "--json")
        assert result.exit_code == 0
        assert not [f for f in result.json["findings"] if f["id"] == "weight-delta-per-token"]
        target = result.json["target"]
        assert target["num_trainable_parameters"] == 2 * 8 * (4096 + 14336)
        assert (target["npt"], target["npt_rank"], target["npt_layers"]) == ("low-rank", 8, "0,1")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--npt", "low-rnak"), "did you mean 'low-rank'?"),
            (("--npt-rank", 8), "add --npt"),
            (("--npt", "dense", "--npt-layers", "12"), "they are 0 to 11"),
            (("--npt", "dense", "--npt-num-ranks", 0), "--npt-num-ranks must be at least 1"),
            (("--npt", "dense", "--adapter", "lora"), "--npt freezes the whole model already"),
        ],
    )
    def test_wrong_use(self, memprof, options, message):
        result = memprof("profile", "--model", "gpt2", *options)
        assert result.exit_code == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr


def test_a_dataset_in_host_memory(memprof):
    """Case study 2: batches made before training are host memory, and none of the GPU's."""
    base = ("profile", "--model", "pythia-70m", "--batch-size", 32, "--context-length", 128, "--steps", 1, "--json")
    streamed, held = memprof(*base).json, memprof(*base, "--dataset-batches", 20_000).json
    dataset = 20_000 * 2 * 32 * 128 * 8  # ids and labels, int64
    assert held["host_peak_bytes"] >= dataset > streamed["host_peak_bytes"]
    assert held["peak"]["host_allocated_bytes"] - streamed["peak"]["host_allocated_bytes"] == dataset
    assert held["peak"]["allocated_bytes"] == streamed["peak"]["allocated_bytes"]
    assert [text for text in held["assumptions"] if "20,000 batches are held in host memory" in text]
    assert not [text for text in streamed["assumptions"] if "batches are held" in text]
