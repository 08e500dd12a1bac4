"""Stages: the run divided along the model (embedding, layers, final norm, logits, loss, backward)."""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from memprof.trace.events import NONE, EventKind, Module, ModuleRole, Phase, PhaseKind, Role, Trace

_PHASE_STAGES = {
    PhaseKind.MODEL: "parameters",
    PhaseKind.OPTIMIZER: "optimizer",
    PhaseKind.INPUTS: "inputs",
    PhaseKind.DECODE: "decode",
    PhaseKind.BACKWARD: "backward",
    PhaseKind.OPTIMIZER_STEP: "optimizer step",
    PhaseKind.ZERO_GRAD: "zero_grad",
    PhaseKind.CHECKPOINT: "checkpoint",
    PhaseKind.OTHER: "other",
}
OWN_CODE = ("own code", "output", "other")  # stages of the program's own code, outside modules
EVALUATION_PREFIX = "evaluation "  # prefix of a stage's name in a forward without a backward
SETUP = "setup"
_WORDS_BY_NAME = {"parameters": SETUP, **dict.fromkeys(OWN_CODE, "code outside modules")}
_CHILD = re.compile(r"(\S+) ([A-Z]\w*)")  # path and class of a module


@dataclass(frozen=True, slots=True)
class Span:
    """One stage of one micro-batch: the events from `begin` up to `end`, exclusive."""

    name: str
    kind: PhaseKind
    step: int
    micro_batch: int
    begin: int
    end: int
    stack: str = ""  # for a layer: the path of its stack; equal layers of one stack are shown as one row
    index: int = NONE  # for a layer: its number in the stack

    @property
    def plain_name(self) -> str:
        """Return the stage's name without the prefix of an evaluation."""
        return self.name.removeprefix(EVALUATION_PREFIX)


def list_spans(trace: Trace) -> list[Span]:
    """Return the stages of a run, in order, without those that neither allocate nor free.

    The stages cover every allocation and free, without overlap.
    """
    result: list[Span] = []
    heads = _find_direct_heads(trace)
    evaluations = _find_evaluations_with_gradients(trace)
    phases = [
        (time, Phase(PhaseKind.EVALUATION, 0, 0) if time in evaluations else phase)
        for time, phase in trace.list_phase_begins()
    ]
    for (begin, phase), (end, next_phase) in zip(phases, [*phases[1:], (len(trace.events), None)], strict=True):
        if phase.kind in (PhaseKind.FORWARD, PhaseKind.EVALUATION):
            is_continued = next_phase == phase
            if is_continued and phase.kind is PhaseKind.EVALUATION:  # not the next batch for the same model
                is_continued = _find_first_call(trace, begin) != _find_first_call(trace, end)
            result += _ForwardSpans(trace, phase, begin, end, heads, is_continued=is_continued).spans
        else:
            name = _PHASE_STAGES[phase.kind]
            span = Span(name, phase.kind, phase.step, phase.micro_batch, begin, end)
            if result and (
                # Frees at a function's return belong to the stage before.
                (phase.kind is PhaseKind.OTHER and not _has_event(trace, begin, end, EventKind.ALLOC))
                # A model is built, then its optimizer, and then the model is moved to the GPU.
                or (phase.kind is PhaseKind.MODEL and result[-1].name == name and result[-1].step == phase.step)
            ):
                result[-1] = replace(result[-1], end=end)
            else:
                result.append(span)
    return [span for span in result if _has_event(trace, span.begin, span.end, EventKind.ALLOC, EventKind.FREE)]


def _find_evaluations_with_gradients(trace: Trace) -> set[int]:
    """Return the begins of forward phases that are evaluations: they call modules in eval mode that other lines have
    trained before, and no backward begins before the next call in training mode."""
    phases = trace.list_phase_begins()
    begins = [time for time, _ in phases]
    backwards = [time for time, phase in phases if phase.kind is PhaseKind.BACKWARD]
    trained: dict[int, list[int]] = {}  # module -> the begins of its calls in training mode
    lines: set[tuple[int, int]] = set()
    for call in trace.forwards:
        if call.training and call.nodes:
            trained.setdefault(call.module, []).append(call.begin)
            lines.add((call.module, call.source))
    found: set[int] = set()
    others: set[int] = set()
    for call in trace.list_calls():
        own = trained.get(call.module, [])
        position = bisect.bisect(own, call.begin)
        end = own[position] if position < len(own) else len(trace.events)
        has_backward = bisect.bisect(backwards, call.begin) < bisect.bisect(backwards, end)
        is_training = call.training or not position or has_backward or (call.module, call.source) in lines
        index = bisect.bisect(begins, call.begin) - 1
        if index >= 0 and phases[index][1].kind is PhaseKind.FORWARD:
            (others if is_training else found).add(begins[index])
    return found - others


