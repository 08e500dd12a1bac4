"""Values on the virtual GPU: which numbers are really computed, and what is assumed of those that are not.

Device tensors are meta tensors: they have shapes and no data. Eager code reads data all the same: "is this batch
packed?", "which tokens go to expert 3?", `loss.item()`. So what derives from known numbers alone (masks, indices,
schedules) is really computed, on the CPU beside its meta tensor (a *shadow*); then the program takes the branch that a
real run takes. A tensor whose elements are all alike takes one number, whatever its size. What derives from
floating-point data is unknown, and reads of it follow a fixed policy, stated in the run's assumptions:

* a floating-point number read is 1.0 (losses and norms are finite), an integer 1, a condition False;
* `isfinite` is true everywhere, `isnan` and `isinf` false;
* indices chosen from unknown scores (topk, argmax, sort, multinomial) are balanced: each is chosen equally often, and a
  chosen token is equal to none that the program names, so that none ends a text (unknowns.py);
* an unknown mask keeps every element wherever it selects or is counted, and as an array it is true everywhere, which
  bounds the memory from above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual import budget, unknowns
from memprof.virtual.budget import is_integer, is_linear, is_small, work_of
from memprof.virtual.calls import OVERWRITES, tensors_of
from memprof.virtual.collective_bytes import COLLECTIVES
from memprof.virtual.shadows import MOST_STEPS, Geometry, Later, Shadow, threads_for, untouched
from memprof.virtual.tokens import ChosenTokens

_aten = torch.ops.aten

TOO_MANY_INDICES = (
    "Indices of a selection beyond 1 GiB are counted, and not computed: which elements they name is not known."
)
_TRIANGLES = frozenset({_aten.tril, _aten.triu})


class Values:
    """The shadows of the tensors on the virtual GPU, by the address of their storage."""

    def __init__(self, assume: Callable[[str], None]) -> None:
        self._shadows: dict[int, Shadow] = {}
        self._uniform: dict[int, torch.Tensor] = {}
        """The value of every element."""
        self._shares: dict[int, float] = {}
        """Of masks too large to compute: the part that is true, spread evenly."""
        self.tokens = ChosenTokens()
        self.ends: set[int] = set()
        """Tokens that end or pad a text, as far as the program has said so."""
        self._held_bytes = 0
        self._work = 0
        self._lent: tuple[Any, torch.Tensor] | None = None
        """The last triangle, by what it was made of."""
        self.assume = assume
        self._draws = 0
        self.on_unknown: Callable[[torch.Tensor, str], None] = lambda tensor, told: None
        """Called when the program reads a value that is not known, with what it is told."""

    def drop(self, address: int) -> None:
        """The storage at `address` died, or its contents are no longer known."""
        shadow = self._shadows.pop(address, None)
        if shadow is not None:
            self._held_bytes -= shadow.num_bytes
        self._uniform.pop(address, None)
        self._shares.pop(address, None)
        self.tokens.drop(address)

    def knows(self, address: int) -> bool:
        """Whether something is known of the storage at `address`."""
        return address in self._shadows or address in self._uniform or address in self._shares

    def flat(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """What the whole of `storage` holds, in memory of its own; None if that is not known."""
        value = self._uniform.get(storage._cdata)
        if value is not None:
            if value != 0 and storage.nbytes() > budget.MAX_TENSOR_BYTES:
                return None
            self._spell_out(storage)
        shadow = self._shadows.get(storage._cdata)
        flat = None if shadow is None else shadow.flat()
        if shadow is not None and flat is not None and not shadow.num_bytes:
            shadow.num_bytes = storage.nbytes()  # now that it is made
            self._held_bytes += shadow.num_bytes
        return flat

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor behind `tensor` (a real tensor is its own), None if its contents are not known."""
        if not tensor.is_meta:
            return tensor
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        uniform = self._uniform.get(tensor.untyped_storage()._cdata)
        if uniform is not None and uniform.dtype == tensor.dtype:
            return uniform.expand(tensor.shape)
        flat = self.flat(tensor.untyped_storage())
        return None if flat is None else Geometry.of(tensor).view(flat)

    def writable(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same in memory that the program may write to; what it writes is what the tensor holds."""
        flat = self._own(tensor.untyped_storage())
        return None if flat is None else self.get(tensor)

    def _own(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """What the whole of `storage` holds, to be changed: what was put off still reads what it held before."""
        flat, shadow = self.flat(storage), self._shadows.get(storage._cdata)
        if flat is not None and shadow is not None and shadow.is_awaited:
            flat = flat.clone()
            self._shadows[storage._cdata] = Shadow(shadow.num_bytes, flat)
        return flat

    def set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """`tensor`, which owns its whole storage, is known to hold `value` (same shape and dtype)."""
        if not tensor.numel():
            return
        if value.numel() == 1 or (value.dim() and not any(value.stride())):
            self.set_uniform(tensor, value.as_strided((), ()) if value.dim() else value)
            return
        self._keep(tensor.untyped_storage(), Geometry.of(tensor).spread(value))

    def is_uniform(self, tensor: torch.Tensor) -> bool:
        """Whether all elements are known to be alike."""
        return tensor.untyped_storage()._cdata in self._uniform

    def set_uniform(self, tensor: torch.Tensor, value: Any) -> None:
        """All elements of `tensor`, which owns its whole storage, are known to be `value`."""
        if tensor.numel():
            address = tensor.untyped_storage()._cdata
            self.drop(address)
            if isinstance(value, torch.Tensor):
                self._uniform[address] = value.to(tensor.dtype, copy=True)
            else:
                self._uniform[address] = torch.full((), value, dtype=tensor.dtype)

    def _keep(
        self,
        storage: torch.UntypedStorage,
        flat: torch.Tensor | None,
        make: Callable[[], torch.Tensor | None] | None = None,
    ) -> Shadow:
        self.drop(storage._cdata)
        return self._hold(storage, Shadow(0 if make else storage.nbytes(), flat, make))

    def _hold(self, storage: torch.UntypedStorage, shadow: Shadow) -> Shadow:
        self._shadows[storage._cdata] = shadow
        self._held_bytes += shadow.num_bytes
        return shadow

    def _spell_out(self, storage: torch.UntypedStorage) -> None:
        """One value for all elements becomes a value for each; zeros take no memory until they are written."""
        value = self._uniform.pop(storage._cdata)
        flat = untouched(storage.nbytes() // value.element_size(), value.dtype)
        if value != 0:
            flat.fill_(value)
        self._hold(storage, Shadow(storage.nbytes(), flat))

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this dtype and size is worth keeping, and there is room for it."""
        if is_small(tensor):
            return True
        num_bytes = tensor.untyped_storage().nbytes()
        return num_bytes <= budget.MAX_TENSOR_BYTES and self._held_bytes + num_bytes <= budget.MAX_SHADOW_BYTES

    # -- operators --------------------------------------------------------------------------------------------------

    def compute(self, func: Any, args: Any, kwargs: Any, made: Any = ()) -> Any:
        """`func` really computed on the CPU, or None if an input is not known or it is too much work.

        Args:
            func: an operator's overload.
            args: its arguments.
            kwargs: its keyword arguments.
            made: meta tensors like its results, where they are there.
        """
        if not self._all_known((args, kwargs)):
            return None
        if not self._affords(func, [*tensors_of([*args, *kwargs.values()]), *made]):
            return None
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        try:
            known, kwargs = self._known((args, kwargs))
            if torch.Tag.nondeterministic_seeded in func.tags:
                return self._draw(func, known, kwargs)
            with threads_for(max((tensor.numel() for tensor in tensors_of(known)), default=0)):
                result = func(*known, **kwargs)
            if func.namespace == COLLECTIVES and func.overloadpacket is not torch.ops._c10d_functional.wait_tensor:
                for tensor in tensors_of(result):  # torch keeps those that are not waited for
                    torch.ops._c10d_functional.wait_tensor(tensor)
            return self.tokens.compared(func, args, known, result)
        except (LookupError, RuntimeError, NotImplementedError):
            # The CPU cannot do it, or the same call on the meta tensors is about to raise the user's own error.
            return None

    def _affords(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Whether the work is little, or linear and within what is left for the run."""
        if all(is_small(tensor) for tensor in tensors):
            return True
        work = work_of(func, tensors)
        moderate = work <= budget.MODERATE_ELEMENTS and all(is_small(t) or is_integer(t) for t in tensors)
        return (moderate or is_linear(func)) and self._pay(work)

    def _pay(self, work: int) -> bool:
        if self._work + work > budget.MAX_WORK:
            self.assume("Masks and indices made late in the run are not computed: there were too many large ones.")
            return False
        self._work += work
        return True

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Random integers, the same in every run and without touching the program's generator; floats are unknown."""
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._draws)
            self._draws += 1
            result = func(*args, **kwargs)
        return None if any(part.is_floating_point() for part in tensors_of(result)) else result

    def _may_know(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or not value.is_meta or not value.numel():
            return True
        address = value.untyped_storage()._cdata
        return address in self._shadows or address in self._uniform

    def _all_known(self, value: Any) -> bool:
        """Whether something is known of every tensor in `value`, without computing what was put off."""
        if isinstance(value, torch.Tensor):
            return self._may_know(value)
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            for part in value:
                if not self._all_known(part):
                    return False
        return True

    def _known(self, value: Any) -> Any:
        """`value` with the real tensors in place of those on the card.

        Raises:
            LookupError: one of them is not known.
        """
        if isinstance(value, (torch.Tensor, Later)):
            known = value.read() if isinstance(value, Later) else self.get(value)
            if known is None:
                raise LookupError
            return known
        if isinstance(value, (list, tuple)):
            return [self._known(part) for part in value]
        if isinstance(value, dict):
            return {key: self._known(part) for key, part in value.items()}
        return value

    def _put_off(self, func: Any, args: Any, kwargs: Any, output: torch.Tensor) -> bool:
        """Compute a large `output` of floats or bytes when something reads it: most, such as positions, images and
        quantized weights, decide nothing."""
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        decides = is_integer(output) and output.dtype not in (torch.int8, torch.uint8)
        if is_small(output) or decides or drawn or not is_linear(func) or not self.wants(output):
            return False
        given: list[Shadow] = []
        work = work_of(func, [*tensors_of([*args, *kwargs.values()]), output])
        try:
            args, kwargs = self._later((args, kwargs), given)
        except LookupError:
            return False
        steps = 1 + max((shadow.steps for shadow in given), default=0)
        if steps > MOST_STEPS:
            return False
        geometry = Geometry.of(output)

        def make() -> torch.Tensor | None:
            known = self._call(func, args, kwargs) if self._pay(work) else None
            return None if known is None or known.shape != geometry.size else geometry.spread(known)

        self._keep(output.untyped_storage(), None, make).steps = steps
        for shadow in given:
            shadow.is_awaited = True
        return True

    def _later(self, value: Any, given: list[Shadow]) -> Any:
        """`value` with what stands for its tensors when they are gone; the shadows that are yet to be read."""
        if isinstance(value, torch.Tensor):
            shadow = self._shadows.get(value.untyped_storage()._cdata) if value.is_meta else None
            if shadow is None:
                return self._known(value) if value.is_meta else value.clone()
            given.append(shadow)
            return Later(shadow, Geometry.of(value))
        if isinstance(value, (list, tuple)):
            return [self._later(part, given) for part in value]
        if isinstance(value, dict):
            return {key: self._later(part, given) for key, part in value.items()}
        return value

    def learn(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Give the new tensors `outputs` of `func` their values, if they can be known or assumed."""
        self._learn(func, args, kwargs, outputs)
        self.tokens.hand_on(func, args, kwargs, outputs)

    def _learn(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        packet = func.overloadpacket
        if packet in unknowns.UNIFORM:
            value = unknowns.UNIFORM[packet](args, kwargs)
            value = self.get(value) if isinstance(value, torch.Tensor) else value
            for output in outputs:
                if value is not None and (packet not in unknowns.EMPTY or is_small(output) or is_integer(output)):
                    self.set_uniform(output, value)
            return
        if outputs and args and not is_integer(outputs[-1]) and not self._may_know(args[0]):
            return  # most operators: floats of what is not known
        if self._follow_uniform(func, args, kwargs, outputs):
            return
        result = None
        if self._all_known((args, kwargs)) and any(self.wants(output) for output in outputs):
            if len(outputs) == 1 and self._put_off(func, args, kwargs, outputs[0]):
                return
            key = self._triangle(func, args, kwargs, outputs[0]) if packet in _TRIANGLES else None
            if key is not None and self._lent is not None and self._lent[0] == key:
                if self._affords(func, [args[0], outputs[0]]):
                    self._keep(outputs[0].untyped_storage(), self._lent[1]).is_awaited = True
                    return
            else:
                result = self.compute(func, args, kwargs, outputs)
                if key is not None and result is not None:
                    self.set(outputs[0], result)
                    self._lend(key, outputs[0])
                    return
        if result is None:
            self._assume_for(func, args, kwargs, outputs)
            return
        results = result if isinstance(result, (list, tuple)) else [result]
        for output, known in zip(outputs, results, strict=False):
            if isinstance(known, torch.Tensor) and known.shape == output.shape and self.wants(output):
                self.set(output, known)

    def _triangle(self, func: Any, args: Any, kwargs: Any, output: torch.Tensor) -> Any:
        """What a triangle of a matrix of one value is made of: attention makes the same mask in every layer."""
        one = self._one_value(args[0])
        if one is None or kwargs or output.numel() * output.element_size() > budget.LENT_BYTES:
            return None
        return func, one.item(), output.dtype, output.size(), output.stride(), *args[1:]

    def _lend(self, key: Any, output: torch.Tensor) -> None:
        """Keep what `output` holds for the next; whoever writes into either has a copy of its own."""
        shadow = self._shadows.get(output.untyped_storage()._cdata)
        flat = None if shadow is None else shadow.flat()
        if shadow is not None and flat is not None:
            shadow.is_awaited = True
            self._lent = key, flat

    def _follow_uniform(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> bool:
        """Of tensors whose elements are all alike, an operator on single elements makes such a tensor."""
        packet = func.overloadpacket
        if len(outputs) != 1 or not args or not isinstance(args[0], torch.Tensor) or is_small(args[0]):
            return False
        first = self._one_value(args[0])
        if first is None:
            return False
        if packet is _aten.sum or packet is _aten.count_nonzero:
            if first.is_floating_point() or not outputs[0].numel():
                return False
            times = args[0].numel() // outputs[0].numel()
            self.set_uniform(outputs[0], (first != 0 if packet is _aten.count_nonzero else first) * times)
            return True
        if packet is _aten._to_copy or packet in unknowns.ANY_ELEMENT:
            self.set_uniform(outputs[0], first)
            return True
        if torch.Tag.pointwise not in func.tags or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        ones = [self._one_value(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        if any(one is None and arg is not None for one, arg in zip(ones, args, strict=True)):
            return False
        if tensors_of(list(kwargs.values())) or any(isinstance(arg, (list, tuple)) for arg in args):
            return False
        try:
            self.set_uniform(outputs[0], func(*ones, **{k: v for k, v in kwargs.items() if k != "memory_format"}))
        except (RuntimeError, IndexError, NotImplementedError):
            return False
        return True

    def _one_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of all elements, without dimensions; None if they differ or are not known."""
        if not tensor.is_meta:
            return tensor.reshape(()) if tensor.numel() == 1 else None
        known = self._uniform.get(tensor.untyped_storage()._cdata)
        if known is None and tensor.numel() == 1:
            known = self.get(tensor)
        return None if known is None or known.dtype != tensor.dtype else known.reshape(())

    def _assume_for(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """What stands for results that cannot be computed."""
        packet = func.overloadpacket
        if not outputs or not args or not isinstance(args[0], torch.Tensor):
            return
        if packet is _aten.all:
            self.set_uniform(outputs[-1], 1)
            return
        if not is_integer(outputs[-1]):
            return
        share = self._share(args[0])
        stand_in = None
        if share is not None and (packet is _aten._to_copy or self.wants(outputs[-1])):  # a copy is of one value
            with threads_for(outputs[-1].numel()):
                stand_in = unknowns.counted(func, args, outputs[-1], share)
        if stand_in is not None:
            self.set(outputs[-1], stand_in)
            return
        if share is not None and share < 1.0:
            if packet in unknowns.KEEP_SHARE:
                self._shares[outputs[-1].untyped_storage()._cdata] = share
            return
        if self.get(args[0]) is None and self.wants(outputs[-1]):
            with threads_for(outputs[-1].numel()):
                chosen = unknowns.choices(func, args, kwargs, outputs, self.ends)
            if chosen is not None:
                self.assume(unknowns.CHOICES)
                self.set(outputs[-1], chosen.indices)
                self.tokens.mark(outputs[-1], chosen.tokens)

    def _share(self, tensor: torch.Tensor) -> float | None:
        """The part of a mask's elements that is true, where not more is known; None if this is no such mask."""
        if tensor.is_meta and tensor.untyped_storage()._cdata in self._shares:
            return self._shares[tensor.untyped_storage()._cdata]
        return 1.0 if tensor.dtype is torch.bool and self.get(tensor) is None else None

    def write(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> None:
        """`func` changes `target` in place: follow it, or forget what `target` holds."""
        if target.numel():  # else nothing changes
            self._write(func, args, kwargs, target)
            self.tokens.hand_on(func, args, kwargs, [target])

    def _write(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> None:
        address, packet = target.untyped_storage()._cdata, func.overloadpacket
        whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        others = [*args[1:], *kwargs.values()]
        drawn = torch.Tag.nondeterministic_seeded in func.tags and not is_integer(target)
        if not self._all_known(others) or drawn or (address in self._shares and not (whole and packet in OVERWRITES)):
            self.drop(address)
            return
        if whole and packet in (_aten.zero_, _aten.fill_) and address not in self._shadows:
            self.set_uniform(target, 0 if packet is _aten.zero_ else self._known(others[0]))
            return
        one = self._one_value(target) if whole else None
        if one is not None and not is_small(target) and self._follow_uniform(func, args, kwargs, [target]):
            return
        moves = whole and packet is _aten.copy_ and others[0].is_meta and others[0].shape == target.shape
        # As a new tensor would be: what is moved to the host and back is rarely read.
        if moves and self._put_off(_aten._to_copy.default, (others[0],), {"dtype": target.dtype}, target):
            return
        if address not in self._shadows:
            if address not in self._uniform and not (whole and packet in OVERWRITES):
                return
            if not self.wants(target):
                self._give_share(func, args, target)
                return
            if address not in self._uniform:
                self.set_uniform(target, 0)
            self._spell_out(target.untyped_storage())
        self._own(target.untyped_storage())
        if self.compute(func, args, kwargs) is None:
            self._give_share(func, args, target)

    def _give_share(self, func: Any, args: Any, target: torch.Tensor) -> None:
        """Of a target too large to follow, keep how much of it is ones (a routing mask, as one_hot makes it)."""
        one = self._one_value(target)
        address = target.untyped_storage()._cdata
        self.drop(address)
        if func is _aten.scatter_.value and one is not None and one == 0 and args[3] == 1 and target.dim():
            self._shares[address] = args[2].numel() / target.numel()

    # -- reads ------------------------------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor to show the program for `tensor`: its value, or what the policy says."""
        known = self.get(tensor)
        if known is not None:
            return known
        self.assume(
            "Values that derive from floating-point data are not computed: a float read by the program is 1.0, "
            "an integer 1, a condition False, a mask true everywhere."
        )
        # An element of a mask is part of a selection; what an operator made alone is a condition.
        alone = not tensor.dim() and tensor.untyped_storage().nbytes() == tensor.element_size()
        condition = tensor.dtype is torch.bool and alone
        told = False if condition else True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1
        self.on_unknown(tensor, f"{told} for an unknown {str(tensor.dtype).removeprefix('torch.')}")
        return torch.full(tensor.shape, told, dtype=tensor.dtype)

    def selected(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the indices of the elements that `mask` selects, int64 [number, dimensions] as `nonzero` gives them.

        A mask that is not known selects every element. Indices beyond `budget.MAX_TENSOR_BYTES` are not computed: what
        is returned then is a meta tensor, which says how many there are.
        """
        known = self._uniform_mask(mask)
        known = self.get(mask) if known is None else known
        share = self._shares.get(mask.untyped_storage()._cdata)
        if known is not None:
            number = mask.numel() * bool(known) if not known.dim() else int(known.count_nonzero())
        elif share is not None:
            self.assume("Selections by masks too large to compute are spread evenly.")
            number = round(share * mask.numel())
        else:
            self.assume("A selection by a mask whose values are not known keeps every element.")
            number = mask.numel()
        if number * max(1, mask.dim()) * torch.int64.itemsize > budget.MAX_TENSOR_BYTES:
            self.assume(TOO_MANY_INDICES)
            return torch.empty(number, mask.dim(), dtype=torch.int64, device="meta")
        if known is not None:
            return known.expand(mask.shape).nonzero() if number else known.new_empty((0, mask.dim()), dtype=torch.int64)
        if share is not None:
            return unknowns.spread(mask.shape, share)
        return torch.ones(mask.shape, dtype=torch.bool).nonzero()

    def _uniform_mask(self, mask: torch.Tensor) -> torch.Tensor | None:
        """The value of all elements of a mask, without dimensions; None if it is small, or they differ."""
        return None if is_small(mask) else self._one_value(mask)
