"""Installation of NPT components into a model: placed in layers, given the layer's attention output, trained alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from memprof.errors import UsageError
from memprof.spec import TargetSpec, parse_layers
from memprof.workload.npt import ModulatedDelta, NptComponent, RankOneDeltas

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_NOT_ATTENTION = re.compile(r"norm|dropout|(^|_)ln(_|$)", re.IGNORECASE)
_EXPERTS = re.compile(r"expert|router|(^|\.)moe|block_sparse", re.IGNORECASE)


class NptProjection(nn.Module):
    """Input projection of an MLP with an added component: h W + h ΔW."""

    def __init__(self, base: nn.Module, component: NptComponent, attention: Callable[[], Tensor]) -> None:
        super().__init__()
        self.base = base
        self.npt = component
        self._attention = attention

    def forward(self, hidden: Tensor) -> Tensor:
        """Project [..., d_model] to [..., d_ffn]."""
        return self.base(hidden) + self.npt(hidden, self._attention())

    @property
    def weight(self) -> Tensor:
        """Return the frozen weight: some models look at its dtype."""
        return self.base.weight  # type: ignore[return-value]


class _AttentionOutput:
    """Last output of a layer's attention; returned once and released, to live no longer than needed."""

    def __init__(self, attention: nn.Module) -> None:
        self._output: Tensor | None = None
        attention.register_forward_hook(self._save_output)

    def _save_output(self, module: nn.Module, arguments: object, output: Any) -> None:
        self._output = output[0] if isinstance(output, (tuple, list)) else output

    def __call__(self) -> Tensor:
        output, self._output = self._output, None
        if output is None:
            raise RuntimeError("an NPT layer's MLP was called before its attention")
        return output


def add_npt(model: nn.Module, spec: TargetSpec) -> list[str]:
    """Freeze `model` and put a component into the layers that `spec` names; returns the paths of the projections.

    The rest of the layer stays as it is (the attention's output is added to the residual as before). The projection is
    the gate of a gated MLP, or else the first that leads from d_model to more features. Nothing is changed if it raises
    UsageError: the model has no such layers, or not the ones that were named.
    """
    path, layers = _find_stack(model)
    numbers = range(len(layers)) if spec.npt_layers is None else parse_layers(spec.npt_layers, len(layers))
    places = [_find_projection(layers[number], f"{path}.{number}") for number in numbers]
    model.requires_grad_(False)
    names = []
    for number, (attention, owner, name) in zip(numbers, places, strict=True):
        base = getattr(owner, name)
        dtype = base.weight.dtype
        if not dtype.is_floating_point or dtype.itemsize == 1:  # quantized: its products are in the model's
            dtype = getattr(model, "dtype", dtype)
        component = make_component(spec, *_get_dimensions(base), dtype=dtype, device=base.weight.device)
        setattr(owner, name, NptProjection(base, component, _AttentionOutput(attention)))
        names += [f"{path}.{number}.{child}" for child, module in layers[number].named_modules() if module is component]
    return [found.removesuffix(".npt") for found in names]


def make_component(spec: TargetSpec, d_model: int, d_ffn: int, **options: Any) -> NptComponent:
    """Return the component that `spec` describes for a weight [d_model x d_ffn]; `options`: its dtype and device."""
    assert spec.npt is not None and spec.npt_rank is not None and spec.npt_init is not None
    assert spec.npt_chunk is not None
    common = {"mode": spec.npt, "chunk": spec.npt_chunk, "init": spec.npt_init, **options}
    if spec.npt_num_ranks is None:
        return ModulatedDelta(d_model, d_ffn, spec.npt_rank, **common)
    assert spec.npt_combine is not None
    return RankOneDeltas(d_model, d_ffn, spec.npt_rank, spec.npt_num_ranks, combine=spec.npt_combine, **common)


def _find_stack(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the list of layers that have attention, and its path."""
    found: list[tuple[str, list[nn.Module]]] = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module):
            # Named modules of each, but not those of the list itself: a list of attentions is no stack of layers.
            layers = list(module)
            if all(_find_attention(layer) is not None for layer in layers) and not any(
                path.startswith(f"{other}.") for other, _ in found
            ):
                found.append((path, layers))
    if not found:
        raise UsageError("--npt needs a stack of layers with attention", value=type(model).__name__)
    if len(found) > 1:
        raise UsageError(
            "--npt does not know which stack of layers is meant", value=", ".join(path for path, _ in found)
        )
    return found[0]


def _find_projection(layer: nn.Module, path: str) -> tuple[nn.Module, nn.Module, str]:
    """Return the attention of a layer, and the module that has the MLP's input projection, and its name there."""
    attention = _find_attention(layer)
    assert attention is not None
    candidates: list[tuple[str, nn.Module, str]] = []
    inside = {id(module) for module in attention.modules()}
    for owner_path, owner in layer.named_modules():
        for name, child in owner.named_children():
            if id(child) in inside or _EXPERTS.search(owner_path) or _EXPERTS.search(type(owner).__name__):
                continue
            dimensions = _get_dimensions(child)
            if dimensions is not None and dimensions[1] > dimensions[0]:
                candidates.append((f"{owner_path}.{name}", owner, name))
    if not candidates:
        hint = "it needs a linear layer from d_model to d_ffn; experts have none for all tokens"
        raise UsageError("--npt finds no MLP to change in a layer", value=f"{path} ({type(layer).__name__})", hint=hint)
    _, owner, name = next((c for c in candidates if "gate" in c[2]), candidates[0])
    return attention, owner, name


def _find_attention(layer: nn.Module) -> nn.Module | None:
    for path, module in layer.named_modules():
        name = path.rpartition(".")[2]
        if _ATTENTION.search(name) and not _NOT_ATTENTION.search(name) and any(True for _ in module.parameters()):
            return module
    return None


def _get_dimensions(module: nn.Module) -> Any:
    """Return (inputs, outputs) of a linear layer; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    # transformers' layer for GPT-2, whose weight is [inputs x outputs].
    if type(module).__name__ == "Conv1D" and hasattr(module, "nx"):
        return tuple(module.weight.shape)  # type: ignore[arg-type]
    return None
