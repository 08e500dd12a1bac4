"""Fix streamed-batches: each batch is created when it is requested, instead of all before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, StackDataset

from memprof.errors import UsageError
from memprof.fixes.applied import Changes, check_at_least
from memprof.fixes.catalog.fix import Fix, Numerics
from memprof.torch_private.pytree import tree_map


@Fix(
    name="streamed-batches", order=210, numerics=Numerics.EXACT, saves=("host memory",),
    changes="make batches one at a time instead of all of them before training",
    cost="each batch is put together while the GPU waits, unless workers do it",
    options={
        "dataset": "the samples: a Dataset, a list, a tensor, or a dictionary of tensors by sample",
        "batch_size": "samples of a batch; 1 if not given",
    },
    required=("dataset",), training_only=True, edits={"dataset_batches": None}, detect=lambda spec: False,
    useless_if={"dataset_batches": (None, "batches are made one at a time already")},
    helps={"doctor: host memory": 10},
)  # fmt: skip
def install(model: nn.Module, changes: Changes, *, dataset: Any, batch_size: int = 1) -> None:
    """Create a `StreamedBatches` as the fix's result. Raises UsageError if `dataset` is no collection of samples, or
    `batch_size` is below 1."""
    batches = StreamedBatches(dataset, batch_size, model)
    changes.result(batches)
    changes.note(f"{len(batches):,} batches of {batch_size} are made one at a time, from {batches.samples:,} samples")


class StreamedBatches:
    """Iterable of batches in order, each created when requested, on the device of the parameters of `model`.

    The last batch may have fewer than `batch_size` samples, and the iterable can be used again. Each row of a tensor or
    of a dictionary of tensors is a sample. For shuffling and workers, pass the samples to a
    `torch.utils.data.DataLoader` instead. Raises UsageError if `dataset` is no collection of samples, or is empty, or
    `batch_size` is below 1.
    """

    def __init__(self, dataset: Any, batch_size: int, model: nn.Module) -> None:
        check_at_least(1, "batch_size", batch_size)
        samples: Any = _make_rows(dataset) if isinstance(dataset, Mapping) else dataset
        if isinstance(samples, str) or not (
            hasattr(samples, "__getitem__") and hasattr(samples, "__len__") and not isinstance(samples, nn.Module)
        ):
            problem = "dataset must be samples: a Dataset, a list, a tensor, or a dictionary of tensors"
            raise UsageError(problem, value=type(dataset).__name__, hint="an iterable without length streams already")
        if not len(samples):
            raise UsageError("dataset has no samples", value=type(dataset).__name__)
        self.samples = len(samples)
        self._model = model
        self._loader: DataLoader[Any] = DataLoader(samples, batch_size=batch_size)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield tree_map(self._move_to_device, batch)

    def _move_to_device(self, value: Any) -> Any:
        parameter = next(self._model.parameters(), None)
        return value.to(parameter.device) if isinstance(value, torch.Tensor) and parameter is not None else value


def _make_rows(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return a dataset whose samples are the rows of `columns`; raise UsageError if these differ in length."""
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise UsageError("dataset has columns of different lengths", value=", ".join(map(str, sorted(lengths))))
    return StackDataset(**columns) if columns else []  # type: ignore[arg-type]  # it takes whatever has indices
