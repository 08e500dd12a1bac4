"""Proposes less memory for weights, their gradients and optimizer state: bfloat16, LoRA, layers in host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from memprof.findings.evidence import is_inference, names_of, vocabulary_tables
from memprof.findings.finding import Context
from memprof.findings.groups import strip_wrappers
from memprof.findings.logits import find_logits_storages
from memprof.findings.optimizer_state import find_temporaries
from memprof.findings.proposals.checkpointing import checkpoint_layers
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize
from memprof.trace.events import ModuleRole, Role, Trace

MIN_SHARE = 0.25  # of the peak: where weights, gradients and optimizer state take less, they are not what fills the GPU

_WEIGHTS = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)


@proposes(110, fix="bfloat16")
def propose_bfloat16(context: Context) -> Iterator[Proposal]:
    """Yield the change for a model in float32; its logits stay, since losses compute in float32. No change for a GPU
    that is slow in bfloat16: weights in float16 do not train."""
    trace = context.ledger.trace
    if _holds_peak(context) and trace.facts.device.has_bfloat16:
        logits = set(find_logits_storages(context))
        sizes = {
            index: storage.num_bytes // 2
            for index, storage in enumerate(trace.storages)
            if storage.dtype == "float32" and not storage.hidden and index not in logits
        }
        yield Proposal(resize(trace, sizes))


@proposes(115)
def propose_frozen(context: Context) -> Iterator[Proposal]:
    """Yield float16 for weights in float32 that nobody trains, as those under adapters, on a GPU that is slow in
    bfloat16. Their activations are taken to stay as large."""
    trace = context.ledger.trace
    if context.spec is not None or trace.facts.device.has_bfloat16:
        return
    trained = {trace.owners[index].name for index in names_of(trace, Role.GRADIENT)}
    trained |= {trace.owners[index].name for step in trace.first_steps for index in step.parameters}
    frozen = [
        index
        for index, name in names_of(trace, Role.PARAMETER).items()
        if name not in trained and trace.storages[index].dtype == "float32"
    ]
    frozen_bytes = context.lifetimes.sum_bytes(context.lifetimes.at_peak.intersection(frozen))
    if not (trained or is_inference(trace)) or frozen_bytes < MIN_SHARE * context.ledger.peak_bytes:
        return
    change = "load the weights that are not trained in float16 (dtype=torch.float16, or .half())"
    yield Proposal(resize(trace, {index: trace.storages[index].num_bytes // 2 for index in frozen}), change)


@proposes(120, fix="lora")
def propose_lora(context: Context) -> Iterator[Proposal]:
    """Yield the change for the training of a language model that memprof builds: nothing but adapters is trained."""
    trace = context.ledger.trace
    owned = [i for i, owner in trace.owners.items() if owner.role in (Role.GRADIENT, Role.OPTIMIZER_STATE)]
    if context.spec is not None and owned and vocabulary_tables(trace):
        yield Proposal(resize(trace, dict.fromkeys([*owned, *find_temporaries(context)], 0)))


@proposes(130, fix="cpu-offload-weights")
def propose_on_host(context: Context) -> Iterator[Proposal]:
    """Yield the change for a model with layers: one at a time has its weights, and runs, on the GPU."""
    trace = context.ledger.trace
    if not _holds_peak(context):
        return
    layers = _find_weights_of_layers(trace)
    if len(layers) > 1:
        largest = max(layers, key=lambda path: context.lifetimes.sum_bytes(layers[path]))
        away = [index for path, own in layers.items() if path != largest for index in own]
        shapes = {trace.storages[index].shape for index in away}
        state = [index for index in names_of(trace, Role.OPTIMIZER_STATE) if trace.storages[index].shape in shapes]
        temporaries = [index for index in find_temporaries(context) if trace.storages[index].shape in shapes]
        sizes = dict.fromkeys([*away, *state, *temporaries], 0)
        yield Proposal(resize(checkpoint_layers(context) or trace, sizes))


def _find_weights_of_layers(trace: Trace) -> dict[str, list[int]]:
    """Return path of a layer -> storages of its parameters and their gradients."""
    paths = {module.path for module in trace.modules if module.role is ModuleRole.LAYER}
    layers: dict[str, list[int]] = defaultdict(list)
    for role in (Role.PARAMETER, Role.GRADIENT):
        for index, name in names_of(trace, role).items():
            parts = strip_wrappers(name).split(".")
            path = next((path for end in range(len(parts)) if (path := ".".join(parts[:end])) in paths), None)
            if path is not None:
                layers[path].append(index)
    return layers


def _holds_peak(context: Context) -> bool:
    """Return whether weights, gradients and optimizer state are a large part of the peak."""
    owners, at_peak = context.ledger.trace.owners, context.lifetimes.at_peak
    held = [index for index in at_peak if index in owners and owners[index].role in _WEIGHTS]
    return context.lifetimes.sum_bytes(held) >= MIN_SHARE * context.ledger.peak_bytes
