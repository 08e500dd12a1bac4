"""safetensors on the virtual GPU: shells, headers without data, and what transformers makes of both."""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import GPU, HOST, EventKind
from memprof.virtual import VirtualGpu
from memprof.virtual.interchange import safetensors_files

GPU_MODEL = find_gpu("a100-80gb")
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
LARGE = 1 << 20
THIS = sys.modules[__name__]


@pytest.fixture
def real(tmp_path: Path) -> Path:
    tensors = {
        "weight": torch.full((LARGE, 2), 0.5, dtype=torch.bfloat16),
        "bias": torch.arange(6.0).reshape(2, 3),
        "tokens": torch.arange(LARGE),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 3),
    }
    safetensors.torch.save_file(tensors, tmp_path / "real.safetensors", {"format": "pt"})
    return tmp_path / "real.safetensors"


def is_virtual(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


# -- shells -----------------------------------------------------------------------------------------------------------


def test_a_shell_comes_back(tmp_path: Path, gpu: VirtualGpu) -> None:
    file = tmp_path / "shell.safetensors"
    state = {
        "weight": torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16),
        "host": torch.zeros(LARGE),
        "known": torch.arange(5, device="cuda"),
        "real": torch.tensor([[1.5, 2.5]]),
        "eight": torch.empty(LARGE, device="cuda", dtype=torch.float8_e4m3fn),
    }
    used = torch.cuda.memory_allocated()
    host = torch.tensor([1.5])
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    assert torch.cuda.memory_allocated() == used and host.item() == 1.5
    assert file.stat().st_size < 2048
    for device in ("cpu", "cuda", 0):
        loaded = safetensors.torch.load_file(file, device=device)  # type: ignore[arg-type]
        assert {t.device for t in loaded.values()} == {CPU if device == "cpu" else CUDA}
        assert {n: (t.shape, t.dtype) for n, t in loaded.items()} == {n: (t.shape, t.dtype) for n, t in state.items()}
        assert loaded["known"].tolist() == [0, 1, 2, 3, 4] and loaded["real"].tolist() == [[1.5, 2.5]]
        assert is_virtual(loaded["weight"])
    with THIS.safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"} and opened.keys() == sorted(state)
        assert opened.get_slice("weight").get_dtype() == "BF16"
    assert [line for line in gpu.trace.assumptions if line.startswith("Checkpoints are written as empty shells")]
    assert not [line for line in gpu.trace.assumptions if "are not read" in line]


def test_the_whole_dictionary_passes_through_the_host(tmp_path: Path, gpu: VirtualGpu) -> None:
    state = {name: torch.randn(LARGE, device="cuda") for name in "ab"}
    events = len(gpu.trace.events)
    safetensors.torch.save_file(state, tmp_path / "shell.safetensors")
    moved = [e for e in gpu.trace.events[events:] if e.kind is not EventKind.PHASE]
    made = [gpu.trace.storages[e.ref] for e in moved]
    assert [(s.device, s.num_bytes) for s in made] == [(HOST, 4 * LARGE)] * 4  # two taken, then two released
    assert made[0] is made[3] and made[1] is made[2]


def test_tied_models(tmp_path: Path, gpu: VirtualGpu) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).to("cuda")
    model[1].weight = model[0].weight
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file(model.state_dict(), tmp_path / "shared.safetensors")
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors.torch.save_file({"turned": torch.randn(1024, 2048, device="cuda").t()}, tmp_path / "t.safetensors")
    used = torch.cuda.memory_allocated()
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    assert safetensors.torch.load_model(model, tmp_path / "model.safetensors") == (set(), [])
    assert torch.cuda.memory_allocated() == used


def test_outside_a_shell_is_an_error_that_says_why(tmp_path: Path) -> None:
    file = tmp_path / "shell.safetensors"
    with VirtualGpu(GPU_MODEL):
        safetensors.torch.save_file({"weight": torch.randn(8, device="cuda")}, file)
    for load in (
        lambda: safetensors.torch.load_file(file),
        lambda: safe_open(file, framework="pt"),
        lambda: safetensors.torch.load(file.read_bytes()),
        lambda: safe_open(file, framework="numpy"),
    ):
        with pytest.raises(safetensors.SafetensorError, match="memprof wrote on a virtual GPU: this file holds no wei"):
            load()
    with VirtualGpu(GPU_MODEL):
        assert safetensors.torch.load_file(file, device="cuda")["weight"].device == CUDA


def test_without_virtual_tensors_a_file_is_an_ordinary_one(tmp_path: Path) -> None:
    with VirtualGpu(GPU_MODEL):
        safetensors.torch.save_file({"weight": torch.tensor([1.0, 2.0])}, tmp_path / "plain.safetensors")
    assert safetensors.torch.load_file(tmp_path / "plain.safetensors")["weight"].tolist() == [1.0, 2.0]


