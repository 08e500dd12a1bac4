"""NPT components in a model: each is added to an MLP and reads its layer's attention output; the rest is frozen."""

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
    """Input projection of an MLP, h W, plus a weight delta computed for each token by an NPT component: h W + h ΔW."""

    def __init__(self, base: nn.Module, component: NptComponent, attention: Callable[[], Tensor]) -> None:
        super().__init__()
        self.base = base
        self.npt = component
        self._attention = attention

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden` [..., d_model] projected to [..., d_ffn]."""
        return self.base(hidden) + self.npt(hidden, self._attention())

    @property
    def weight(self) -> Tensor:
        """Return the frozen weight W, because some models read its dtype."""
        return self.base.weight  # type: ignore[return-value]


class _AttentionOutput:
    """Callable that returns the latest output of an attention module, once, so that its memory is freed early."""

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
    """Freeze `model`, add an NPT component to the MLP of each layer in `spec.npt_layers`, and return projection paths.

    The projection is the gate of a gated MLP, or else the first from d_model to more features. Raises UsageError, and
    leaves the model unchanged, if the layers do not exist, or have no attention or no such projection.
    """
    path, layers = _find_stack(model)
    indices = range(len(layers)) if spec.npt_layers is None else parse_layers(spec.npt_layers, len(layers))
    projections = [_find_projection(layers[index], f"{path}.{index}") for index in indices]
    model.requires_grad_(False)
    names = []
    for index, (attention, owner, name) in zip(indices, projections, strict=True):
        base = getattr(owner, name)
        dtype = base.weight.dtype
        if not dtype.is_floating_point or dtype.itemsize == 1:  # quantized: its products are in the model's
            dtype = getattr(model, "dtype", dtype)
        component = make_component(spec, *_get_dimensions(base), dtype=dtype, device=base.weight.device)
        setattr(owner, name, NptProjection(base, component, _AttentionOutput(attention)))
        names += [f"{path}.{index}.{child}" for child, module in layers[index].named_modules() if module is component]
    return [child_path.removesuffix(".npt") for child_path in names]


def make_component(spec: TargetSpec, d_model: int, d_ffn: int, **options: Any) -> NptComponent:
    """Return the NPT component that `spec` describes for a weight [d_model x d_ffn]; `options`: dtype and device."""
    assert spec.npt is not None and spec.npt_rank is not None and spec.npt_init is not None
    assert spec.npt_chunk is not None
    shared_options = {"mode": spec.npt, "chunk": spec.npt_chunk, "init": spec.npt_init, **options}
    if spec.npt_num_ranks is None:
        return ModulatedDelta(d_model, d_ffn, spec.npt_rank, **shared_options)
    assert spec.npt_combine is not None
    return RankOneDeltas(d_model, d_ffn, spec.npt_rank, spec.npt_num_ranks, combine=spec.npt_combine, **shared_options)


def _find_stack(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return path and layers of the ModuleList whose modules all have attention; UsageError unless there is one."""
    stacks: list[tuple[str, list[nn.Module]]] = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module):
            # Named modules of each, but not those of the list itself: a list of attentions is no stack of layers.
            layers = list(module)
            if all(_find_attention(layer) is not None for layer in layers) and not any(
                path.startswith(f"{stack_path}.") for stack_path, _ in stacks
            ):
                stacks.append((path, layers))
    if not stacks:
        raise UsageError("--npt needs a stack of layers with attention", value=type(model).__name__)
    if len(stacks) > 1:
        raise UsageError(
            "--npt does not know which stack of layers is meant", value=", ".join(path for path, _ in stacks)
        )
    return stacks[0]


def _find_projection(layer: nn.Module, path: str) -> tuple[nn.Module, nn.Module, str]:
    """Return a layer's attention, the parent of its MLP's input projection, and the projection's name in that parent.
    Raises UsageError, which shows `path`, if there is no such projection."""
    attention = _find_attention(layer)
    assert attention is not None
    candidates: list[tuple[str, nn.Module, str]] = []
    attention_modules = {id(module) for module in attention.modules()}
    for owner_path, owner in layer.named_modules():
        for name, child in owner.named_children():
            if id(child) in attention_modules or _EXPERTS.search(owner_path) or _EXPERTS.search(type(owner).__name__):
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
    """Return (input features, output features) of a linear layer; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    # transformers' layer for GPT-2, whose weight is [inputs x outputs].
    if type(module).__name__ == "Conv1D" and hasattr(module, "nx"):
        return tuple(module.weight.shape)  # type: ignore[arg-type]
    return None
