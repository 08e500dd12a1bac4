"""Convolutions of fake tensors of the GPU, in the layouts that cuDNN gives them.

What is traced asks C++ which kernels will run, and in which layout. A build for the CPU has no cuDNN to say; Inductor
would expect contiguous results where it has given channels-last images, and check them in the code that it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.torch_private import dynamo
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels.convolution import cudnn_format, is_depthwise, padding_too_big, uses_cudnn

_CUDNN = ("Cudnn", "CudnnTranspose")


def patches(gpu: DeviceProperties) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, replacement) by which the GPU says what it runs."""
    select, determine = dynamo.select_conv_backend, dynamo.conv_determine_backend_memory_format
    if select.exists() and determine.exists():  # torch/_subclasses/fake_impls.py, `conv`, asks them
        yield select.patch(_selecting(gpu, select.get()))
        yield determine.patch(_in_layout_of(determine.get()))


def _selecting(gpu: DeviceProperties, of_host: Callable[..., Any]) -> Callable[..., Any]:
    """native/Convolution.cpp, `_select_conv_backend`, as far as layouts go."""
    backends = dynamo.ConvBackend.get()

    def select(*args: Any, **named: Any) -> Any:
        rest = dict(zip(("input", "weight"), args, strict=False)) | named  # releases differ in which have names
        data, weight = rest["input"], rest["weight"]
        if data.device.type != "cuda":
            return of_host(*args, **named)
        transposed = rest["transposed"]
        too_big = transposed and padding_too_big(rest["stride"], rest["output_padding"])
        if not uses_cudnn(gpu, data, weight, too_big):
            return backends.Slow2d
        if is_depthwise(data, weight, transposed, rest["groups"]) and _layout(data, weight) is torch.contiguous_format:
            return backends.CudaDepthwise2d
        return backends.CudnnTranspose if transposed else backends.Cudnn

    return select


def _in_layout_of(of_host: Callable[..., Any]) -> Callable[..., Any]:
    def determine(data: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        if data.device.type != "cuda":
            return of_host(data, weight, backend)
        return _layout(data, weight) if backend.name in _CUDNN else torch.contiguous_format

    return determine


def _layout(data: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    return cudnn_format(data, weight, dynamo.suggest_memory_format.get())
