"""Memory formats of cuDNN for convolutions of fake GPU tensors.

Tracing queries C++ for the convolution backend and the memory format of the result. A CPU build of torch has no cuDNN:
Inductor would expect contiguous results of channels-last images, and check the strides in generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.torch_private import dynamo
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels.convolution import choose_cudnn_layout, is_depthwise, is_output_padding_big, uses_cudnn

_CUDNN_BACKENDS = ("Cudnn", "CudnnTranspose")


def patches(gpu: DeviceProperties) -> Iterator[tuple[Any, str, Any]]:
    """Yield patches (owner, name, replacement) of the functions that choose backend and memory format."""
    select_backend, determine_format = dynamo.select_conv_backend, dynamo.conv_determine_backend_memory_format
    if select_backend.exists() and determine_format.exists():  # called by torch/_subclasses/fake_impls.py, `conv`
        yield select_backend.patch(_wrap_select_backend(gpu, select_backend.get()))
        yield determine_format.patch(_wrap_determine_format(determine_format.get()))


def _wrap_select_backend(gpu: DeviceProperties, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `_select_conv_backend` (native/Convolution.cpp) that leads to the right memory format."""
    backends = dynamo.ConvBackend.get()

    def select_backend(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(("input", "weight"), args, strict=False)) | kwargs  # releases differ in keywords
        data, weight = arguments["input"], arguments["weight"]
        if data.device.type != "cuda":
            return original(*args, **kwargs)
        is_transposed = arguments["transposed"]
        is_too_big = is_transposed and is_output_padding_big(arguments["stride"], arguments["output_padding"])
        if not uses_cudnn(gpu, data, weight, is_too_big):
            return backends.Slow2d
        is_depthwise_conv = is_depthwise(data, weight, is_transposed, arguments["groups"])
        if is_depthwise_conv and _find_cudnn_format(data, weight) is torch.contiguous_format:
            return backends.CudaDepthwise2d
        return backends.CudnnTranspose if is_transposed else backends.Cudnn

    return select_backend


def _wrap_determine_format(original: Callable[..., Any]) -> Callable[..., Any]:
    def determine_format(data: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        if data.device.type != "cuda":
            return original(data, weight, backend)
        return _find_cudnn_format(data, weight) if backend.name in _CUDNN_BACKENDS else torch.contiguous_format

    return determine_format


def _find_cudnn_format(data: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    return choose_cudnn_layout(data, weight, dynamo.suggest_memory_format.get())
