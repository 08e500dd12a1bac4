"""`DataLoader(num_workers=...)` on the virtual GPU: the samples, order and random numbers of real workers."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.virtual import VirtualGpu
from memprof.virtual.integrations.loaders import copy_for_worker
from tests.lanes import by_day

GPU = find_gpu("a100-80gb")
CPU = torch.device("cpu")


class Squares(Dataset[Any]):
    def __init__(self, length: int = 11) -> None:
        self.length = length
        self.offset = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        return {
            "square": torch.tensor(index * index + self.offset),
            "worker": -1 if info is None else info.id,
            "random": torch.rand(2),
            "python": random.random(),
            "numpy": np.random.rand(1),
        }


class Shared(IterableDataset[Any]):
    """The example of torch's documentation: each worker its own part, of different lengths."""

    def __init__(self, end: int) -> None:
        self.start, self.end = 0, end

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.start, self.end))
        return iter(range(self.start + info.id, self.end, info.num_workers + info.id))


class Stateful(IterableDataset[Any]):
    """Its own iterator; `configure` gives each worker a part, as in torch's documentation."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Stateful:
        self.at = self.start
        return self

    def __next__(self) -> int:
        if self.at >= self.end:
            raise StopIteration
        self.at += 1
        return self.at - 1


def configure(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == worker
    dataset: Any = info.dataset
    each = -(-(dataset.end - dataset.start) // info.num_workers)
    start = dataset.start
    dataset.start = start + worker * each
    dataset.end = min(dataset.start + each, dataset.end)


def shift(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.offset = 1000 * worker  # type: ignore[attr-defined]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def epochs(make: Any, count: int) -> list[Any]:
    torch.manual_seed(3)
    loader = make()
    return [[plain(batch) for batch in loader] for _ in range(count)]


LOADERS = {
    "map": lambda **more: DataLoader(Squares(), batch_size=2, num_workers=3, **more),
    "shuffled": lambda **more: DataLoader(Squares(), batch_size=4, shuffle=True, drop_last=True, num_workers=2, **more),
    "init": lambda **more: DataLoader(Squares(), batch_size=2, num_workers=2, worker_init_fn=shift, **more),
    "samples": lambda **more: DataLoader(Squares(), batch_size=None, num_workers=2, prefetch_factor=5, **more),
    "iterable": lambda **more: DataLoader(Shared(23), batch_size=2, num_workers=3, **more),
    "configured": lambda **more: DataLoader(
        Stateful(3, 21), batch_size=4, num_workers=2, worker_init_fn=configure, **more
    ),
}


@pytest.mark.parametrize("persistent", by_day([False, True], True))
@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_real_workers(name: str, persistent: bool) -> None:
    def make() -> Any:
        return LOADERS[name](persistent_workers=persistent)

    count = 2 if persistent else 1
    expected = epochs(make, count)
    with VirtualGpu(GPU):
        assert epochs(make, count) == expected
    assert get_worker_info() is None


def test_loaders_are_recorded_with_their_lines() -> None:
    """Those that are iterated over, one once for several epochs."""
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        samples = TensorDataset(torch.zeros(8))
        train, test = DataLoader(samples, batch_size=4), DataLoader(samples, batch_size=2)
        DataLoader(samples, batch_size=8)
        for loader in (train, train, test, DataLoader(samples, batch_size=None), train):
            list(loader)
    assert [loader.batch_size for loader in gpu.trace.loaders] == [4, 2, 4]
    first = test_loaders_are_recorded_with_their_lines.__code__.co_firstlineno
    assert {gpu.trace.sources[one.source] for one in gpu.trace.loaders} == {
        f"{__file__}:{first + 4} test_loaders_are_recorded_with_their_lines"
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_after_an_evaluation_amid_its_epoch(workers: int) -> None:
    """Each is there from when it yields: by the tensors that were made before."""
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        samples, kept = TensorDataset(torch.zeros(8)), []
        begin = len(gpu.trace.events)
        train, test = (DataLoader(samples, batch_size=size, num_workers=workers) for size in (4, 2))
        for _ in train:
            kept.append(torch.zeros(1, device="cuda"))
            list(test)
            kept.append(torch.zeros(1, device="cuda"))
    found = [(one.batch_size, one.event - begin) for one in gpu.trace.loaders]
    assert found == [(4, 0), (2, 1), (4, 2), (2, 3)]


def test_a_loader_that_a_library_makes_of_another_has_its_line() -> None:
    """As accelerate does, whose loaders are those of the program wrapped."""
    text = "def wrap(loader):\n    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)\n"
    text += "def make(samples):\n    return DataLoader(samples, batch_size=3)\n"
    library: dict[str, Any] = {"DataLoader": DataLoader}
    exec(compile(text, "/site-packages/accelerate/data_loader.py", "exec"), library)
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        own = DataLoader(TensorDataset(torch.zeros(8)), batch_size=4)
        list(library["wrap"](own))
        list(library["make"](TensorDataset(torch.zeros(8))))
    lines = [gpu.trace.sources[loader.source] for loader in gpu.trace.loaders]
    assert lines[0].startswith(f"{__file__}:") and lines[1] == "/site-packages/accelerate/data_loader.py:4 make"
    assert [loader.batch_size for loader in gpu.trace.loaders] == [4, 3]


def test_no_process_and_no_thread_is_started() -> None:
    seen = set()

    class Where(Squares):
        def __getitem__(self, index: int) -> dict[str, Any]:
            seen.add((os.getpid(), threading.get_ident()))
            return super().__getitem__(index)

    for context in ("fork", "spawn"):
        loader = DataLoader(Where(), num_workers=4, pin_memory=True, multiprocessing_context=context, timeout=5)
        with VirtualGpu(GPU) as gpu:
            assert all(batch["square"].is_pinned() for batch in loader)
    assert seen == {(os.getpid(), threading.get_ident())} and multiprocessing.active_children() == []
    assert [text for text in gpu.trace.assumptions if text.startswith("Batches of DataLoader workers")]


def test_a_dataset_of_virtual_tensors() -> None:
    with VirtualGpu(GPU) as gpu:
        images, labels = torch.randn(4096, 3, 64, 64), torch.arange(4096) % 10
        loader = DataLoader(TensorDataset(images, labels), batch_size=32, num_workers=2, pin_memory=True)
        image, label = next(iter(loader))
        assert (image.device, image.shape, label.tolist()[:3]) == (CPU, (32, 3, 64, 64), [0, 1, 2])
        assert image.to("cuda").is_cuda
    assert gpu.trace.mismatches == []


def test_random_numbers_of_the_program_are_its_own() -> None:
    with VirtualGpu(GPU):
        iterator = iter(DataLoader(Squares(), num_workers=2))
        before = torch.get_rng_state(), random.getstate()
        next(iterator)
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.parametrize("where", ["item", "collate", "init", "dataset"])
def test_a_worker_that_uses_cuda(where: str) -> None:
    class OnGpu(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.ones(2).cuda() if where == "item" else torch.ones(2)

    def collate(batch: Any) -> Any:
        return torch.stack(batch).to("cuda") if where == "collate" else torch.stack(batch)

    def init(worker: int) -> None:
        if where == "init":
            torch.zeros(1, device=torch.device("cuda"))

    with VirtualGpu(GPU) as gpu:
        dataset: Any = TensorDataset(torch.zeros(8, device="cuda")) if where == "dataset" else OnGpu()
        options: Any = {} if where == "dataset" else {"collate_fn": collate, "worker_init_fn": init}
        loader = DataLoader(dataset, num_workers=1, **options)
        with pytest.raises(MemprofError, match=r"not yet: .* uses CUDA in a worker process of a DataLoader") as raised:
            next(iter(loader))
        if where != "dataset":
            assert "test_loaders.py" in raised.value.problem
        assert torch.zeros(1, device="cuda").is_cuda, "the program goes on if it catches it"
    assert gpu.trace.failure is None


def test_an_error_in_a_worker_is_the_programs_own() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> Any:
            if index == 2:
                raise KeyError("lost")
            return index

    with VirtualGpu(GPU):
        iterator = iter(DataLoader(Broken(5), batch_size=None, num_workers=2))
        assert [next(iterator), next(iterator)] == [0, 1]
        with pytest.raises(KeyError, match="lost"):
            next(iterator)
        assert list(iterator) == [3, 4]


def test_a_worker_has_its_own_dataset_and_shares_its_data() -> None:
    inner, data = Squares(), torch.zeros(3)
    outer = torch.utils.data.ConcatDataset([inner, TensorDataset(data)])
    copied = copy_for_worker(outer)
    assert copied is not outer and copied.datasets[0] is not inner and copied.datasets[1].tensors[0] is data
    copied.datasets[0].offset = 5
    assert inner.offset == 0
    itself = Squares()
    itself.parent = itself  # type: ignore[attr-defined]
    again = copy_for_worker(itself)
    assert again.parent is again
