"""Record of a layer's operators without torch, which yields the tensors saved for backward and the peak of live bytes.

Sizes are bytes for all tokens of a micro-batch. An operator saves the tensors in its derivative's formula
(tools/autograd/derivatives.yaml of PyTorch), and only if an input requires a gradient; a tensor that several operators
save counts once. The backward visits the operators in reverse, and releases their saved tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

FLOAT32 = 4


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor of `width` elements per token, with `itemsize` bytes each."""

    width: int
    itemsize: int
    needs_grad: bool
    name: str = ""
    num_bytes: int = 0
    num_references: int = 1  # Variables of the model's code, and operators that save the tensor.
    is_counted: bool = True  # False: the tensor is counted elsewhere (the layer's input).
    grad: Tensor | None = None
    base: Tensor | None = None  # The tensor that a view is of.


@dataclass(slots=True, eq=False)
class _Node:
    """A recorded operator: a node of the backward graph."""

    inputs: Sequence[Tensor]
    output: Tensor
    saved: Sequence[Tensor]
    shares_gradient: bool = False
    param_grad: int = 0  # Bytes of parameters' gradients, which stay live.
    temporary: int = 0  # Bytes of the derivative's temporaries.
    param_temporary_bytes: int = 0  # Bytes of a half-precision gradient that is cast to float32.