# -- files of real runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "place"), [("cpu", CPU), ("cuda", CUDA), ("cuda:0", CUDA)])
def test_a_real_file(real: Path, gpu: VirtualGpu, device: str, place: torch.device) -> None:
    before = torch.cuda.memory_allocated()
    loaded = safetensors.torch.load_file(real, device=device)
    assert {tensor.device for tensor in loaded.values()} == {place}
    assert loaded["tokens"][-1].item() == LARGE - 1 and loaded["bias"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["scalar"].item() == 7 and loaded["none"].shape == (0, 3)
    assert is_virtual(loaded["weight"]) and loaded["weight"].dtype == torch.bfloat16
    on_gpu = sum(t.nbytes for t in loaded.values()) if place == CUDA else 0
    assert torch.cuda.memory_allocated() - before == on_gpu
    assert any("are not read" in line for line in gpu.trace.assumptions)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    "index", [..., 1, slice(0, 2), (slice(None), 1), (slice(0, 2), slice(1, 2)), (..., 0), slice(0, 2, 2)]
)
def test_slices_have_the_shapes_of_the_library(real: Path, name: str, index: Any) -> None:
    with safe_open(real, framework="pt") as file:
        expected = file.get_slice(name)[index]
    with VirtualGpu(GPU_MODEL), THIS.safe_open(real, framework="pt", device="cuda") as file:
        view = file.get_slice(name)
        assert (view.get_shape(), view.get_dtype()) == ([LARGE, 2], "BF16") or name == "bias"
        part = view[index]
        assert (part.shape, part.dtype, part.device) == (expected.shape, expected.dtype, CUDA)
        assert torch.cuda.memory_allocated() == part.nbytes
        with pytest.raises(safetensors.SafetensorError, match="does not contain tensor other"):
            file.get_slice("other")


def test_the_library_says_what_is_wrong_with_a_file(tmp_path: Path, gpu: VirtualGpu) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"123")
    with pytest.raises(safetensors.SafetensorError, match="header"):
        safetensors.torch.load_file(tmp_path / "broken.safetensors", device="cuda")
    with pytest.raises(FileNotFoundError):
        safetensors.torch.load_file(tmp_path / "none.safetensors")


def test_names_imported_meanwhile_are_given_back() -> None:
    original = safe_open
    with VirtualGpu(GPU_MODEL):
        assert THIS.safe_open is not original
        THIS.late = safetensors.safe_open  # type: ignore[attr-defined]
    assert THIS.safe_open is safetensors.safe_open is original


# -- transformers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=4096
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "shards", max_shard_size="2MB")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "bin").mkdir()
    (folder / "pytorch_model.bin").rename(folder / "bin" / "pytorch_model.bin")
    config.save_pretrained(folder / "bin")
    return folder


@pytest.mark.parametrize("form", ["one", "shards", "bin"])
@pytest.mark.parametrize(
    ("options", "device", "dtype"),
    [
        ({}, CPU, None),
        ({"dtype": "auto"}, CPU, torch.bfloat16),
        ({"dtype": torch.float32, "low_cpu_mem_usage": True}, CPU, torch.float32),
        ({"device_map": "cuda", "dtype": torch.bfloat16}, CUDA, torch.bfloat16),
        ({"device_map": "auto", "dtype": torch.float32}, CUDA, torch.float32),
        ({"device_map": {"": 0}, "dtype": torch.bfloat16}, CUDA, torch.bfloat16),
    ],
)
def test_from_pretrained(
    llama: Path, gpu: VirtualGpu, form: str, options: Any, device: torch.device, dtype: torch.dtype | None
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama / form, **options)
    parameters = list(model.parameters())
    assert {p.device for p in parameters} == {device}
    assert dtype is None or {p.dtype for p in parameters} == {dtype}
    large = [p for p in parameters if p.nbytes >= 2 << 20]
    assert large and all(is_virtual(p) for p in large)
    on_gpu = sum(p.nbytes for p in parameters) + sum(b.nbytes for b in model.buffers())
    assert torch.cuda.memory_allocated() == (on_gpu if device == CUDA else 0)
    # Nothing beside the weights: less than the smallest layer.
    assert torch.cuda.max_memory_allocated() <= torch.cuda.memory_allocated() * 1.01
    ids = torch.ones(1, 4, dtype=torch.long, device="cuda")
    model.to("cuda")(ids, labels=ids).loss.backward()
    assert gpu.trace.mismatches == []
    assert {s.device for s in gpu.trace.storages} == {GPU, HOST}


