"""The tensors of a decoder layer, operator by operator, without torch: saved tensors, and the maximum of live bytes.

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
    grad_bytes: int = 0  # Bytes of parameters' gradients, which stay live.
    temp_bytes: int = 0  # Bytes of the derivative's temporaries.
    param_temp_bytes: int = 0  # Bytes of a half-precision gradient that is cast to float32.


@dataclass
class Tape:
    """A record of the operators of one decoder layer, with the bytes of live and of saved tensors."""

    tokens: int
    training: bool
    live: int = 0
    peak: int = 0
    saved: dict[str, int] = field(default_factory=dict)  # Bytes saved for the backward, by name.
    kept: dict[Tensor, int] = field(default_factory=dict)  # Bytes that checkpointing does not drop, by tensor.
    _nodes: list[_Node] = field(default_factory=list)

    def allocate(self, width: int, itemsize: int, *, needs_grad: bool, name: str = "") -> Tensor:
        """Return a new tensor of `width` elements per token, and add its bytes to the live bytes."""
        tensor = Tensor(width, itemsize, needs_grad and self.training, name, self.tokens * width * itemsize)
        self.add_bytes(tensor.num_bytes)
        return tensor

    def add_input(self, width: int, itemsize: int, *, needs_grad: bool, name: str) -> Tensor:
        """Return an input of the layer, whose bytes do not count as live or saved."""
        return Tensor(
            width, itemsize, needs_grad and self.training, name, self.tokens * width * itemsize, is_counted=False
        )

    def add_bytes(self, num_bytes: int) -> None:
        """Add `num_bytes` to the live bytes."""
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def add_temporary(self, num_bytes: int) -> None:
        """Raise the peak as if `num_bytes` were allocated now and freed immediately."""
        self.peak = max(self.peak, self.live + num_bytes)

    def drop(self, *tensors: Tensor) -> None:
        """Remove one reference from each tensor; tensors without references are no longer live."""
        for view in tensors:
            tensor = view.base or view
            tensor.num_references -= 1
            if tensor.num_references == 0 and tensor.is_counted:
                self.live -= tensor.num_bytes

    def record(
        self, inputs: Sequence[Tensor], width: int, itemsize: int, *, saves: Iterable[Tensor] = (),
        saves_output: bool = False, extra_bytes: int = 0, name: str = "", trains: bool = False, grad_bytes: int = 0,
        temp_bytes: int = 0, param_temp_bytes: int = 0, drops: Iterable[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        """Record an operator; return its output, of `width` elements per token.

        Args:
            inputs: tensors that may need a gradient.
            saves: tensors that the operator saves for the backward.
            saves_output: whether the operator saves its output too.
            extra_bytes: bytes of another saved tensor (a mask, row sums).
            name: name of the output.
            trains: whether a parameter of the operator is trained.
            grad_bytes: bytes of the gradients of the operator's parameters.
            temp_bytes: bytes of temporaries in the backward.
            param_temp_bytes: bytes of a parameter's gradient before it is cast.
            drops: tensors that the model's code drops after the operator.
        """
        needs_grad = trains or any(tensor.needs_grad for tensor in inputs)
        output = self.allocate(width, itemsize, needs_grad=needs_grad, name=name)
        if not output.needs_grad:
            self.add_temporary(extra_bytes)
            self.drop(*drops)
            return output
        saved = [*saves, *([output] if saves_output else [])]
        for tensor in saved:
            self._save(tensor)
        if extra_bytes:
            statistics = Tensor(0, 0, False, f"{name} (statistics)", extra_bytes)
            self.add_bytes(extra_bytes)
            statistics.num_references = 0
            self._save(statistics)
            saved.append(statistics)
        inputs = [tensor for tensor in inputs if tensor.needs_grad]
        self._nodes.append(_Node(inputs, output, saved, False, grad_bytes, temp_bytes, param_temp_bytes))
        self.drop(*drops)
        return output

    def add(self, left: Tensor, right: Tensor, name: str = "", drops: Iterable[Tensor] = ()) -> Tensor:
        """Record the sum of two tensors, for both of which the output's gradient is the gradient; return the sum."""
        itemsize = max(left.itemsize, right.itemsize)
        output = self.allocate(left.width, itemsize, needs_grad=left.needs_grad or right.needs_grad, name=name)
        if output.needs_grad:
            inputs = [t for t in (left, right) if t.needs_grad]
            self._nodes.append(_Node(inputs, output, (), shares_gradient=all(t.itemsize == itemsize for t in inputs)))
        self.drop(*drops)
        return output

    def cast(self, tensor: Tensor, itemsize: int, name: str = "", drops: Iterable[Tensor] = ()) -> Tensor:
        """Record a cast of `tensor` to `itemsize` bytes per element; return the result, which may be `tensor`."""
        if tensor.itemsize == itemsize:
            (tensor.base or tensor).num_references += 1
            self.drop(*drops)
            return tensor
        return self.record([tensor], tensor.width, itemsize, name=name, drops=drops)

    def view(self, base: Tensor, width: int, name: str) -> Tensor:
        """Record a view of `base` with `width` elements per token; return the view."""
        result = Tensor(width, base.itemsize, base.needs_grad, name, 0, base=base)
        base.num_references += 1
        if result.needs_grad:
            self._nodes.append(_Node([base], result, ()))
        return result

    def _save(self, tensor: Tensor) -> None:
        tensor = tensor.base or tensor
        tensor.num_references += 1
        if tensor.is_counted and tensor.num_bytes:
            self.saved.setdefault(f"{tensor.name or 'unnamed'} #{id(tensor)}", tensor.num_bytes)

    def keep(self, tensor: Tensor) -> None:
        """Record that a custom function keeps `tensor` as an attribute of its context: checkpointing, which replaces
        what `save_for_backward` gets, does not drop it."""
        tensor = tensor.base or tensor
        if tensor.needs_grad and tensor.is_counted:
            self.kept[tensor] = tensor.num_bytes

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of all tensors that checkpointing does not drop."""
        return sum(self.kept.values())

    @property
    def saved_bytes(self) -> int:
        """Return the bytes of all tensors saved for the backward."""
        return sum(self.saved.values())

    def sum_saved_by_name(self) -> dict[str, int]:
        """Return the bytes saved for the backward, summed by tensor name."""
        bytes_by_name = Counter[str]()
        for key, num_bytes in self.saved.items():
            bytes_by_name[key.rpartition(" #")[0]] += num_bytes
        return bytes_by_name

    def run_backward(self, output: Tensor) -> int:
        """Update live and peak bytes by a backward from `output`; return the bytes of the parameters' gradients."""
        output.grad = Tensor(
            output.width, output.itemsize, False, num_bytes=output.num_bytes or self._tensor_bytes(output)
        )
        self.add_bytes(output.grad.num_bytes)
        param_bytes = 0
        for node in reversed(self._nodes):
            output_grad = node.output.grad
            if output_grad is None:
                continue
            self.add_temporary(node.temp_bytes)
            for tensor in node.inputs:
                if node.shares_gradient:
                    output_grad.num_references += 1
                    grad = output_grad
                else:
                    grad = Tensor(tensor.width, tensor.itemsize, False, num_bytes=self._tensor_bytes(tensor))
                    self.add_bytes(grad.num_bytes)
                    self.add_temporary(node.temp_bytes)
                if tensor.grad is None:
                    tensor.grad = grad
                else:
                    self.drop(grad)  # added in place
            if node.grad_bytes:
                self.add_bytes(node.param_temp_bytes)
                self.add_bytes(node.grad_bytes)
                param_bytes += node.grad_bytes
                self.live -= node.param_temp_bytes
            self.drop(*node.saved)
            node.output.grad = None
            self.drop(output_grad)
        return param_bytes

    def _tensor_bytes(self, tensor: Tensor) -> int:
        return self.tokens * tensor.width * tensor.itemsize