def _find_first_call(trace: Trace, begin: int) -> int:
    events = (trace.events[time] for time in range(begin, len(trace.events)))
    return next((event.ref for event in events if event.kind is EventKind.ENTER), NONE)


def _has_event(trace: Trace, begin: int, end: int, *kinds: EventKind) -> bool:
    return any(trace.events[time].kind in kinds for time in range(begin, end))


def describe_name(name: str) -> str:
    """Return a stage's name in plain words: "5 Sequential" becomes "module 5 (Sequential)"."""
    prefix = EVALUATION_PREFIX if name.startswith(EVALUATION_PREFIX) else ""
    plain_name = name.removeprefix(prefix)
    if child := _CHILD.fullmatch(plain_name):
        path, class_name = child.groups()
        return f"{prefix}{'module ' * path.isdecimal()}{path} ({class_name})"
    return prefix + _WORDS_BY_NAME.get(plain_name, plain_name)


def format_stage(name: str, step: int, micro_batch: int = 0) -> str:
    """Return a stage as text, such as "loss of step 2, micro-batch 3"; step 0 and micro-batch 1 are left out."""
    suffix = f", micro-batch {micro_batch}" if micro_batch > 1 else ""
    return (f"{name} of step {step}" if step else name) + suffix


def find_vocabulary_size(trace: Trace) -> int | None:
    """Return the vocabulary size of a model without a head module: the rows of its largest embedding, else the number
    of classes of its last loss. None if the model has neither, or has a head module."""
    if any(module.role is ModuleRole.HEAD for module in trace.modules):
        return None
    rows = _find_embedding_rows(trace)
    storages = trace.storages if rows is None else []
    loss_widths = [s.shape[-1] for s in storages if trace.op(s) == "aten._log_softmax" and len(s.shape) == 2]
    possible_sizes = drop_model_widths(trace, loss_widths)
    return next((width for width in reversed(loss_widths) if width in possible_sizes), rows)


def _find_embedding_rows(trace: Trace) -> int | None:
    """Return the number of rows of the largest embedding, ignoring those that equal the model's width; None: none."""
    tables = {f"{module.path}.weight" for module in trace.modules if module.role is ModuleRole.EMBEDDING}
    rows = (trace.storages[index].shape[0] for index, owner in trace.owners.items() if owner.name in tables)
    return max(drop_model_widths(trace, rows), default=None)


def drop_model_widths(trace: Trace, sizes: Iterable[int]) -> set[int]:
    """Return the vocabulary `sizes` that are not a model's width: the number of input features of two or more weights.

    A model may have as many positions as features, and a projection to that width may be called an embedding. One
    weight may have the vocabulary as input features: a transposed head, or an adapter of an embedding.
    """
    weights = {
        owner.name: trace.storages[index].shape
        for index, owner in trace.owners.items()
        if owner.role is Role.PARAMETER and len(trace.storages[index].shape) > 1
    }
    input_features = Counter(shape[1] for shape in weights.values())
    return {size for size in sizes if input_features[size] < _MIN_WEIGHTS}


_MIN_WEIGHTS = 2  # weights with a model's width as input features
_MATMUL_OPS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm")


def _find_direct_heads(trace: Trace) -> dict[int, Module]:
    """Return the output heads that the program calls directly, as a loop over chunks does, by module index: root
    modules without children whose matrix product has one column per token of the vocabulary."""
    vocab_size = find_vocabulary_size(trace)
    if vocab_size is None:
        return {}
    producers = {
        storage.module
        for storage in trace.storages
        if len(storage.shape) > 1 and storage.shape[-1] == vocab_size and trace.op(storage) in _MATMUL_OPS
    }
    root_indices = [i for i, module in enumerate(trace.modules) if module.role is ModuleRole.ROOT and i in producers]
    return {
        index: trace.modules[index]._replace(role=ModuleRole.HEAD)
        for index in root_indices
        if len(_get_subtree(trace.modules, index)) == 1
    }


def _get_subtree(modules: list[Module], root: int) -> list[Module]:
    """Return the root module at index `root` and its descendants, which are contiguous in `modules`."""
    next_roots = (index for index in range(root + 1, len(modules)) if modules[index].role is ModuleRole.ROOT)
    return modules[root : next(next_roots, len(modules))]


