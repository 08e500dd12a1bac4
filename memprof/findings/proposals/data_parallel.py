"""Proposes the loss in the wrapped module where nn.DataParallel gathers the outputs of all GPUs on one."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.evidence import file_and_line, format_shape
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize


@proposes(25)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change if what is computed of gathered outputs, with as many rows as these, includes the largest tensor
    at the peak. Each GPU then has these tensors for its own part of the batch."""
    trace, births = context.ledger.trace, context.lifetimes.births
    largest = context.lifetimes.find_largest_at_peak()
    calls = (call for call in trace.forwards if trace.modules[call.module].class_name == "DataParallel")
    outputs = {index for call in calls for index in call.outputs if trace.storages[index].device == trace.device}
    rows = {trace.storages[index].shape[0] for index in outputs if trace.storages[index].shape}
    num_gpus = len({storage.device for storage in trace.storages} & trace.gpus.keys())
    gathered = {
        index
        for index, storage in enumerate(trace.storages)
        if storage.shape and storage.shape[0] in rows and births[index] >= min(births[output] for output in outputs)
        if storage.device == trace.device and index not in trace.owners
    }
    if num_gpus > 1 and largest in gathered:
        storage = trace.storages[largest]
        where = f"{format_shape(storage.shape)} at {file_and_line(trace.source_line(storage))}"
        change = "compute the loss in the module that DataParallel wraps, or use DistributedDataParallel: then "
        sizes = {index: -(-trace.storages[index].num_bytes // num_gpus) for index in gathered}
        yield Proposal(
            resize(trace, sizes), f"{change}{where} has one GPU's part of the batch", source=trace.source_line(storage)
        )