def test_a_model_saved_and_loaded(llama: Path, gpu: VirtualGpu, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama / "one", device_map="cuda")
    used = torch.cuda.memory_allocated()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="2MB")
    assert torch.cuda.memory_allocated() == used
    assert (tmp_path / "one" / "model.safetensors").stat().st_size < 1 << 15
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for form in ("one", "shards"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / form, device_map="cuda")
        assert {n: (p.shape, p.dtype) for n, p in again.named_parameters()} == {
            n: (p.shape, p.dtype) for n, p in model.named_parameters()
        }
        del again
    assert torch.cuda.memory_allocated() == used


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        ids = torch.arange(8) + index
        return {"input_ids": ids, "labels": ids}


def test_a_trainer_resumes_in_the_same_run_and_in_another(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    def train(steps: int, resume: bool) -> tuple[int, int]:
        torch.cuda.reset_peak_memory_stats()
        arguments = TrainingArguments(
            str(tmp_path / "out"),
            per_device_train_batch_size=2,
            max_steps=steps,
            save_steps=2,
            bf16=True,
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=1,
        )
        model = AutoModelForCausalLM.from_pretrained(llama / "one", dtype=torch.float32)
        trainer = Trainer(model, arguments, train_dataset=Tokens())
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.global_step, torch.cuda.max_memory_allocated()

    with VirtualGpu(GPU_MODEL, workspaces=False):
        assert train(2, False)[0] == 2
        assert train(4, True)[0] == 4
    assert (tmp_path / "out" / "checkpoint-4" / "optimizer.pt").stat().st_size < 1 << 16
    with VirtualGpu(GPU_MODEL, workspaces=False) as gpu:
        assert train(6, True)[0] == 6
    assert gpu.trace.failure is None and gpu.trace.mismatches == []


# -- files larger than memory ------------------------------------------------------------------------------------------

GIB = 1 << 30


def sparse(path: Path, entries: dict[str, tuple[str, list[int]]]) -> Path:
    """A file with these tensors, of zeros that take no room on disk."""
    header: dict[str, Any] = {}
    at = 0
    for name, (code, shape) in entries.items():
        size = math.prod(shape) * {"BF16": 2, "I64": 8}[code]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return path


@pytest.mark.parametrize("how", ["load_file", "safe_open"])
def test_a_file_larger_than_memory_is_loaded_by_its_header(tmp_path: Path, how: str) -> None:
    """The library maps the whole file, and this one is larger than what a machine can promise."""
    file = sparse(tmp_path / "large.safetensors", {f"t{i}": ("BF16", [1 << 20, 20 << 10]) for i in range(4)})
    assert file.stat().st_size > 160 * GIB
    with VirtualGpu(find_gpu("b200")):
        if how == "load_file":
            loaded = safetensors.torch.load_file(file, device="cuda")
        else:
            with safe_open(file, framework="pt", device="cuda:0") as opened:
                loaded = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                rows = opened.get_slice("t3")[-1:, :8]
                assert rows.device.type == "cuda" and rows.cpu().tolist() == [[0.0] * 8]
        assert torch.cuda.memory_allocated() // GIB == 160
        assert {tensor.device.type for tensor in loaded.values()} == {"cuda"}


def test_from_pretrained_of_a_file_larger_than_memory(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=16 << 20, hidden_size=1024, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        state = Qwen3ForCausalLM(config).state_dict()
    del state["lm_head.weight"]
    sparse(tmp_path / "model.safetensors", {name: ("BF16", list(tensor.shape)) for name, tensor in state.items()})
    with VirtualGpu(GPU_MODEL):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cuda:0"})
        assert model.lm_head.weight.device.type == "cuda"
        assert torch.cuda.memory_allocated() // GIB == 32


def test_integers_are_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sparse(tmp_path / "tokens.safetensors", {"short": ("I64", [1 << 17]), "long": ("I64", [1 << 18])})
    monkeypatch.setattr(safetensors_files, "_MAX_READ_BYTES", 1 << 21)
    with VirtualGpu(GPU_MODEL) as gpu:
        loaded = safetensors.torch.load_file(file)
        assert int(loaded["short"].sum()) == 0
    assert any("not read" in sentence for sentence in gpu.trace.assumptions)


def test_a_file_that_is_cut_off_is_the_librarys_to_refuse(tmp_path: Path) -> None:
    file = sparse(tmp_path / "cut.safetensors", {"t": ("BF16", [64, 64])})
    with file.open("rb+") as opened:
        opened.truncate(file.stat().st_size - 2)
    with VirtualGpu(GPU_MODEL), pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(file, device="cuda")