def _reads_tokens(modules: list[Module]) -> bool:
    return any(module.role in (ModuleRole.EMBEDDING, ModuleRole.HEAD) for module in modules)


def _find_part_modules(modules: list[Module]) -> set[int]:
    """Return the indices of all layers, heads and children of models, and of their descendants."""
    part_indices: set[int] = set()
    part_path = ""
    for index, module in enumerate(modules):
        if module.role in (ModuleRole.LAYER, ModuleRole.HEAD, ModuleRole.CHILD):
            part_path = module.path
        elif not part_path or not module.path.startswith(f"{part_path}."):
            part_path = ""
            continue
        part_indices.add(index)
    return part_indices


class _ForwardSpans:
    """The stages of one forward phase, divided where layers and head are entered and left."""

    def __init__(
        self, trace: Trace, phase: Phase, begin: int, end: int, heads: dict[int, Module], *, is_continued: bool
    ) -> None:
        self._trace = trace
        self._phase = phase
        self._is_continued = is_continued
        self._stacks = sorted({module.stack for module in trace.modules if module.role is ModuleRole.LAYER})
        self._reads_tokens = _reads_tokens(trace.modules)
        self.spans: list[Span] = []
        self._begin = begin
        self._last_stack = ""
        self._has_seen_head = False
        self._has_seen_norm = False
        self._norm_end = 0
        call_kinds = (EventKind.ENTER, EventKind.EXIT)
        # A forward that continues after another phase (a checkpoint) without a module: its model has returned before.
        self._has_left_root = not _has_event(trace, begin, end, *call_kinds)
        depth = 0
        for time in range(begin, end):
            event = trace.events[time]
            if event.kind not in call_kinds:
                continue
            module = heads.get(event.ref, trace.modules[event.ref])
            if module.role is ModuleRole.NORM and depth == 0:
                self._has_seen_norm, self._norm_end = True, time + 1
            if module.role is ModuleRole.ROOT and event.kind is EventKind.ENTER and not self._has_left_root:
                self._reads_tokens = _reads_tokens(_get_subtree(trace.modules, event.ref))
            if module.role is ModuleRole.ROOT and event.kind is EventKind.EXIT and not self._has_seen_head:
                # The code after the model's root is the loss; with a head, the code after the head is.
                self._add_gap(time + 1, None)
                self._has_left_root = True
            if module.role not in (ModuleRole.LAYER, ModuleRole.HEAD, ModuleRole.CHILD):
                continue
            if event.kind is EventKind.ENTER:
                if depth == 0:
                    self._add_gap(time, module)
                depth += 1
            else:
                depth -= 1
                if depth == 0:
                    self._add_module(time + 1, module)
        self._add_gap(end, None)

    def _add_span(self, name: str, end: int, stack: str = "", index: int = NONE) -> None:
        phase = self._phase
        if phase.kind is PhaseKind.EVALUATION:
            name = EVALUATION_PREFIX + name
        self.spans.append(Span(name, phase.kind, phase.step, phase.micro_batch, self._begin, end, stack, index))
        self._begin = end
        self._has_seen_norm = False

    def _extend_last(self, end: int) -> None:
        """Extend the last stage to the event `end`."""
        self.spans[-1] = replace(self.spans[-1], end=end)
        self._begin = end

    def _is_between_layers(self, next_module: Module, end: int) -> bool:
        """Return whether the code up to the event `end` is between two layers: of one stack, or of two that take turns,
        such as attention and MLPs. A decoder after an encoder begins with an embedding of its own."""
        if self._is_same_list(next_module):
            return True
        events, modules = self._trace.events[self._begin : end], self._trace.modules
        embeds = any(kind is EventKind.ENTER and modules[ref].role is ModuleRole.EMBEDDING for kind, ref in events)
        return bool(self._last_stack) and next_module.role is ModuleRole.LAYER and not embeds

    def _is_same_list(self, module: Module) -> bool:
        """Return whether `module` is in the same module list as the last called module."""
        if module.role is ModuleRole.CHILD:
            return bool(self.spans) and self.spans[-1].plain_name == self._format_child_name(module)
        return module.stack == self._last_stack

    def _format_child_name(self, module: Module) -> str:
        """Return the path and class of a child module; for one in a module list, the path and class of the list."""
        path = module.stack or module.path
        list_class = next((m.class_name for m in self._trace.modules if m.path == path), "") if module.stack else ""
        return f"{path} {list_class or module.class_name}"

    def _add_gap(self, end: int, next_module: Module | None) -> None:
        """Add a stage for code between two module calls, up to the event `end`; its name depends on `next_module`."""
        is_after_model = self._has_seen_head or self._has_left_root
        if (
            not is_after_model
            and next_module is not None
            and next_module.stack
            and self._is_between_layers(next_module, end)
        ):
            # Between two layers the old hidden states are freed: this belongs to the layer.
            self._extend_last(end)
            return
        if is_after_model and self._phase.step == 0 and self._phase.kind is not PhaseKind.EVALUATION:
            name = "output"  # outside steps: without gradients
        elif self._has_left_root and self._is_continued and not self._has_seen_head:
            name = "own code"  # code of the program between two models: an encoder and a decoder
        elif is_after_model:
            trains = self._trace.trains or any(phase.kind is PhaseKind.BACKWARD for phase in self._trace.phases)
            name = "loss" if trains else "output"
        elif next_module is None and not self._last_stack and self._is_compiled(end):
            name = "forward"  # of a whole model, whose parts were not called
        elif not self._stacks or not self._reads_tokens:
            name = "own code"  # code of a model that is no language model, outside its children
        elif not self._last_stack:
            name = "embedding"
        elif next_module is None or next_module.role is ModuleRole.HEAD:
            name = "final norm" if self._has_seen_norm else "before the head"
            if next_module is None and (not self._has_seen_norm or self._find_storages_since_norm(end)):
                # The head's product, and with some kernels the loss, in the model's own code.
                if self._has_seen_norm:
                    self._add_span(name, self._norm_end)
                name = "logits" if self._makes_logits(end) else "own code"
        else:
            name = f"{self._format_stack_prefix(next_module.stack)}embedding"
        last_span = self.spans[-1] if self.spans else None
        # The model's own code frees the tensors of a child.
        only_frees = name == "own code" and not _has_event(self._trace, self._begin, end, EventKind.ALLOC)
        if last_span is not None and (only_frees or last_span.plain_name == name):
            self._extend_last(end)
        else:
            self._add_span(name, end)

    def _is_compiled(self, end: int) -> bool:
        """Return whether the model's parts allocate storages before the event `end` although no part is called."""
        events, storages = self._trace.events[self._begin : end], self._trace.storages
        parts = _find_part_modules(self._trace.modules)
        if any(event.kind is EventKind.ENTER and event.ref in parts for event in events):
            return False
        return any(event.kind is EventKind.ALLOC and storages[event.ref].module in parts for event in events)

    def _find_storages_since_norm(self, end: int) -> list[int]:
        """Return the indices of storages allocated up to the event `end`, since the final norm or the last layer."""
        events = self._trace.events[max(self._norm_end, self._begin) : end]
        return [event.ref for event in events if event.kind is EventKind.ALLOC]

    def _makes_logits(self, end: int) -> bool:
        """Return whether a storage after the final norm, up to the event `end`, ends in a vocabulary dimension."""
        storages, vocab_size = self._trace.storages, _find_embedding_rows(self._trace)
        return any(storages[index].shape[1:][-1:] == (vocab_size,) for index in self._find_storages_since_norm(end))

    def _add_module(self, end: int, module: Module) -> None:
        if module.role is ModuleRole.HEAD:
            self._has_seen_head = True
            self._add_span("logits", end)
        elif module.role is ModuleRole.CHILD:
            if module.stack and self._is_same_list(module):
                self._extend_last(end)
            else:
                self._add_span(self._format_child_name(module), end)
        else:
            index = module.number
            last = self.spans[-1] if self.spans else None
            if self._last_stack and last is not None and (last.stack, last.index) == (module.stack, index):
                self._extend_last(end)  # a layer that consists of several modules
                return
            self._last_stack = module.stack
            self._add_span(f"{self._format_stack_prefix(module.stack)}layer {index}", end, module.stack, index)

    def _format_stack_prefix(self, stack: str) -> str:
        """Return the part of the path `stack` that no other stack has, such as "encoder "; empty for a single stack."""
        if len(self._stacks) < 2:
            return ""
        parts = [other.split(".") for other in self._stacks if other != stack]
        distinct_parts = [
            part for part in stack.split(".") if not part.isdigit() and not all(part in other for other in parts)
        ]
        return (distinct_parts[0] if distinct_parts else stack) + " "
