"""`torch.save` and `torch.load`: shells come back as what they were, and real files go where they are sent."""

from __future__ import annotations

import io
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import GPU, HOST, EventKind
from memprof.virtual import VirtualGpu

GPU_MODEL = find_gpu("a100-80gb")
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
LARGE = 1 << 20


def again(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def test_sharing_and_views_come_back(gpu: VirtualGpu) -> None:
    weight = torch.randn(1024, 1024, device="cuda")
    state = {"tied": weight, "head": weight, "row": weight[3], "turned": weight.t(), "half": weight[:, ::2]}
    before = torch.cuda.memory_allocated()
    loaded = again(state)
    assert torch.cuda.memory_allocated() - before == weight.nbytes
    pointers = {name: tensor.data_ptr() - loaded["tied"].data_ptr() for name, tensor in loaded.items()}
    assert pointers == {"tied": 0, "head": 0, "row": 3 * 4096, "turned": 0, "half": 0}
    assert all(loaded[n].stride() == state[n].stride() and loaded[n].shape == state[n].shape for n in state)
    assert loaded["head"].device == CUDA and not loaded["turned"].is_contiguous()


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_types(gpu: VirtualGpu, dtype: torch.dtype, weights_only: bool) -> None:
    loaded = again(torch.empty(3, LARGE, dtype=dtype, device="cuda"), weights_only=weights_only)
    assert (loaded.dtype, loaded.shape, loaded.device) == (dtype, (3, LARGE), CUDA)
    assert torch.cuda.memory_allocated() == loaded.nbytes


def test_the_state_of_a_training_run(gpu: VirtualGpu) -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 512)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(model(torch.randn(4, 512, device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all(),
        "epoch": 3,
    }
    used = torch.cuda.memory_allocated()
    loaded = again(saved, map_location="cpu", weights_only=True)
    assert torch.cuda.memory_allocated() == used
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    scaler.load_state_dict(loaded["scaler"])
    torch.set_rng_state(loaded["random"])
    torch.cuda.set_rng_state_all(loaded["random_cuda"])
    assert torch.equal(loaded["random"], saved["random"]) and loaded["epoch"] == 3
    del saved  # it holds the optimizer's old state
    assert torch.cuda.memory_allocated() == used
    assert scheduler.last_epoch == 1 and loaded["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.01)
    assert loaded["model"]["1.num_batches_tracked"].item() == 1
    assert [float(state["step"]) for state in optimizer.state.values()] == [1.0] * 6


def test_a_whole_model(gpu: VirtualGpu) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).to("cuda")
    model[1].weight = model[0].weight
    used = torch.cuda.memory_allocated()
    loaded = again(model, weights_only=False)
    assert loaded[1].weight is loaded[0].weight and isinstance(loaded[0].weight, nn.Parameter)
    assert torch.cuda.memory_allocated() == 2 * used
    loaded(torch.ones(2, 1024, device="cuda")).sum().backward()
    assert loaded[0].weight.grad is not None and loaded[0].weight.grad.device == CUDA


@pytest.mark.parametrize("old_form", [False, True])
def test_files_are_small_and_say_what_they_are(gpu: VirtualGpu, tmp_path: Path, old_form: bool) -> None:
    file = tmp_path / "model.pt"
    real = torch.tensor([1.5] * 100)
    state = {"weight": torch.randn(1 << 30, device="cuda"), "real": real}
    torch.save(state, file, _use_new_zipfile_serialization=not old_form)
    assert file.stat().st_size < 4096  # of 4 GiB
    with zipfile.ZipFile(file) as archive:
        (text,) = [archive.read(name) for name in archive.namelist() if name.endswith("/memprof")]
    assert b"memprof wrote on a virtual GPU" in text
    assert [line for line in gpu.trace.assumptions if line.startswith("Checkpoints are written as empty shells")]
    assert torch.equal(torch.load(file)["real"], real)


def test_saving_takes_nothing_on_the_gpu_and_one_storage_at_a_time_on_the_host(gpu: VirtualGpu) -> None:
    state = {name: torch.randn(LARGE, device="cuda") for name in "abc"}
    events = len(gpu.trace.events)
    torch.save(state, io.BytesIO())
    moved = [e for e in gpu.trace.events[events:] if e.kind is not EventKind.PHASE]
    made = [(e.kind, gpu.trace.storages[e.ref]) for e in moved]
    assert [(kind, s.device, s.num_bytes) for kind, s in made] == [
        (EventKind.ALLOC, HOST, 4 * LARGE),
        (EventKind.FREE, HOST, 4 * LARGE),
    ] * 3


def test_outside_a_shell_is_an_error_that_says_why(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    with VirtualGpu(GPU_MODEL):
        torch.save({"weight": torch.randn(LARGE, device="cuda"), "host": torch.zeros(LARGE)}, file)
    for options in (
        {},
        {"map_location": "cpu"},
        {"map_location": "cpu", "mmap": True},
        {"map_location": "cpu", "weights_only": False},
        {"map_location": lambda storage, location: storage},
    ):
        with pytest.raises(Exception, match="memprof wrote on a virtual GPU: this file holds no weights"):
            torch.load(file, **options)  # type: ignore[arg-type]
    with VirtualGpu(GPU_MODEL):  # another run
        loaded = torch.load(file, mmap=True)
        assert loaded["weight"].device == CUDA and loaded["host"].device == CPU
        assert torch.cuda.memory_allocated() == 4 * LARGE


def test_without_virtual_tensors_a_file_is_an_ordinary_one(tmp_path: Path) -> None:
    file = tmp_path / "plain.pt"
    state = {"weight": torch.arange(6.0).view(2, 3), "names": ["a"], "layer": nn.Linear(2, 2).state_dict()}
    with VirtualGpu(GPU_MODEL) as gpu:
        torch.save(state, file)
        torch.save(torch.arange(3, device="cuda"), tmp_path / "known.pt")
    loaded = torch.load(file)
    assert torch.equal(loaded["weight"], state["weight"]) and loaded["names"] == ["a"]  # type: ignore[arg-type]
    assert not any("shells" in line for line in gpu.trace.assumptions)
    assert torch.load(tmp_path / "known.pt", map_location="cpu").tolist() == [0, 1, 2]


# -- files of real runs -----------------------------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path) -> Path:
    weight = torch.full((2 * LARGE,), 0.5)
    state = {"weight": weight, "view": weight[5:7], "tokens": torch.arange(LARGE), "few": torch.tensor([1, 2])}
    torch.save(state, tmp_path / "real.pt")
    return tmp_path / "real.pt"


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(
    ("map_location", "device"),
    [
        (None, CPU),
        ("cpu", CPU),
        ("cuda", CUDA),
        (CUDA, CUDA),
        ({"cpu": "cuda:0"}, CUDA),
        ({"cuda:0": "cpu"}, CPU),
        (lambda storage, location: storage.cuda(0), CUDA),
        (lambda storage, location: storage, CPU),
        (lambda storage, location: None, CPU),
    ],
)
def test_a_real_file(
    real: Path, gpu: VirtualGpu, map_location: Any, device: torch.device, weights_only: bool, mmap: bool
) -> None:
    loaded = torch.load(real, map_location=map_location, weights_only=weights_only, mmap=mmap)
    assert {tensor.device for tensor in loaded.values()} == {device}
    assert torch._C._len_torch_function_stack() and loaded["view"].data_ptr() == loaded["weight"].data_ptr() + 20
    assert loaded["tokens"][-1].item() == LARGE - 1 and loaded["few"].tolist() == [1, 2]
    assert torch.cuda.memory_allocated() == (device == CUDA) * (8 * LARGE + 8 * LARGE + 16)
    assert any(line.startswith("Large tensors of checkpoints are not read") for line in gpu.trace.assumptions)
    with torch._C.DisableTorchFunction():
        assert loaded["weight"].is_meta


def test_storages_go_to_the_gpu_one_by_one(real: Path, gpu: VirtualGpu) -> None:
    events = len(gpu.trace.events)
    loaded = torch.load(real, map_location="cuda")
    assert len(loaded) == 4
    trace = gpu.trace
    made = [(e.kind, trace.storages[e.ref].device, trace.storages[e.ref].num_bytes) for e in trace.events[events:]]
    large = [(kind, device) for kind, device, num_bytes in made if num_bytes >= 4096]
    assert large == [(EventKind.ALLOC, HOST), (EventKind.ALLOC, GPU), (EventKind.FREE, HOST)] * 2
    assert {trace.ops[s.op] for s in trace.storages} == {"torch.load"}
    assert all("test_checkpoints.py" in trace.sources[s.source] for s in trace.storages)


def test_another_gpu_is_refused_as_torch_refuses_it(real: Path, gpu: VirtualGpu) -> None:
    with pytest.raises(RuntimeError, match=r"device_count\(\) is 1"):
        torch.load(real, map_location="cuda:1")


def test_the_meta_device(real: Path, gpu: VirtualGpu) -> None:
    assert {t.device.type for t in torch.load(real, map_location="meta").values()} == {"meta"}
    assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize("map_location", ["cuda", {"cpu": "cuda"}, lambda storage, location: storage.cuda()])
def test_files_of_before_torch_1_6(tmp_path: Path, map_location: Any) -> None:
    file = tmp_path / "old.pt"
    weight = torch.ones(64, 64)
    torch.save({"weight": weight, "more": [weight[2], 3]}, file, _use_new_zipfile_serialization=False)
    with VirtualGpu(GPU_MODEL):
        loaded = torch.load(file, map_location=map_location)
        assert loaded["weight"].device == loaded["more"][0].device == CUDA and loaded["more"][1] == 3
        assert torch.load(file)["weight"].sum() == 4096
    assert torch.load(file)["weight"].sum() == 4096


def test_a_damaged_file_is_an_error(real: Path, gpu: VirtualGpu, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pt"
    with zipfile.ZipFile(real) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():
            if not name.endswith("data/0"):
                target.writestr(name, source.read(name))
    with pytest.raises(Exception, match=r"has no record 'data/0'"):
        torch.load(damaged)


def test_a_thread_that_writes_checkpoints(gpu: VirtualGpu) -> None:
    file = io.BytesIO()
    state = {"weight": torch.randn(LARGE, device="cuda")}
    thread = threading.Thread(target=torch.save, args=(state, file))
    thread.start()
    thread.join()
    file.seek(0)
    assert torch.load(file)["weight"].device == CUDA
