"""Evaluation of operators on known values, on the CPU: immediately, or deferred until the program reads the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.flops import COLLECTIVES
from memprof.virtual.operator_call import find_tensors
from memprof.virtual.values import budget
from memprof.virtual.values.budget import count_visited_elements, has_linear_cost, is_cheap_to_compute, is_integer
from memprof.virtual.values.shadows import MAX_DEFERRED_STEPS, DeferredTensor, Shadow, TensorLayout, limit_threads
from memprof.virtual.values.store import ValueStore


class Evaluator:
    """Evaluator of operators on known values, within a budget of visited elements per run.

    Args:
        store: the known values of the run's tensors.
        assume: called with an assumption once the budget is exhausted.
    """

    def __init__(self, store: ValueStore, assume: Callable[[str], None]) -> None:
        self._store = store
        self._assume = assume
        self._num_visited_elements = 0
        self._num_draws = 0

    def compute(self, func: Any, args: Any, kwargs: Any, outputs: Any = ()) -> Any:
        """Return the result of the operator overload `func`; None if an input is unknown or the budget is exceeded.

        `outputs` are the meta tensors of the results, if they exist already.
        """
        if not self.are_known((args, kwargs)):
            return None
        if not self.is_within_budget(func, [*find_tensors([*args, *kwargs.values()]), *outputs]):
            return None
        return self._call(func, args, kwargs)

    def defer(self, func: Any, args: Any, kwargs: Any, output: torch.Tensor) -> bool:
        """Defer computing a large `output` of floats or bytes until the program reads `output`; return whether that is
        possible. Most such tensors (positions, images, quantized weights) are never read."""
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        controls_flow = is_integer(output) and output.dtype not in (torch.int8, torch.uint8)
        if (
            is_cheap_to_compute(output)
            or controls_flow
            or is_random
            or not has_linear_cost(func)
            or not self._store.is_trackable(output)
        ):
            return False
        inputs: list[Shadow] = []
        work = count_visited_elements(func, [*find_tensors([*args, *kwargs.values()]), output])
        try:
            args, kwargs = self._defer_reads((args, kwargs), inputs)
        except LookupError:
            return False
        num_steps = 1 + max((shadow.num_deferred_steps for shadow in inputs), default=0)
        if num_steps > MAX_DEFERRED_STEPS:
            return False
        layout = TensorLayout.from_tensor(output)

        def compute_flat() -> torch.Tensor | None:
            result = self._call(func, args, kwargs) if self._charge_budget(work) else None
            return None if result is None or result.shape != layout.size else layout.fill_storage(result)

        self._store.set_elements(output.untyped_storage(), None, compute_flat).num_deferred_steps = num_steps
        for shadow in inputs:
            shadow.has_pending_readers = True
        return True

    def are_known(self, value: Any) -> bool:
        """Return whether the values of every tensor in `value`, also in nested collections, are known or can be
        computed."""
        if isinstance(value, torch.Tensor):
            return self._store.can_read(value)
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return all(self.are_known(item) for item in items)

    def find_known_values(self, value: Any) -> Any:
        """Return `value` with each virtual tensor, also in nested collections, replaced by a CPU tensor of its values.

        Raises:
            LookupError: the values of a tensor are unknown.
        """

        def read_tensor(item: Any) -> torch.Tensor:
            values = item.read() if isinstance(item, DeferredTensor) else self._store.get(item)
            if values is None:
                raise LookupError
            return values

        return _replace_tensors(value, read_tensor)

    def is_within_budget(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Return whether `func` may be computed: on small tensors, or in linear time within the budget.

        `tensors` are the inputs of `func`, then its outputs.
        """
        if all(is_cheap_to_compute(tensor) for tensor in tensors):
            return True
        work = count_visited_elements(func, tensors)
        is_moderate = work <= budget.MODERATE_ELEMENTS and all(is_cheap_to_compute(t) or is_integer(t) for t in tensors)
        return (is_moderate or has_linear_cost(func)) and self._charge_budget(work)

    def _charge_budget(self, work: int) -> bool:
        if self._num_visited_elements + work > budget.MAX_VISITED_ELEMENTS:
            self._assume("Masks and indices made late in the run are not computed: there were too many large ones.")
            return False
        self._num_visited_elements += work
        return True

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        try:
            inputs, kwargs = self.find_known_values((args, kwargs))
            if torch.Tag.nondeterministic_seeded in func.tags:
                return self._draw_random_integers(func, inputs, kwargs)
            with limit_threads(max((tensor.numel() for tensor in find_tensors(inputs)), default=0)):
                result = func(*inputs, **kwargs)
            if func.namespace == COLLECTIVES and func.overloadpacket is not torch.ops._c10d_functional.wait_tensor:
                for tensor in find_tensors(result):  # torch keeps the tensors of a collective until `wait_tensor`
                    torch.ops._c10d_functional.wait_tensor(tensor)
            return self._store.tokens.mask_comparison(func, args, inputs, result)
        except (LookupError, RuntimeError, NotImplementedError):
            # The CPU has no such kernel, or the same call on the meta tensors will raise the user's own error.
            return None

    def _draw_random_integers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return random integers from `func`, equal in every run, by a generator of our own; None for floats."""
        kwargs = {name: None if name == "generator" else value for name, value in kwargs.items()}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._num_draws)
            self._num_draws += 1
            result = func(*args, **kwargs)
        return None if any(item.is_floating_point() for item in find_tensors(result)) else result

    def _defer_reads(self, value: Any, inputs: list[Shadow]) -> Any:
        """Return `value` with a `DeferredTensor` for each tensor that has a shadow; append the shadows to `inputs`."""

        def defer_read(tensor: torch.Tensor) -> Any:
            shadow = self._store.get_shadow(tensor) if tensor.is_meta else None
            if shadow is None:
                return self.find_known_values(tensor) if tensor.is_meta else tensor.clone()
            inputs.append(shadow)
            return DeferredTensor(shadow, TensorLayout.from_tensor(tensor))

        return _replace_tensors(value, defer_read)


def _replace_tensors(value: Any, replace: Callable[[Any], Any]) -> Any:
    if isinstance(value, (torch.Tensor, DeferredTensor)):
        return replace(value)
    if isinstance(value, (list, tuple)):
        return [_replace_tensors(item, replace) for item in value]
    if isinstance(value, dict):
        return {key: _replace_tensors(item, replace) for key, item in value.items()}
    return value
