"""`DataLoader(num_workers=...)`: the batches of its worker processes, made in this process at their request.

A tensor of the virtual GPU has no data to send between processes, and no recorder sees the allocations of another
process. So the workers are simulated: each has its own copy of the dataset object, its own random state and its own
`get_worker_info()`, and the workers take turns as in torch's own iterator. Samples and batches come in the same number
and order as with real workers; a batch is made at its request and not ahead of time.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe

from memprof.patching import Extension, Patch, PatchSet
from memprof.torch_private import loaders
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import HostOnlyMode

# Containers of a dataset up to this length may be state and are copied for each worker. Longer ones are data.
_COPIED_ELEMENTS = 1 << 16
_IN_PROCESS = (
    "Batches of DataLoader workers are made in the training process, one at a time when they are requested: those that "
    "workers keep ready (prefetch_factor for each) are not counted in host memory."
)


class Loaders(Extension):
    """Data loaders, which start no processes and threads."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield the patch of the iterator over batches of workers."""

        class InProcessIterator(_InProcessIterator):
            host_only = HostOnlyMode(context.is_on_gpu)

            def __init__(self, loader: Any) -> None:
                context.assume(_IN_PROCESS)
                super().__init__(loader)

        yield loaders.MultiProcessingDataLoaderIter.patch(InProcessIterator)

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Context manager: collate batches in this process.

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


class _InProcessIterator(loaders.BaseDataLoaderIter.get()):  # type: ignore[misc]
    """An iterator over the batches of `_MultiProcessingDataLoaderIter`, in the same order."""

    host_only: HostOnlyMode

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._prefetch_factor = loader.prefetch_factor
        init = loader.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            # Data pipes are sharded by the worker's number before the program's own function is called.
            init = functools.partial(loaders.sharding_worker_init_fn, init, self._world_size, self._rank)
        self._workers = [_Worker(self, number, init) for number in range(self._num_workers)]
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)  # type: ignore[no-untyped-call]
        for worker in self._workers:
            worker.active = True
            worker.fetcher = None
        self._turns = itertools.cycle(self._workers)
        self._tasks: collections.deque[tuple[_Worker, Any]] = collections.deque()
        # Workers prefetch: this many indices are drawn from the sampler before the first batch.
        for _ in range(self._prefetch_factor * self._num_workers):
            self._assign()

    def _assign(self) -> None:
        """Assign the next index to the next worker whose dataset has not ended."""
        try:
            index = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            return
        for worker in itertools.islice(self._turns, self._num_workers):
            if worker.active:
                self._tasks.append((worker, index))
                return

    def _next_data(self) -> Any:
        while self._tasks:
            worker, index = self._tasks.popleft()
            if not worker.active:  # the index was assigned before the worker's dataset ended
                continue
            try:
                data = worker.fetch(index)
            except StopIteration:
                if self._dataset_kind != loaders.DatasetKind.get().Iterable:
                    raise
                worker.active = False
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

    def __init__(self, loader: Any, number: int, init: Callable[[int], None] | None) -> None:
        self.active = True
        self.fetcher: Any = None
        self._number = number
        self._init = init
        self._host_only = loader.host_only
        self._dataset = copy_for_worker(loader._dataset)
        self._fetcher_arguments = (loader._dataset_kind, loader._auto_collation, loader._collate_fn, loader._drop_last)
        self._seeds = loader._base_seed, number
        self._random: Any = None
        self._info = loaders.WorkerInfo(
            id=number, num_workers=loader._num_workers, seed=loader._base_seed + number, dataset=self._dataset
        )

    def fetch(self, index: Any) -> Any:
        """Return the batch (or the sample) of `index`.

        Raises:
            StopIteration: this worker's part of an iterable dataset has ended.
            MemprofError: the dataset uses CUDA.
        """
        with _use_worker_info(self._info), self._random_state(), self._host_only:
            if self._init is not None:
                init, self._init = self._init, None
                init(self._number)
            if self.fetcher is None:
                kind, collated, collate, drop_last = self._fetcher_arguments
                self.fetcher = loaders.DatasetKind.get().create_fetcher(
                    kind, self._dataset, collated, collate, drop_last
                )
            return self.fetcher.fetch(index)

    @contextlib.contextmanager
    def _random_state(self) -> Iterator[None]:
        """Context manager: use this worker's random state, which a real worker has in its process."""
        outside = _random_state()
        if self._random is None:
            _seed(*self._seeds)
        else:
            _set_random_state(*self._random)
        try:
            yield
        finally:
            self._random = _random_state()
            _set_random_state(*outside)


def copy_for_worker(value: Any, done: dict[int, Any] | None = None) -> Any:
    """Return a copy of a dataset for one worker: other workers do not see attributes that this worker sets.

    Data is shared: tensors, arrays, and containers longer than _COPIED_ELEMENTS. `done` has the copies by `id`.
    """
    done = {} if done is None else done
    if id(value) in done:
        return done[id(value)]
    if type(value) in (list, dict, set, collections.deque) and len(value) <= _COPIED_ELEMENTS:
        copied: Any = value.copy()
        done[id(value)] = copied
        if isinstance(value, dict):
            copied.update((key, copy_for_worker(part, done)) for key, part in value.items())
        elif isinstance(value, list):
            copied[:] = [copy_for_worker(part, done) for part in value]
        return copied
    if not isinstance(value, torch.utils.data.Dataset) or not hasattr(value, "__dict__"):
        return value
    try:
        # As in a forked process: without the class's own pickling methods.
        copied = object.__new__(type(value))
    except TypeError:  # a class that is partly in C
        return value
    done[id(value)] = copied
    vars(copied).update((name, copy_for_worker(part, done)) for name, part in vars(value).items())
    return copied


@contextlib.contextmanager
def _use_worker_info(info: Any) -> Iterator[None]:
    with PatchSet() as patches:
        patches.set(*loaders.worker_info.patch(info))
        yield


def _seed(base_seed: int, number: int) -> None:
    """Seed the random generators as `_worker_loop` does (torch/utils/data/_utils/worker.py)."""
    random.seed(base_seed + number)
    torch.default_generator.manual_seed(base_seed + number)
    if "numpy" in sys.modules and loaders.generate_state.exists():
        sys.modules["numpy"].random.seed(loaders.generate_state(base_seed, number))


def _random_state() -> tuple[Any, torch.Tensor, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.default_generator.get_state(), None if numpy is None else numpy.random.get_state()


def _set_random_state(python: Any, generator: torch.Tensor, numpy: Any) -> None:
    random.setstate(python)
    torch.default_generator.set_state(generator)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)
