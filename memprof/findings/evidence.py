"""Helpers for rules: text formatting, evidence of tensors, and a trace's parameters, input shapes and vocabulary."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from memprof.findings.finding import Context, Evidence, cache_per_context
from memprof.fixes.catalog import (
    FIXES,
    Fix,
    find_conflict,
    find_device_reason,
    find_fixes_for,
    find_useless_reason,
    list_active_fixes,
)
from memprof.ledger.categories import Category
from memprof.ledger.ledger import LiveTensor
from memprof.ledger.stages import drop_model_widths, find_vocabulary_size
from memprof.trace.events import (
    NONE,
    Forward,
    ModuleRole,
    PhaseKind,
    Role,
    Storage,
    Trace,
    short_source,
    without_numbers,
)
from memprof.units import format_bytes

HALF_DTYPES = ("bfloat16", "float16")

_INTEGERS = ("int64", "int32")
_TRAINING = {PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP}
_COMPUTING = (PhaseKind.FORWARD, PhaseKind.BACKWARD)
# Names that model code gives to the token embedding and to the head; positions are not part of the vocabulary.
_VOCABULARY = re.compile(
    r"embed|wte|(^|\.)(shared|lm_head|head|output|output_projection|unembed)\.weight$", re.IGNORECASE
)
_POSITIONS = re.compile(r"(^|[._])(pos|pe(\.|$))|wpe|token_type|patch", re.IGNORECASE)


# -- words ----------------------------------------------------------------------------------------------------------


def format_shape(shape: Sequence[int]) -> str:
    """Return `shape` as text: "[131072 x 151936]"."""
    return "[" + " x ".join(map(str, shape)) + "]"


def file_and_line(source: str | None) -> str:
    """Return the base name and line ("train.py:12") of `source` ("path/train.py:12 function"), for a sentence."""
    return "an unknown line" if source is None else short_source(source)


def percent(num_bytes: int, total_bytes: int) -> str:
    """Return `num_bytes` as a percentage of `total_bytes`: "25%"."""
    share = 100 * num_bytes / total_bytes
    return f"{share:.0f}%" if share >= 1 or not share else "less than 1%"


def plural(count: int, noun: str) -> str:
    """Return `count` and the regular singular or plural of `noun`: "1 tensor", "4 tensors"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def module_pattern(trace: Trace, storage: Storage) -> str | None:
    """Return the path of the module that allocated `storage`, with `*` for layer numbers; None outside modules."""
    path = trace.module_path(storage)
    return None if path is None else without_numbers(path)


# -- fixes -------------------------------------------------------------------------------------------------------


def suggest_fixes(context: Context, problem: str) -> tuple[str, ...]:
    """Return fixes whose entry names `problem`, the id of a finding, best first, that the run could still apply."""
    return tuple(fix.name for fix in find_fixes_for(problem) if is_applicable(context, fix))


def is_applicable(context: Context, fix: Fix) -> bool:
    """Return whether the run could still apply `fix`: it is not on, goes with those that are, and suits the run."""
    spec, trace = context.spec, context.ledger.trace
    on = {name.partition("=")[0] for name in context.fixes} & set(FIXES)
    on |= set() if spec is None else set(list_active_fixes(spec))
    on |= {other.name for other in FIXES.values() if other.compiles and trace.compiling is not None}
    on |= {other.name for other in FIXES.values() if other.is_checkpointing and trace.checkpoints}
    if fix.name in on or any(find_conflict(fix, other) for other in on):
        return False
    if (fix.training_only and is_inference(trace)) or (fix.for_float32 and has_half_tensors(trace)):
        return False
    if trace.updates_parameters_manually and "optimizer" in fix.options:  # no torch optimizer to replace
        return False
    if fix.for_models and (spec is None or spec.npt is None):
        return False
    if find_device_reason(fix, trace.facts.device) is not None:
        return False
    return spec is None or find_useless_reason(fix, spec) is None


