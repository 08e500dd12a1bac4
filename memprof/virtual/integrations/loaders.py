"""`DataLoader(num_workers=...)` without worker processes: this process loads each batch when it is requested.

A tensor of the virtual GPU has no data to send between processes, and no recorder sees the allocations of another
process. So the workers are simulated: each has its own copy of the dataset object, its own random state and its own
`get_worker_info()`, and the workers take turns as in torch's own iterator. Samples and batches come in the same number
and order as with real workers; batches are not loaded ahead of time.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from memprof.patching import Extension, Patch, PatchSet
from memprof.torch_private import loaders
from memprof.trace.events import NONE, BatchLoader, is_own_source
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import HostOnlyMode
from memprof.watch.recorder import Recorder

# Containers of a dataset up to this length may be state and are copied for each worker. Longer ones are data.
_MAX_COPIED_ELEMENTS = 1 << 16
_IN_PROCESS_ASSUMPTION = (
    "Batches of DataLoader workers are made in the training process, one at a time when they are requested: those that "
    "workers keep ready (prefetch_factor for each) are not counted in host memory."
)


class Loaders(Extension):
    """Patches by which data loaders start no processes and no threads."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of torch's iterator over the batches of worker processes, and of loaders, to record them."""

        class InProcessIterator(_InProcessIterator):
            host_only = HostOnlyMode(context.is_on_gpu)

            def __init__(self, loader: Any) -> None:
                context.assume(_IN_PROCESS_ASSUMPTION)
                super().__init__(loader)

        yield loaders.MultiProcessingDataLoaderIter.patch(InProcessIterator)
        yield from _record_loaders(context.recorder)

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Context manager: `default_collate` stacks tensors as it does outside workers.

        In a worker, torch's own function would stack batches into shared memory, which the modes do not see.
        """
        functions = loaders.default_collate_fn_map.get()
        original = functions[torch.Tensor]

        def stack(batch: Any, **kwargs: Any) -> Any:
            with _use_worker_info(None):
                return original(batch, **kwargs)

        functions[torch.Tensor] = stack
        try:
            yield
        finally:
            functions[torch.Tensor] = original


def _record_loaders(recorder: Recorder) -> Iterator[Patch]:
    """Yield the patches that record each loader that is iterated over, with the line that made it: also where it goes
    on after another one, as that of a training after an evaluation amid an epoch."""
    base = loaders.BaseDataLoaderIter.get()
    init, iterate, proceed = DataLoader.__init__, DataLoader.__iter__, base.__next__
    lines: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    iterated: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # iterator -> its loader

    def record(loader: Any) -> None:
        trace, source = recorder.trace, lines.get(loader, NONE)
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)  # as accelerate's have
        if isinstance(size, int) and source != NONE:
            entry = BatchLoader(size, source, len(trace.events))
            if not trace.loaders or trace.loaders[-1][:2] != entry[:2]:
                trace.loaders.append(entry)

    @functools.wraps(init)
    def init_and_record(loader: Any, *args: Any, **kwargs: Any) -> None:
        init(loader, *args, **kwargs)
        line = recorder.attribution.find_caller_line()
        if line != NONE and not is_own_source(recorder.trace.sources[line]):  # a library wraps the program's loader
            line = next((lines[other] for other in lines if other.dataset is loader.dataset), line)
        lines[loader] = line

    @functools.wraps(iterate)
    def record_and_iterate(loader: Any) -> Any:
        record(loader)
        iterator = iterate(loader)
        iterated[iterator] = loader
        return iterator

    @functools.wraps(proceed)
    def record_and_proceed(iterator: Any) -> Any:
        batch = proceed(iterator)
        if iterator in iterated:
            record(iterated[iterator])
        return batch

    yield DataLoader, "__init__", init_and_record
    yield DataLoader, "__iter__", record_and_iterate
    yield base, "__next__", record_and_proceed


class _InProcessIterator(loaders.BaseDataLoaderIter.get()):  # type: ignore[misc]
    """An iterator over the batches of torch's `_MultiProcessingDataLoaderIter`, in its order, without processes."""

    host_only: HostOnlyMode

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._prefetch_factor = loader.prefetch_factor
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            # Data pipes are sharded by the worker's id before the program's own function is called.
            init_fn = functools.partial(loaders.sharding_worker_init_fn, init_fn, self._world_size, self._rank)
        self._workers = [_Worker(self, worker_id, init_fn) for worker_id in range(self._num_workers)]
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)  # type: ignore[no-untyped-call]
        for worker in self._workers:
            worker.is_active = True
            worker.fetcher = None
        self._worker_cycle = itertools.cycle(self._workers)
        self._tasks: collections.deque[tuple[_Worker, Any]] = collections.deque()
        # Workers prefetch: this many indices are drawn from the sampler before the first batch.
        for _ in range(self._prefetch_factor * self._num_workers):
            self._assign()

    def _assign(self) -> None:
        """Assign the sampler's next index to the next worker whose dataset has not ended."""
        try:
            index = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            return
        for worker in itertools.islice(self._worker_cycle, self._num_workers):
            if worker.is_active:
                self._tasks.append((worker, index))
                return

    def _next_data(self) -> Any:
        while self._tasks:
            worker, index = self._tasks.popleft()
            if not worker.is_active:  # the index was assigned before the worker's dataset ended
                continue
            try:
                data = worker.fetch(index)
            except StopIteration:
                if self._dataset_kind != loaders.DatasetKind.get().Iterable:
                    raise
                worker.is_active = False
                self._assign()
                continue
            except BaseException:
                self._assign()
                raise
            self._assign()
            return loaders.pin_memory(data, self._pin_memory_device) if self._pin_memory else data
        raise StopIteration


