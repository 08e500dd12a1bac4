"""Detection of gradients that no optimizer has: of parameters that require gradients, and are in no optimizer.

At each backward pass the autograd graph is walked from its results to its leaves. A node is *trained* if it leads to a
leaf whose gradient may be wanted: any but a parameter that no optimizer has. What autograd saves for the other nodes is
kept for nothing, and so are the gradients to which they lead.

With several optimizers, as those of a GAN, the same holds for what leads to parameters of one of them alone, if their
gradients are set to None before this optimizer makes a step: this is known only then.
"""

from __future__ import annotations

import bisect
import gc
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import Optimizer

from memprof.torch_private import autograd
from memprof.trace.events import NONE, EventKind, UntrainedSpan
from memprof.watch.graph import collect_nodes
from memprof.watch.phases import Phases
from memprof.watch.recorder import Recorder

MIN_BYTES = 1 << 20  # of a storage that is recorded
_MOST_NODES = 1 << 20  # larger graphs are not walked


@dataclass(slots=True)
class _Pending:
    """What leads to the parameters of one optimizer alone, since its last step."""

    num_steps: int  # of the optimizer, so far
    spans: list[UntrainedSpan]
    gradients: set[int]  # storages
    numbers: set[int]  # sequence numbers of the nodes


class UntrainedDetector:
    """Detector of gradients that no optimizer has, which writes them and what autograd saves for them into the trace.

    Programs of several processes are left out: where parameters are sharded, optimizers have tensors of their own.
    """

    def __init__(self, recorder: Recorder, phases: Phases) -> None:
        self._recorder = recorder
        self._phases = phases
        self._leaves: list[nn.Parameter] = []  # untrained ones of the running backward pass
        self._parameter_by_gradient: dict[int, int] = {}  # storages of untrained gradients, and of their parameters
        self._discarded_lines: set[int] = set()  # lines of calls that led to gradients that were discarded, and
        self._used_lines: set[int] = set()  # to gradients with which an optimizer has made a step
        self._pending: weakref.WeakKeyDictionary[Optimizer, _Pending] = weakref.WeakKeyDictionary()

    def record_backward_begin(self, results: Iterable[torch.Tensor]) -> None:
        """Record the forward that is differentiated from `results` for parameters that no optimizer has."""
        self._leaves = self._record_forward(results)

    def record_out_of_memory(self) -> None:
        """Record the same of a forward in which memory runs out: from all tensors with a graph."""
        if autograd.current_graph_task_id() == -1:
            with torch.DisableTorchFunction():
                tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
            self._record_forward(tensors)
        self.record_run_end()

    def record_run_end(self) -> None:
        """Record what was kept for gradients that were discarded whenever calls at the same lines led to them."""
        for pending in self._pending.values():
            lines = self._discarded_lines - self._used_lines
            self._recorder.trace.untrained_spans += [s for s in pending.spans if self._find_line(s) in lines]
            pending.spans.clear()

    def _find_line(self, span: UntrainedSpan) -> int:
        """Return the line of the outermost call in which `span` is."""
        forwards = self._recorder.trace.forwards
        position = bisect.bisect_right(forwards, span.begin, key=lambda forward: forward.begin) - 1
        return NONE if position < 0 or span.begin >= forwards[position].end else forwards[position].source

    def _record_forward(self, results: Iterable[torch.Tensor]) -> list[nn.Parameter]:
        """Record the forward that leads to `results`, and return its parameters that no optimizer has."""
        if not self._phases.optimizers or self._recorder.owners.is_naming_communication:
            return []
        with torch.DisableTorchFunction():
            groups = (group for optimizer in self._phases.optimizers for group in optimizer.param_groups)
            trained = {self._recorder.storages.get_index(p) for group in groups for p in group["params"]}
            self._drop_trained_gradients(trained)
            nodes = collect_nodes(results, _MOST_NODES)
            self._record_discarded_gradients(nodes)
            leaves = [node for node in nodes if _is_leaf(node)]
            untrained = {leaf for leaf in leaves if self._is_untrained(leaf.variable, trained)}
            if len(nodes) == _MOST_NODES:
                return []
            operators = [node for node in nodes if not _is_leaf(node)]
            operators.sort(key=lambda node: node._sequence_nr())  # a node is made after those to which it leads
            self._keep_pending(operators, leaves)
            if untrained:
                own = _find_nodes_to(operators, untrained)
                self._recorder.trace.untrained_spans += self._list_spans(operators, own)
            return [leaf.variable for leaf in untrained]

    def _keep_pending(self, operators: list[Any], leaves: list[Any]) -> None:
        """Keep what leads to the parameters of one optimizer alone, of several whose parameters get gradients."""
        owners = {id(p): one for one in self._phases.optimizers for group in one.param_groups for p in group["params"]}
        by_optimizer: dict[Any, list[Any]] = defaultdict(list)
        for leaf in leaves:
            by_optimizer[owners.get(id(leaf.variable))].append(leaf)
        if len(by_optimizer.keys() - {None}) < 2:
            return
        for optimizer, own in by_optimizer.items():
            nodes = set() if optimizer is None else _find_nodes_to(operators, own)
            spans = self._list_spans(operators, nodes) if nodes else []
            if spans:
                num_steps = self._phases.num_steps.get(optimizer, 0)
                pending = self._pending.get(optimizer)
                if pending is None or pending.num_steps != num_steps:
                    pending = self._pending[optimizer] = _Pending(num_steps, [], set(), set())
                pending.spans.extend(spans)
                pending.numbers.update(node._sequence_nr() for node in nodes)

    def _record_discarded_gradients(self, nodes: list[Any]) -> None:
        """Record what was kept for gradients that the program has set to None, and their optimizer has made no step;
        `nodes` are those that another backward is about to use, or may."""
        if not self._pending:
            return
        trace, numbers = self._recorder.trace, {node._sequence_nr() for node in nodes if not _is_leaf(node)}
        for optimizer, pending in list(self._pending.items()):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            lines = {self._find_line(span) for span in pending.spans} - {NONE}
            if self._phases.num_steps.get(optimizer, 0) != pending.num_steps or numbers & pending.numbers:
                self._used_lines |= lines
                del self._pending[optimizer]
            elif all(parameter.grad is None for parameter in parameters):
                self._discarded_lines |= lines
                trace.untrained_spans += pending.spans
                trace.discarded_gradients += sorted(pending.gradients)
                del self._pending[optimizer]

    def record_backward_end(self) -> None:
        """Record the gradients of the parameters that no optimizer has."""
        with torch.DisableTorchFunction():
            for parameter in self._leaves:
                gradient = None if parameter.grad is None else self._recorder.storages.get_index(parameter.grad)
                if gradient is not None and gradient != NONE and gradient not in self._parameter_by_gradient:
                    self._parameter_by_gradient[gradient] = self._recorder.storages.get_index(parameter)
                    self._recorder.trace.untrained_gradients.append(gradient)
            for optimizer, pending in self._pending.items():
                for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                    if parameter.grad is not None:
                        pending.gradients.add(self._recorder.storages.get_index(parameter.grad))
                pending.gradients.discard(NONE)
        self._leaves = []

    def _drop_trained_gradients(self, trained: set[int]) -> None:
        """Drop the gradients of parameters that an optimizer has meanwhile been given."""
        parameters, trace = self._parameter_by_gradient, self._recorder.trace
        trace.untrained_gradients = [index for index in trace.untrained_gradients if parameters[index] not in trained]

    def _is_untrained(self, leaf: torch.Tensor, trained: set[int]) -> bool:
        """Return whether `leaf` is a parameter of no optimizer, and no hook reads its gradient."""
        hooks = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
        index = self._recorder.storages.get_index(leaf)
        return isinstance(leaf, nn.Parameter) and not hooks and index != NONE and index not in trained

    def _list_spans(self, operators: list[Any], own: set[Any]) -> list[UntrainedSpan]:
        """Return the spans in which those of `operators` ran that are in `own`, and what is kept for them."""
        trace, storages = self._recorder.trace, self._recorder.storages
        others = [node for node in operators if node not in own]
        spans = []
        for begin, end in self._recorder.attribution.find_spans(own, others):
            made = [ref for kind, ref in trace.events[begin:end] if kind is EventKind.ALLOC]
            kept = {
                index: used
                for index in made
                if storages.is_live(index)
                and index not in trace.owners
                and trace.storages[index].module != NONE
                and trace.storages[index].num_bytes >= MIN_BYTES
                # What the next operator reads has to stay: it may be saved for trained parameters.
                and NONE != (used := storages.get_last_use(index)) < end
            }
            if kept:
                spans.append(UntrainedSpan(begin, end, tuple(kept), tuple(kept.values())))
        return spans


def _is_leaf(node: Any) -> bool:
    """Return whether `node` adds to the gradient of its `variable`; a Function may have an attribute of this name."""
    return hasattr(node, "variable") and not isinstance(node, BackwardCFunction)


def _find_nodes_to(operators: list[Any], leaves: Iterable[Any]) -> set[Any]:
    """Return those of the nodes `operators`, each after those to which it leads, that lead to `leaves` alone."""
    found = set(leaves)
    for node in operators:
        if not _is_trained(node, found):
            found.add(node)
    return found.intersection(operators)


def _is_trained(node: Any, untrained: set[Any]) -> bool:
    """Return whether `node` leads to more than `untrained` nodes and leaves. A Function of Python may run a backward
    of its own, as a checkpoint does, to parameters that the graph does not show."""
    next_nodes = (next_node for next_node, _ in node.next_functions if next_node is not None)
    return isinstance(node, BackwardCFunction) or not all(next_node in untrained for next_node in next_nodes)