def is_inference(trace: Trace) -> bool:
    """Return whether a run only infers; without a known forward, or where memory ran out before a model was called
    without gradients, it may be training: parameters, or an input of a frozen model."""
    kinds, calls = {phase.kind for phase in trace.phases}, trace.list_calls()
    may_train = trace.trains or (trace.may_train and any(call.nodes for call in calls))
    is_known = not trace.ended_out_of_memory or (bool(calls) and not may_train)
    return PhaseKind.FORWARD in kinds and not kinds & _TRAINING and is_known


def is_peak_in_evaluation(context: Context) -> bool:
    """Return whether the peak is in an evaluation: in its phase, or after `eval()` was called and before the next phase
    that trains."""
    trace, peak = context.ledger.trace, context.ledger.peak_event
    begun = [(time, phase.kind) for time, phase in context.phases if time <= peak]
    if not begun or begun[-1][1] is PhaseKind.EVALUATION:
        return bool(begun)
    evaluated = max((call.event for call in trace.eval_calls if call.event <= peak), default=NONE)
    return evaluated > max((time for time, kind in begun if kind in {*_TRAINING, PhaseKind.FORWARD}), default=peak)


def find_call_between_steps(context: Context) -> Forward | None:
    """Return the call without gradients that the peak is in, if its model is trained, by calls with gradients, and none
    of these has begun since the last step of an optimizer: rendering, sampling, a rollout in training mode."""
    trace, peak = context.ledger.trace, context.ledger.peak_event
    calls, call = trace.list_calls(), find_call_at(trace, peak)
    stepped = [time for time, phase in context.phases if phase.kind is PhaseKind.OPTIMIZER_STEP and time <= peak]
    if call is None or call.nodes or not stepped:
        return None
    trained = [one.begin for one in calls if one.module == call.module and one.nodes]
    return call if trained and max(trained) < stepped[-1] else None


def find_call_at(trace: Trace, event: int) -> Forward | None:
    """Return the outermost call of a module that the event with this index is in; None if it is in none."""
    return next((call for call in trace.list_calls() if call.begin <= event <= call.end), None)


def find_own_line(trace: Trace, index: int) -> str | None:
    """Return the line of the program's own code that led to the allocation of a storage, of a library's else."""
    return trace.find_own_line(index)


def is_input(trace: Trace, index: int) -> bool:
    """Return whether the storage `index` is an input of a model."""
    return index in trace.owners and trace.owners[index].role is Role.INPUT


def ends_in_building(trace: Trace) -> bool:
    """Return whether memory ran out while a model was built or moved, before any pass had begun: more of it comes."""
    if not trace.ended_out_of_memory or any(phase.kind.computes for phase in trace.phases):
        return False
    # A program without a model is in the phase MODEL too.
    return trace.phases[trace.storages[-1].phase].kind is PhaseKind.MODEL and bool(param_names(trace))


def has_half_tensors(trace: Trace) -> bool:
    """Return whether any tensor of the run is in half precision."""
    return any(storage.dtype in HALF_DTYPES for storage in trace.storages)


# -- evidence -------------------------------------------------------------------------------------------------------


def tensor_evidence(trace: Trace, index: int, text: str, *, num_bytes: int | None = None) -> Evidence:
    """Return evidence of the storage `index`; `num_bytes` replaces its size if `text` describes several storages.

    If `text` names the line that allocated it (`file_and_line`), the program's lines that led there are added:
    "at model.py:12, called by torch.func.vmap at train.py:31".
    """
    storage = trace.storages[index]
    line = re.escape(file_and_line(trace.source_line(storage)))
    return Evidence(
        text=re.sub(rf"{line}(?!\d)", lambda match: match[0] + _format_callers(trace, index), text, count=1),
        num_bytes=storage.num_bytes if num_bytes is None else num_bytes,
        shape=storage.shape,
        dtype=storage.dtype,
        module=module_pattern(trace, storage),
        op=trace.op(storage),
        source=trace.source_line(storage),
        device=storage.device,
    )


