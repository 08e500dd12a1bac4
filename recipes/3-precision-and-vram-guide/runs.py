"""The guide's analysis as a loop over samples, on a virtual GPU; and its model with int8 weights."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn.functional import linear

import memprof
from memprof.api import ProfiledGpu
from memprof.flows.profile import profile
from memprof.spec import TargetSpec
from memprof.workload.models import find_source


class Int8Linear(nn.Module):
    """Weights of one byte and a scale for each row; a forward makes the matrix in the input's dtype and drops it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty_like(layer.weight, dtype=torch.int8))
        self.register_buffer("scale", torch.empty_like(layer.weight[:, :1]))
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the linear layer."""
        return linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def build(spec: TargetSpec, int8: bool = False) -> nn.Module:
    """The model of `spec` on the current virtual GPU, for inference.

    Args:
        spec: model and dtype.
        int8: whether the layers' matrices are int8; embedding and head stay, as bitsandbytes leaves them.
    """
    model = find_source(spec).build()
    if int8:
        layers = model.get_submodule("model.layers")
        for name, module in list(layers.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, last = name.rpartition(".")
                setattr(layers.get_submodule(parent), last, Int8Linear(module))
    return model.to("cuda").eval()


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and of int8 weights with their scales."""
    quantized = [m for m in model.modules() if isinstance(m, Int8Linear)]
    return sum(p.nbytes for p in model.parameters()) + sum(m.weight.nbytes + m.scale.nbytes for m in quantized)


@torch.no_grad()
def analysis(
    spec: TargetSpec,
    samples: int,
    *,
    keep: tuple[int, ...] = (),
    keep_on: str = "cuda",
    empty_cache: bool = False,
    lengths: tuple[int, ...] = (),
    int8: bool = False,
    **options: object,
) -> ProfiledGpu:
    """Forwards over `samples` samples in batches.

    Args:
        spec: model, dtype, batch, tokens and GPU.
        samples: how many.
        keep: layers whose outputs are kept for all samples.
        keep_on: where they are kept.
        empty_cache: whether torch.cuda.empty_cache() is called before each batch.
        lengths: tokens of the batches in turn, instead of `spec`'s.
        int8: see `build`.
        options: of the model's forward.
    """
    with memprof.virtual_gpu(spec.gpu, alloc_conf=spec.alloc_conf) as gpu:
        model = build(spec, int8)
        kept: list[torch.Tensor] = []
        for number in keep:
            model.get_submodule(f"model.layers.{number}").register_forward_hook(
                lambda module, args, output: kept.append(output.to(keep_on))
            )
        tokens = itertools.cycle(lengths or (spec.context_length,))
        for start in range(0, samples, spec.batch_size):
            if empty_cache:
                torch.cuda.empty_cache()
            ids = torch.zeros(min(spec.batch_size, samples - start), next(tokens), dtype=torch.int64, device="cuda")
            model(input_ids=ids, **options)
    return gpu


def largest_batch(spec: TargetSpec, most: int = 128) -> int:
    """The largest of `spec`'s batch, twice that, and so on up to `most` that fits the GPU, if the first does."""
    batch = spec.batch_size
    while 2 * batch <= most and fits(spec.edit(batch_size=2 * batch)):
        batch *= 2
    return batch


def fits(spec: TargetSpec) -> bool:
    """Whether `spec` fits its GPU."""
    return profile(spec)[1].verdict.fits is True