@dataclass
class Tape:
    """A record of the operators of one layer, with the bytes live and saved."""

    tokens: int
    training: bool
    live: int = 0
    peak: int = 0
    saved: dict[str, int] = field(default_factory=dict)  # Bytes saved for the backward, by name.
    _nodes: list[_Node] = field(default_factory=list)

    def allocate(self, width: int, itemsize: int, *, needs_grad: bool, name: str = "") -> Tensor:
        """Return a new tensor, and add its bytes to the live bytes."""
        made = Tensor(width, itemsize, needs_grad and self.training, name, self.tokens * width * itemsize)
        self.add_bytes(made.num_bytes)
        return made

    def add_input(self, width: int, itemsize: int, *, needs_grad: bool, name: str) -> Tensor:
        """Return an input of the layer, whose bytes are not counted."""
        return Tensor(
            width, itemsize, needs_grad and self.training, name, self.tokens * width * itemsize, is_counted=False
        )

    def add_bytes(self, num_bytes: int) -> None:
        """Add `num_bytes` to the live bytes."""
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def add_temporary(self, num_bytes: int) -> None:
        """Count `num_bytes` that are allocated and released at once."""
        self.peak = max(self.peak, self.live + num_bytes)

    def drop(self, *tensors: Tensor) -> None:
        """Remove a reference to each tensor; tensors without references are no longer live."""
        for view in tensors:
            tensor = view.base or view
            tensor.num_references -= 1
            if tensor.num_references == 0 and tensor.is_counted:
                self.live -= tensor.num_bytes

    def record(
        self, inputs: Sequence[Tensor], width: int, itemsize: int, *, saves: Iterable[Tensor] = (),
        saves_output: bool = False, extra: int = 0, name: str = "", trains: bool = False, param_grad: int = 0,
        temporary: int = 0, param_temporary_bytes: int = 0, drops: Iterable[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        """Record an operator; return the output.

        Args:
            inputs: tensors that may get a gradient.
            width: elements per token of the output.
            itemsize: bytes per element of the output.
            saves: tensors that the operator saves for the backward.
            saves_output: whether the operator saves its output too.
            extra: bytes of a further saved result (a mask, row sums).
            name: name of the output.
            trains: whether a parameter of the operator is trained.
            param_grad: bytes of the gradients of the operator's parameters.
            temporary: bytes of the derivative's temporaries.
            param_temporary_bytes: bytes of a parameter's gradient before a cast.
            drops: tensors that the model's code drops after the operator.
        """
        needs_grad = trains or any(tensor.needs_grad for tensor in inputs)
        output = self.allocate(width, itemsize, needs_grad=needs_grad, name=name)
        if not output.needs_grad:
            self.add_temporary(extra)
            self.drop(*drops)
            return output
        saved = [*saves, *([output] if saves_output else [])]
        for tensor in saved:
            self._save(tensor)
        if extra:
            row = Tensor(0, 0, False, f"{name} (statistics)", extra)
            self.add_bytes(extra)
            row.num_references = 0
            self._save(row)
            saved.append(row)
        inputs = [tensor for tensor in inputs if tensor.needs_grad]
        self._nodes.append(_Node(inputs, output, saved, False, param_grad, temporary, param_temporary_bytes))
        self.drop(*drops)
        return output

    def add(self, left: Tensor, right: Tensor, name: str = "", drops: Iterable[Tensor] = ()) -> Tensor:
        """Record a sum of two tensors, which share the output's gradient; return the output."""
        itemsize = max(left.itemsize, right.itemsize)
        output = self.allocate(left.width, itemsize, needs_grad=left.needs_grad or right.needs_grad, name=name)
        if output.needs_grad:
            inputs = [t for t in (left, right) if t.needs_grad]
            self._nodes.append(_Node(inputs, output, (), shares_gradient=all(t.itemsize == itemsize for t in inputs)))
        self.drop(*drops)
        return output

    def cast(self, tensor: Tensor, itemsize: int, name: str = "", drops: Iterable[Tensor] = ()) -> Tensor:
        """Record `tensor.to(dtype)`; return a new reference to the result, which may be `tensor` itself."""
        if tensor.itemsize == itemsize:
            (tensor.base or tensor).num_references += 1
            self.drop(*drops)
            return tensor
        return self.record([tensor], tensor.width, itemsize, name=name or f"{tensor.name}, cast", drops=drops)

    def view(self, base: Tensor, width: int, name: str) -> Tensor:
        """Record a view of `width` elements per token of `base`; return the view."""
        part = Tensor(width, base.itemsize, base.needs_grad, name, 0, base=base)
        base.num_references += 1
        if part.needs_grad:
            self._nodes.append(_Node([base], part, ()))
        return part

    def _save(self, tensor: Tensor) -> None:
        tensor = tensor.base or tensor
        tensor.num_references += 1
        if tensor.is_counted and tensor.num_bytes:
            self.saved.setdefault(f"{tensor.name or 'unnamed'} #{id(tensor)}", tensor.num_bytes)

    @property
    def saved_bytes(self) -> int:
        """Return the bytes saved for the backward."""
        return sum(self.saved.values())

    def sum_saved_by_name(self) -> dict[str, int]:
        """Return the bytes saved for the backward, by the names of the tensors."""
        result = Counter[str]()
        for key, num_bytes in self.saved.items():
            result[key.rpartition(" #")[0]] += num_bytes
        return result

    def run_backward(self, output: Tensor) -> int:
        """Run the backward from `output`, updating the live bytes; return the bytes of the parameters' gradients."""
        output.grad = Tensor(
            output.width, output.itemsize, False, num_bytes=output.num_bytes or self._tensor_bytes(output)
        )
        self.add_bytes(output.grad.num_bytes)
        gradients = 0
        for node in reversed(self._nodes):
            incoming = node.output.grad
            if incoming is None:
                continue
            self.add_temporary(node.temporary)
            for tensor in node.inputs:
                if node.shares_gradient:
                    incoming.num_references += 1
                    made = incoming
                else:
                    made = Tensor(tensor.width, tensor.itemsize, False, num_bytes=self._tensor_bytes(tensor))
                    self.add_bytes(made.num_bytes)
                    self.add_temporary(node.temporary)
                if tensor.grad is None:
                    tensor.grad = made
                else:
                    self.drop(made)  # added in place
            if node.param_grad:
                self.add_bytes(node.param_temporary_bytes)
                self.add_bytes(node.param_grad)
                gradients += node.param_grad
                self.live -= node.param_temporary_bytes
            self.drop(*node.saved)
            node.output.grad = None
            self.drop(incoming)
        self._nodes.clear()
        return gradients

    def _tensor_bytes(self, tensor: Tensor) -> int:
        return self.tokens * tensor.width * tensor.itemsize
