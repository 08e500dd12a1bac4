"""A layer's tensors, operator by operator, without torch: saved tensors, and the maximum of live bytes.

Sizes are bytes for all tokens of a micro-batch. An operator saves the tensors in its derivative's formula
(tools/autograd/derivatives.yaml of PyTorch), and only if one of its inputs requires a gradient; a tensor that two
operators save counts once. The backward goes through the operators in reverse and releases their saved tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

FLOAT32 = 4


@dataclass(slots=True, eq=False)
class Tensor:
    """One tensor: `width` elements per token of `item` bytes each."""

    width: int
    item: int
    needs_grad: bool
    name: str = ""
    num_bytes: int = 0
    holders: int = 1  # The number of references: variables of the model's code, and operators that saved the tensor.
    counted: bool = True  # False: the tensor is counted elsewhere (the layer's input).
    grad: Tensor | None = None
    whole: Tensor | None = None  # The base of a view.


@dataclass(slots=True, eq=False)
class _Node:
    """One recorded operator, as a node of the backward."""

    inputs: Sequence[Tensor]
    output: Tensor
    kept: Sequence[Tensor]
    passes_through: bool = False
    param_grad: int = 0  # Bytes of parameters' gradients, which stay live.
    temporary: int = 0  # Bytes of the derivative's temporaries.
    temporary_param: int = 0  # Bytes of a half-precision gradient that is cast to float32.


@dataclass
class Tape:
    """The operators of one layer, recorded as its forward calls them."""

    tokens: int
    training: bool
    live: int = 0
    peak: int = 0
    kept: dict[str, int] = field(default_factory=dict)  # Bytes kept for the backward, by name.
    _nodes: list[_Node] = field(default_factory=list)

    def new(self, width: int, item: int, *, needs_grad: bool, name: str = "") -> Tensor:
        """Return a new tensor, and count its bytes as live."""
        made = Tensor(width, item, needs_grad and self.training, name, self.tokens * width * item)
        self.take(made.num_bytes)
        return made

    def given(self, width: int, item: int, *, needs_grad: bool, name: str) -> Tensor:
        """Return a tensor that exists before the layer, whose bytes are not counted."""
        return Tensor(width, item, needs_grad and self.training, name, self.tokens * width * item, counted=False)

    def take(self, num_bytes: int) -> None:
        """Add `num_bytes` to the live bytes."""
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def during(self, num_bytes: int) -> None:
        """Count `num_bytes` as allocated and released at once."""
        self.peak = max(self.peak, self.live + num_bytes)

    def drop(self, *tensors: Tensor) -> None:
        """Remove one reference to each tensor; tensors without references are no longer live."""
        for view in tensors:
            tensor = view.whole or view
            tensor.holders -= 1
            if tensor.holders == 0 and tensor.counted:
                self.live -= tensor.num_bytes

    def op(
        self, inputs: Sequence[Tensor], width: int, item: int, *, keeps: Iterable[Tensor] = (),
        keeps_output: bool = False, extra: int = 0, name: str = "", trains: bool = False, param_grad: int = 0,
        temporary: int = 0, temporary_param: int = 0, drops: Iterable[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        """Record an operator; return its output.

        Args:
            inputs: tensors that may get a gradient.
            width: elements per token of the output.
            item: bytes per element of the output.
            keeps: tensors that the operator saves for the backward.
            keeps_output: whether the operator saves its output too.
            extra: bytes of a further saved result (a mask, row sums).
            name: name of the output.
            trains: whether a parameter of the operator is trained.
            param_grad: bytes of the gradients of its parameters.
            temporary: bytes of the derivative's temporaries.
            temporary_param: bytes of a parameter's gradient before a cast.
            drops: tensors that the model's code drops after the operator.
        """
        needs_grad = trains or any(tensor.needs_grad for tensor in inputs)
        output = self.new(width, item, needs_grad=needs_grad, name=name)
        if not output.needs_grad:
            self.during(extra)
            self.drop(*drops)
            return output
        kept = [*keeps, *([output] if keeps_output else [])]
        for tensor in kept:
            self._keep(tensor)
        if extra:
            row = Tensor(0, 0, False, f"{name} (statistics)", extra)
            self.take(extra)
            row.holders = 0
            self._keep(row)
            kept.append(row)
        inputs = [tensor for tensor in inputs if tensor.needs_grad]
        self._nodes.append(_Node(inputs, output, kept, False, param_grad, temporary, temporary_param))
        self.drop(*drops)
        return output

    def add(self, left: Tensor, right: Tensor, name: str = "", drops: Iterable[Tensor] = ()) -> Tensor:
        """Record a sum of two tensors, which share its gradient; return the output."""
        item = max(left.item, right.item)
        output = self.new(left.width, item, needs_grad=left.needs_grad or right.needs_grad, name=name)
        if output.needs_grad:
            inputs = [t for t in (left, right) if t.needs_grad]
            self._nodes.append(_Node(inputs, output, (), passes_through=all(t.item == item for t in inputs)))
        self.drop(*drops)
        return output

    def cast(self, tensor: Tensor, item: int, name: str = "", drops: Iterable[Tensor] = ()) -> Tensor:
        """Record `tensor.to(dtype)`; return a new reference to the result, which may be `tensor` itself."""
        if tensor.item == item:
            (tensor.whole or tensor).holders += 1
            self.drop(*drops)
            return tensor
        return self.op([tensor], tensor.width, item, name=name or f"{tensor.name}, cast", drops=drops)

    def view(self, whole: Tensor, width: int, name: str) -> Tensor:
        """Record a view of a part of `whole`; return the view."""
        part = Tensor(width, whole.item, whole.needs_grad, name, 0, whole=whole)
        whole.holders += 1
        if part.needs_grad:
            self._nodes.append(_Node([whole], part, ()))
        return part

    def _keep(self, tensor: Tensor) -> None:
        tensor = tensor.whole or tensor
        tensor.holders += 1
        if tensor.counted and tensor.num_bytes:
            self.kept.setdefault(f"{tensor.name or 'unnamed'} #{id(tensor)}", tensor.num_bytes)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that are saved for the backward."""
        return sum(self.kept.values())

    def kept_by_name(self) -> dict[str, int]:
        """Return the bytes that are saved for the backward, by the names of the tensors."""
        result = Counter[str]()
        for key, num_bytes in self.kept.items():
            result[key.rpartition(" #")[0]] += num_bytes
        return result

    def backward(self, output: Tensor) -> int:
        """Run the backward from `output`, updating the live bytes; return the bytes of the parameters' gradients."""
        output.grad = Tensor(output.width, output.item, False, num_bytes=output.num_bytes or self._bytes_of(output))
        self.take(output.grad.num_bytes)
        gradients = 0
        for node in reversed(self._nodes):
            incoming = node.output.grad
            if incoming is None:
                continue
            self.during(node.temporary)
            for tensor in node.inputs:
                if node.passes_through:
                    incoming.holders += 1
                    made = incoming
                else:
                    made = Tensor(tensor.width, tensor.item, False, num_bytes=self._bytes_of(tensor))
                    self.take(made.num_bytes)
                    self.during(node.temporary)
                if tensor.grad is None:
                    tensor.grad = made
                else:
                    self.drop(made)  # added in place
            if node.param_grad:
                self.take(node.temporary_param)
                self.take(node.param_grad)
                gradients += node.param_grad
                self.live -= node.temporary_param
            self.drop(*node.kept)
            node.output.grad = None
            self.drop(incoming)
        self._nodes.clear()
        return gradients

    def _bytes_of(self, tensor: Tensor) -> int:
        return self.tokens * tensor.width * tensor.item