def caller_key(trace: Trace, index: int) -> tuple[object, ...]:
    """Return what is equal for storages with the same callers."""
    return tuple((caller.source, caller.by) for caller in trace.list_callers(index))


def _format_callers(trace: Trace, index: int) -> str:
    return "".join(
        f", called {f'by {caller.by} ' if caller.by else ''}at {file_and_line(trace.sources[caller.source])}"
        for caller in trace.list_callers(index)
    )


def live_evidence(tensor: LiveTensor, text: str, *, num_bytes: int) -> Evidence:
    """Return evidence of `tensor`, which stands for a group of equal live tensors in the ledger."""
    shape, dtype, module = tensor.shape, tensor.dtype, tensor.module
    return Evidence(text, num_bytes, shape, dtype, module, tensor.op, tensor.source)


def tensors_evidence(
    context: Context, storages: Iterable[int], event: int, get_label: Callable[[int], str]
) -> tuple[Evidence, ...]:
    """Return one evidence for each group of equal tensors among `storages`, the group with the most live bytes first.

    Tensors are equal if label, shape, dtype, operator, module (without layer numbers), source line and its callers are.
    `num_bytes` is the size of one tensor; the text counts the tensors live at event index `event` and at the peak.
    """
    trace, lifetimes = context.ledger.trace, context.lifetimes
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in storages:
        s = trace.storages[index]
        kind = (get_label(index), s.num_bytes, s.shape, s.dtype, s.op, s.source, module_pattern(trace, s))
        kinds[*kind, caller_key(trace, index)].append(index)
    lines = []
    for indices in kinds.values():
        example = indices[0]
        s = trace.storages[example]
        num_live = len(lifetimes.find_live(event, indices).storages)
        num_at_peak = sum(index in lifetimes.at_peak for index in indices)
        module = module_pattern(trace, s)
        in_module = f"in {module} " if module else ""
        counts_text = _format_live_counts(num_live, num_at_peak, event == context.ledger.peak_event)
        text = (
            f"{get_label(example)}: {format_shape(s.shape)} {s.dtype}, {format_bytes(s.num_bytes)} each, by "
            f"{trace.op(s)} {in_module}at {file_and_line(trace.source_line(s))}; {counts_text}"
        )
        lines.append((num_live * s.num_bytes, tensor_evidence(trace, example, text)))
    return tuple(line for _, line in sorted(lines, key=lambda pair: -pair[0]))


def _format_live_counts(num_live: int, at_peak: int, is_peak: bool) -> str:
    if is_peak:
        return f"{at_peak or 'none'} live at the peak"
    live_then = f"{num_live or 'none'} live then"
    return f"{live_then} and at the peak" if num_live == at_peak else f"{live_then}, {at_peak or 'none'} at the peak"


# -- facts of the trace ---------------------------------------------------------------------------------------------


def mask_compute_phases(trace: Trace) -> list[bool]:
    """Return one boolean per phase of the trace: whether the phase is a forward or a backward pass."""
    return [phase.kind in _COMPUTING for phase in trace.phases]


def is_forward(trace: Trace, storage: Storage) -> bool:
    """Return whether forward code allocated `storage`: in a forward pass, or in a recomputation during backward."""
    kind = trace.phases[storage.phase].kind
    if kind is PhaseKind.BACKWARD:
        return storage.forward_event == NONE and storage.module != NONE and storage.source != NONE
    return kind is PhaseKind.FORWARD


def names_of(trace: Trace, role: Role) -> dict[int, str]:
    """Return storage index -> name for the storages with `role`."""
    return {index: owner.name for index, owner in trace.owners.items() if owner.role is role}


def param_names(trace: Trace) -> dict[int, str]:
    """Return storage index -> name for the parameters."""
    return names_of(trace, Role.PARAMETER)


