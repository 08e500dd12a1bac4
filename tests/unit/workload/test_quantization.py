"""--quantize and the optimizers of libraries: what is built, what it needs, and usage error."""

from __future__ import annotations

import logging
import sys

import pytest

from memprof.errors import REQUIREMENTS, UsageError
from memprof.flows import profile as flow
from memprof.spec import QUANTIZED_OPTIMIZERS, TargetSpec
from memprof.workload.models import find_source
from memprof.workload.quantization import import_quietly
from tests.lanes import by_day

MODEL = {"model": "qwen2.5-0.5b", "context_length": 64, "steps": 1}
# Weights of the linear layers but the head: 24 x (2 x 896 x 896 + 2 x 896 x 128 + 3 x 896 x 4864).
LINEAR = 357_826_560

ROWS = 24 * (2 * 896 + 2 * 128 + 2 * 4864 + 896)


def profile(**fields):
    return flow.profile(TargetSpec(**{**MODEL, **fields}))


@pytest.mark.parametrize(
    ("quantize", "fields", "per_weight"),
    [
        pytest.param("int8", {}, 1 + 4 * ROWS / LINEAR, marks=pytest.mark.nightly),
        ("nf4", {}, 0.5 + 1 / 64 + 4 / 64 / 256),
        pytest.param("fp4", {"double_quant": False}, 0.5 + 4 / 64, marks=pytest.mark.nightly),
    ],
)
def test_what_parameters_take(quantize, fields, per_weight):
    pytest.importorskip("bitsandbytes")
    plain = profile(mode="inference", dtype="bfloat16")[1].peak.categories["parameters"]
    trace, document = profile(mode="inference", dtype="bfloat16", quantize=quantize, **fields)
    found = document.peak.categories["parameters"]
    # Small rests: tables and means of each layer.
    assert plain - found == pytest.approx(LINEAR * (2 - per_weight), rel=2e-3)
    assert any(quantize in sentence for sentence in trace.assumptions)
    assert document.target.num_parameters == 494_032_768
    assert not trace.mismatches


def test_qlora_trains_the_adapter_alone():
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    trace, document = profile(quantize="nf4", adapter="lora", optimizer="paged-adamw-8bit")
    assert 0 < document.target.num_trainable_parameters < 2_000_000
    assert document.failure is None
    assert any("prepare_model_for_kbit_training" in sentence for sentence in trace.assumptions)


@pytest.mark.parametrize("quantize", by_day(["int8", "nf4"], "nf4"))
def test_npt_trains_beside_a_base_in_few_bits(quantize):
    pytest.importorskip("bitsandbytes")
    options = {"npt": "low-rank", "npt_layers": "0-3", "dtype": "bfloat16"}
    plain, (trace, document) = profile(**options)[1], profile(quantize=quantize, **options)
    assert document.failure is None and not trace.mismatches
    # Four components of rank 16 for 896 x 4864, in the model's dtype and not the weights'.
    assert document.target.num_trainable_parameters == 4 * 16 * (896 + 4864)
    made = [s for i, s in enumerate(trace.storages) if ".npt." in getattr(trace.owners.get(i), "name", "")]
    assert {s.dtype for s in made if s.shape in ((896, 16), (16, 4864))} == {"bfloat16"}
    assert plain.peak.categories["parameters"] - document.peak.categories["parameters"] > 0.9 * LINEAR


@pytest.mark.parametrize("name", by_day(QUANTIZED_OPTIMIZERS, "paged-adamw-8bit", "torchao-adamw-4bit"))
def test_optimizer_state(name):
    pytest.importorskip("torchao" if name.startswith("torchao") else "bitsandbytes")
    _, document = profile(optimizer=name, steps=2, dtype="bfloat16")
    state = document.peak.categories.get("optimizer state", 0) / 494_032_768
    expected = {"paged-adamw-8bit": 8 / 256, "torchao-adamw-4bit": 1 + 8 / 128}.get(name, 2 + 8 / 256)
    assert state == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"quantize": "int3"}, "quantize"),
        ({"quantize": "nf4"}, "quantized weights are not trained"),
        ({"double_quant": False}, "--no-double-quant is for 4-bit weights"),
        ({"quantize": "int8", "double_quant": False, "adapter": "lora"}, "--no-double-quant is for 4-bit weights"),
        ({"quantize": "fp8", "npt": "low-rank"}, "beside bitsandbytes' layers alone"),
        ({"optimizer": "adamw-8bit", "optimizer_impl": "fused"}, "one implementation"),
    ],
)
def test_wrong_use(fields, problem):
    with pytest.raises(UsageError, match=problem):
        TargetSpec(**{**MODEL, **fields})


def test_a_factory_quantizes_itself():
    with pytest.raises(UsageError, match="for models of transformers"):
        find_source(TargetSpec(model="file.py:build", quantize="nf4", mode="inference"))


@pytest.mark.parametrize(
    ("package", "fields"),
    [
        ("bitsandbytes", {"quantize": "nf4", "mode": "inference"}),
        ("accelerate", {"quantize": "nf4", "mode": "inference"}),
        ("bitsandbytes", {"optimizer": "paged-adamw-8bit"}),
        ("torchao", {"optimizer": "torchao-adamw-4bit"}),
    ],
)
def test_a_package_that_lacks(monkeypatch, package, fields):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"{package} is needed") as raised:
        profile(**fields)
    assert raised.value.hint == f"pip install '{REQUIREMENTS[package]}'"


def test_what_an_import_has_to_say_is_not_said(tmp_path, monkeypatch, capsys):
    """As torch's counter of operations has, where there is no Triton."""
    (tmp_path / "noted.py").write_text("import logging\nlogging.getLogger('folder.noted').warning('no Triton')\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "noted.py").rename(tmp_path / "folder" / "noted.py")
    monkeypatch.syspath_prepend(tmp_path)
    logger = logging.getLogger("folder.noted")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler()])
    import_quietly("folder.noted")
    assert (logger.level, capsys.readouterr().err) == (logging.WARNING, "")


def test_what_an_import_compiles_is_compiled_when_it_is_called(tmp_path, monkeypatch):
    """As bitsandbytes' kernels for the CPU; decorating them would import the compiler."""
    torch = pytest.importorskip("torch")
    compiled = []

    def compiler(model=None, **options):
        if model is None:
            return lambda model: torch.compile(model, **options)
        compiled.append((getattr(model, "__name__", "a module"), options))
        return model

    (tmp_path / "decorated.py").write_text(
        "import torch\n"
        "@torch.compile(dynamic=False)\n"
        "def double(x):\n"
        "    return 2 * x\n"
        "whole = torch.compile(torch.nn.Linear(1, 1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "compile", compiler)
    decorated = import_quietly("decorated")
    assert [name for name, _ in compiled] == ["a module"]
    assert (decorated.double(2), decorated.double(3)) == (4, 6)
    assert compiled[1:] == [("double", {"dynamic": False})]
    assert torch.compile is compiler
