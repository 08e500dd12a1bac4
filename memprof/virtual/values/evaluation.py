"""Computes operators of known tensors on the CPU, at once or when something reads the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.flops import COLLECTIVES
from memprof.virtual.operator_call import find_tensors
from memprof.virtual.values import budget
from memprof.virtual.values.budget import is_cheap_to_compute, is_integer, is_linear, work_of
from memprof.virtual.values.shadows import MOST_STEPS, Later, Shadow, TensorLayout, threads_for
from memprof.virtual.values.store import ValueStore


class Evaluator:
    """Runs operators on what a store knows, within a budget of work for the whole run; `assume` is told its limits."""

    def __init__(self, store: ValueStore, assume: Callable[[str], None]) -> None:
        self._store = store
        self._assume = assume
        self._work = 0
        self._draws = 0

    def compute(self, func: Any, args: Any, kwargs: Any, made: Any = ()) -> Any:
        """Return what the overload `func` gives, or None if an input is not known or it is too much work.

        `made` are meta tensors like its results, where they are there.
        """
        if not self.are_known((args, kwargs)):
            return None
        if not self.is_within_budget(func, [*find_tensors([*args, *kwargs.values()]), *made]):
            return None
        return self._call(func, args, kwargs)

    def defer(self, func: Any, args: Any, kwargs: Any, output: torch.Tensor) -> bool:
        """Compute a large `output` of floats or bytes when something reads it: most, such as positions, images and
        quantized weights, decide nothing. Returns whether it is such a one."""
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        decides = is_integer(output) and output.dtype not in (torch.int8, torch.uint8)
        if (
            is_cheap_to_compute(output)
            or decides
            or drawn
            or not is_linear(func)
            or not self._store.is_trackable(output)
        ):
            return False
        given: list[Shadow] = []
        work = work_of(func, [*find_tensors([*args, *kwargs.values()]), output])
        try:
            args, kwargs = self._later((args, kwargs), given)
        except LookupError:
            return False
        steps = 1 + max((shadow.steps for shadow in given), default=0)
        if steps > MOST_STEPS:
            return False
        geometry = TensorLayout.of(output)

        def make() -> torch.Tensor | None:
            known = self._call(func, args, kwargs) if self._charge_budget(work) else None
            return None if known is None or known.shape != geometry.size else geometry.spread(known)

        self._store.keep(output.untyped_storage(), None, make).steps = steps
        for shadow in given:
            shadow.has_pending_readers = True
        return True

    def are_known(self, value: Any) -> bool:
        """Return whether the values of every tensor in `value`, collections looked into, are known or may be once they
        are computed."""
        if isinstance(value, torch.Tensor):
            return self._store.may_have(value)
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return all(self.are_known(part) for part in parts)

    def known(self, value: Any) -> Any:
        """Return `value` with the real tensors in place of those on the GPU.

        Raises:
            LookupError: one of them is not known.
        """

        def real(part: Any) -> torch.Tensor:
            known = part.read() if isinstance(part, Later) else self._store.get(part)
            if known is None:
                raise LookupError
            return known

        return _replaced(value, real)

    def is_within_budget(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Return whether the work is little, or linear and within what is left for the run, from which it is taken.

        `tensors` are what `func` is given, and then what it makes.
        """
        if all(is_cheap_to_compute(tensor) for tensor in tensors):
            return True
        work = work_of(func, tensors)
        moderate = work <= budget.MODERATE_ELEMENTS and all(is_cheap_to_compute(t) or is_integer(t) for t in tensors)
        return (moderate or is_linear(func)) and self._charge_budget(work)

    def _charge_budget(self, work: int) -> bool:
        if self._work + work > budget.MAX_WORK:
            self._assume("Masks and indices made late in the run are not computed: there were too many large ones.")
            return False
        self._work += work
        return True

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        try:
            known, kwargs = self.known((args, kwargs))
            if torch.Tag.nondeterministic_seeded in func.tags:
                return self._draw(func, known, kwargs)
            with threads_for(max((tensor.numel() for tensor in find_tensors(known)), default=0)):
                result = func(*known, **kwargs)
            if func.namespace == COLLECTIVES and func.overloadpacket is not torch.ops._c10d_functional.wait_tensor:
                for tensor in find_tensors(result):  # torch keeps those that are not waited for
                    torch.ops._c10d_functional.wait_tensor(tensor)
            return self._store.tokens.compared(func, args, known, result)
        except (LookupError, RuntimeError, NotImplementedError):
            # The CPU cannot do it, or the same call on the meta tensors is about to raise the user's own error.
            return None

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Random integers, the same in every run and without touching the program's generator; floats are unknown."""
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._draws)
            self._draws += 1
            result = func(*args, **kwargs)
        return None if any(part.is_floating_point() for part in find_tensors(result)) else result

    def _later(self, value: Any, given: list[Shadow]) -> Any:
        """Return `value` with what stands for its tensors when they are gone; `given` gets the shadows to be read."""

        def later(tensor: torch.Tensor) -> Any:
            shadow = self._store.shadow_of(tensor) if tensor.is_meta else None
            if shadow is None:
                return self.known(tensor) if tensor.is_meta else tensor.clone()
            given.append(shadow)
            return Later(shadow, TensorLayout.of(tensor))

        return _replaced(value, later)


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    if isinstance(value, (torch.Tensor, Later)):
        return replace(value)
    if isinstance(value, (list, tuple)):
        return [_replaced(part, replace) for part in value]
    if isinstance(value, dict):
        return {key: _replaced(part, replace) for key, part in value.items()}
    return value