class _Worker:
    """One simulated worker process."""

    def __init__(self, loader: Any, worker_id: int, init_fn: Callable[[int], None] | None) -> None:
        self.is_active = True
        self.fetcher: Any = None
        self._worker_id = worker_id
        self._init_fn = init_fn
        self._host_only = loader.host_only
        self._dataset = copy_for_worker(loader._dataset)
        self._fetcher_arguments = (loader._dataset_kind, loader._auto_collation, loader._collate_fn, loader._drop_last)
        self._seeds = loader._base_seed, worker_id
        self._random_state: Any = None
        self._worker_info = loaders.WorkerInfo(
            id=worker_id, num_workers=loader._num_workers, seed=loader._base_seed + worker_id, dataset=self._dataset
        )

    def fetch(self, index: Any) -> Any:
        """Return the batch of the indices `index`, or the sample of a single index.

        Raises:
            StopIteration: this worker's part of an iterable dataset has ended.
            MemprofError: the dataset uses CUDA.
        """
        with _use_worker_info(self._worker_info), self._use_random_state(), self._host_only:
            if self._init_fn is not None:
                init_fn, self._init_fn = self._init_fn, None
                init_fn(self._worker_id)
            if self.fetcher is None:
                dataset_kind, auto_collation, collate, drop_last = self._fetcher_arguments
                self.fetcher = loaders.DatasetKind.get().create_fetcher(
                    dataset_kind, self._dataset, auto_collation, collate, drop_last
                )
            return self.fetcher.fetch(index)

    @contextlib.contextmanager
    def _use_random_state(self) -> Iterator[None]:
        """Context manager: use this worker's random state, as if it had a process of its own."""
        outer_state = _get_random_state()
        if self._random_state is None:
            _seed_generators(*self._seeds)
        else:
            _set_random_state(*self._random_state)
        try:
            yield
        finally:
            self._random_state = _get_random_state()
            _set_random_state(*outer_state)


def copy_for_worker(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """Return a copy of a dataset for one worker: other workers do not see attributes that this worker sets.

    Shared are tensors, arrays and containers longer than _MAX_COPIED_ELEMENTS. `copies` has the copies by `id`.
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if type(value) in (list, dict, set, collections.deque) and len(value) <= _MAX_COPIED_ELEMENTS:
        copy: Any = value.copy()
        copies[id(value)] = copy
        if isinstance(value, dict):
            copy.update((key, copy_for_worker(part, copies)) for key, part in value.items())
        elif isinstance(value, list):
            copy[:] = [copy_for_worker(part, copies) for part in value]
        return copy
    if not isinstance(value, torch.utils.data.Dataset) or not hasattr(value, "__dict__"):
        return value
    try:
        # As in a forked process: without the class's own pickling methods.
        copy = object.__new__(type(value))
    except TypeError:  # a class that is partly in C
        return value
    copies[id(value)] = copy
    vars(copy).update((name, copy_for_worker(part, copies)) for name, part in vars(value).items())
    return copy


@contextlib.contextmanager
def _use_worker_info(info: Any) -> Iterator[None]:
    with PatchSet() as patches:
        patches.set(*loaders.worker_info.patch(info))
        yield


def _seed_generators(base_seed: int, worker_id: int) -> None:
    """Seed the random generators as `_worker_loop` does (torch/utils/data/_utils/worker.py)."""
    random.seed(base_seed + worker_id)
    torch.default_generator.manual_seed(base_seed + worker_id)
    if "numpy" in sys.modules and loaders.generate_state.exists():
        sys.modules["numpy"].random.seed(loaders.generate_state(base_seed, worker_id))


def _get_random_state() -> tuple[Any, torch.Tensor, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.default_generator.get_state(), None if numpy is None else numpy.random.get_state()


def _set_random_state(python_state: Any, torch_state: torch.Tensor, numpy_state: Any) -> None:
    random.setstate(python_state)
    torch.default_generator.set_state(torch_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)