def find_half(context: Context) -> str | None:
    """Return "bfloat16" or "float16" if most bytes of the parameters have this dtype, else None.

    A trace does not record the dtypes of an operator's inputs, so rules take the parameters' dtype as compute dtype.
    """
    trace = context.ledger.trace
    bytes_by_dtype: dict[str, int] = defaultdict(int)
    names = param_names(trace)
    # If the model was cast on the GPU, parameters of the earlier dtype are in the trace too.
    for index in names.keys() & context.lifetimes.at_peak or names:
        bytes_by_dtype[trace.storages[index].dtype] += trace.storages[index].num_bytes
    if not bytes_by_dtype:
        return context.spec.dtype if context.spec is not None and context.spec.dtype in HALF_DTYPES else None
    main_dtype = max(bytes_by_dtype, key=lambda dtype: bytes_by_dtype[dtype])
    return main_dtype if main_dtype in HALF_DTYPES else None


def vocabulary_tables(trace: Trace) -> dict[int, str]:
    """Return storage index -> name for weights of token embeddings and heads: matrices with one row per word.

    They are recognized by name, or as the weight of an embedding or head module. Excluded are weights of numbered
    modules (`layers.0.attn.head.weight` is a projection), matrices with as many rows as the model's width (projections
    such as `time_embed`), and models without token inputs.
    """
    roles = (ModuleRole.EMBEDDING, ModuleRole.HEAD)
    if not (
        any(module.role in roles for module in trace.modules)
        or "aten.embedding" in trace.ops
        or any(storage.dtype in _INTEGERS and len(storage.shape) == 2 for storage in trace.storages)
    ):
        return {}
    weight_names = {f"{module.path}.weight" for module in trace.modules if module.role in roles}
    names = {
        index: name
        for index, name in param_names(trace).items()
        if len(trace.storages[index].shape) == 2
        and (name in weight_names or _VOCABULARY.search(name))
        and not _POSITIONS.search(name)
        and (rest := name.partition(".")[2]) == without_numbers(rest)
    }
    vocabulary_sizes = drop_model_widths(trace, {trace.storages[index].shape[0] for index in names})
    return {index: name for index, name in names.items() if trace.storages[index].shape[0] in vocabulary_sizes}


def vocab_size_of(context: Context) -> int | None:
    """Return the vocabulary size: configured, else rows of the largest embedding or head, else the loss's classes."""
    if context.vocab_size is not None:
        return context.vocab_size
    trace = context.ledger.trace
    return max((trace.storages[i].shape[0] for i in vocabulary_tables(trace)), default=find_vocabulary_size(trace))


@cache_per_context
def find_input_shapes(context: Context) -> set[tuple[int, ...]]:
    """Return the shapes (batch, ..., tokens) of the model's inputs, without the feature dimension.

    They come from the spec, integer inputs, and float inputs and embedding outputs [batch, tokens, features].
    """
    shapes: set[tuple[int, ...]] = set()
    if context.spec is not None and context.context_length is not None:
        shapes.add((context.spec.batch_size, context.context_length))
    trace = context.ledger.trace
    embedding_ops = {index for index, op in enumerate(trace.ops) if op == "aten.embedding"}
    for storage, category in zip(trace.storages, context.ledger.categories, strict=True):
        if category is Category.INPUTS and storage.dtype in _INTEGERS:
            shapes.add(storage.shape)
            continue
        # An input with more than 3 dimensions is a batch of images.
        has_features = category is Category.INPUTS and storage.dtype != "bool" and len(storage.shape) <= 3
        if has_features or storage.op in embedding_ops:
            shapes.add(storage.shape[:-1])
    return {shape for shape in shapes if shape}


def find_feature_map_sizes(trace: Trace) -> set[tuple[int, ...]]:
    """Return the (height, width) of all outputs of convolutions [batch, channels, height, width]."""
    ops = {index for index, op in enumerate(trace.ops) if "convolution" in op or "conv2d" in op}
    return {s.shape[-2:] for s in trace.storages if s.op in ops and len(s.shape) == 4}
