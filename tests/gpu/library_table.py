"""Operators whose memory a library of CUDA chooses by rules that are not published, over many shapes.

`operators(device)` is a table like that of operator_table.py: convolutions (cuDNN), recurrent layers (cuDNN),
factorisations (cuSOLVER), Fourier transforms (cuFFT) and sparse matrices (cuSPARSE).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.gpu.operator_table import Call, Named, Prepare, differentiated


class Convolution(NamedTuple):
    """One shape of a convolution, as a network has it."""

    batch: int
    channels: int
    filters: int
    size: tuple[int, ...]  # of the images, the signal or the volume
    kernel: int
    stride: int = 1
    groups: int = 1
    transposed: bool = False
    dilation: int = 1

    def __str__(self) -> str:
        size = "x".join(map(str, self.size))
        extra = f" stride {self.stride}" * (self.stride > 1) + f" groups {self.groups}" * (self.groups > 1)
        extra += f" dilation {self.dilation}" * (self.dilation > 1)
        kind = "conv_transpose" if self.transposed else "conv"
        return (
            f"{kind}{len(self.size)}d {self.batch}x{self.channels}->{self.filters} {size} kernel {self.kernel}{extra}"
        )

    def inputs(self, device: str, dtype: torch.dtype, *, channels_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the data and the weight."""
        ends = (self.channels, self.filters // self.groups)
        if not self.transposed:
            ends = (self.filters, self.channels // self.groups)
        data = torch.randn(self.batch, self.channels, *self.size, device=device, dtype=dtype)
        weight = torch.randn(*ends, *[self.kernel] * len(self.size), device=device, dtype=dtype)
        if channels_last:
            layout = torch.channels_last if len(self.size) == 2 else torch.channels_last_3d
            data, weight = data.to(memory_format=layout), weight.to(memory_format=layout)
        return data.requires_grad_(), weight.requires_grad_()

    def call(self, data: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Convolve; the result has the size of the data, divided by the stride."""
        function = getattr(functional, f"conv{'_transpose' * self.transposed}{len(self.size)}d")
        options: dict[str, Any] = {"stride": self.stride, "groups": self.groups, "dilation": self.dilation}
        patches = self.kernel == self.stride and not self.transposed
        padding = 0 if patches else self.dilation * (self.kernel - 1) // 2
        result: torch.Tensor = function(data, weight, padding=padding, **options)
        return result


def _images(batch: int, *rows: tuple[int, ...]) -> list[Convolution]:
    """Two-dimensional ones of square images, each (channels, filters, size, kernel, stride, groups)."""
    return [Convolution(batch, row[0], row[1], (row[2], row[2]), *row[3:]) for row in rows]


RESNET = _images(
    32, (3, 64, 224, 7, 2), (64, 64, 56, 1), (64, 64, 56, 3), (64, 256, 56, 1), (256, 64, 56, 1), (256, 128, 56, 1),
    (128, 128, 56, 3, 2), (256, 512, 56, 1, 2), (128, 512, 28, 1), (512, 128, 28, 1), (128, 128, 28, 3),
    (256, 256, 14, 3), (256, 1024, 14, 1), (1024, 256, 14, 1), (512, 1024, 28, 1, 2), (256, 256, 28, 3, 2),
    (512, 512, 7, 3), (512, 2048, 7, 1), (2048, 512, 7, 1),
)  # fmt: skip
NETWORKS = [
    *RESNET,
    # Small images: classifiers of CIFAR and MNIST, and generators.
    *_images(128, (3, 64, 32, 3), (64, 128, 16, 3, 2), (128, 256, 8, 3, 2), (1, 32, 28, 3), (32, 64, 26, 3)),
    *_images(64, (1, 6, 28, 5), (6, 16, 14, 5)),
    *_images(16, (3, 64, 224, 3), (64, 128, 112, 3), (256, 256, 56, 3), (512, 512, 28, 3), (512, 512, 14, 3)),  # VGG
    # Diffusion: U-Nets of latents, decoders of images.
    *_images(4, (4, 320, 64, 3), (320, 320, 64, 3), (320, 640, 32, 3), (640, 640, 32, 3), (1280, 1280, 16, 3)),
    *_images(2, (320, 320, 64, 3, 2), (2560, 1280, 16, 3), (1920, 640, 32, 3), (960, 320, 64, 1), (320, 4, 64, 3)),
    *_images(1, (512, 512, 64, 3), (256, 256, 256, 3), (128, 128, 512, 3), (128, 3, 512, 3), (512, 256, 128, 1)),
    # Patches, ConvNeXt, EfficientNet, ResNeXt, segmentation.
    *_images(16, (3, 768, 224, 16, 16), (3, 1024, 224, 14, 14), (3, 96, 224, 4, 4), (96, 192, 56, 2, 2)),
    *_images(8, (96, 96, 56, 7, 1, 96), (144, 144, 56, 3, 2, 144), (128, 128, 56, 3, 1, 32), (256, 256, 28, 3, 1, 32)),
    *_images(4, (64, 64, 128, 3), (64, 2, 256, 1), (128, 64, 256, 3), (96, 48, 100, 5), (33, 65, 50, 3)),
    *_images(2, (24, 24, 96, 3), (16, 16, 256, 3)),
    Convolution(4, 256, 256, (65, 65), 3, dilation=2),
    Convolution(4, 2048, 256, (33, 33), 3, dilation=12),
    Convolution(128, 100, 512, (1, 1), 4, transposed=True),
    Convolution(64, 512, 256, (8, 8), 4, 2, transposed=True),
    Convolution(64, 128, 64, (32, 32), 4, 2, transposed=True),
    Convolution(4, 128, 64, (128, 128), 2, 2, transposed=True),
    # Sound.
    Convolution(8, 80, 384, (3000,), 3),
    Convolution(8, 384, 384, (3000,), 3, 2),
    Convolution(4, 512, 512, (8000,), 3, 2),
    Convolution(4, 1, 512, (80000,), 10, 5),
    Convolution(4, 256, 256, (4096,), 7),
    Convolution(4, 256, 128, (1024,), 16, 8, transposed=True),
    Convolution(8, 1024, 1024, (500,), 31, groups=1024),
    # Volumes and video.
    Convolution(2, 1, 32, (64, 64, 64), 3),
    Convolution(2, 32, 64, (32, 32, 32), 3),
    Convolution(2, 64, 64, (16, 56, 56), 3),
    Convolution(1, 128, 128, (8, 64, 64), 3),
    Convolution(1, 3, 1152, (16, 32, 32), 2, 2),
]  # fmt: skip
_LAYOUTS = (False, True)


def convolutions(device: str) -> Named:
    """Convolve and differentiate, in both layouts; float16 chooses as bfloat16 does, which a few confirm."""
    dtypes = (torch.float32, torch.bfloat16)
    for convolution, dtype, last in itertools.product(NETWORKS, dtypes, _LAYOUTS):
        if not (last and len(convolution.size) == 1):
            yield _convolution(convolution, device, dtype, last)
    for convolution in RESNET[::4]:
        yield _convolution(convolution, device, torch.float16, False)


def _convolution(convolution: Convolution, device: str, dtype: torch.dtype, last: bool) -> tuple[str, Prepare]:
    make = functools.partial(convolution.inputs, device, dtype, channels_last=last)
    order = " channels last" if last else ""
    return f"{convolution}{order} {_name(dtype)}", differentiated(make, convolution.call)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Recurrence(NamedTuple):
    steps: int
    batch: int
    features: int
    hidden: int
    layers: int = 1
    bidirectional: bool = False
    dropout: float = 0.0

    def __str__(self) -> str:
        extra = " bidirectional" * self.bidirectional + " dropout" * (self.dropout > 0)
        return f"{self.steps} steps of {self.batch}x{self.features}, {self.layers} layers of {self.hidden}{extra}"


RECURRENCES = [
    Recurrence(16, 4, 64, 64), Recurrence(35, 20, 200, 200, 2), Recurrence(35, 20, 650, 650, 2, False, 0.5),
    Recurrence(128, 16, 256, 512, 2), Recurrence(128, 16, 512, 512, 1), Recurrence(128, 16, 512, 512, 3),
    Recurrence(64, 16, 256, 512, 2), Recurrence(128, 64, 256, 512, 2), Recurrence(128, 16, 256, 1024, 2),
    Recurrence(100, 32, 300, 256, 2, True), Recurrence(500, 8, 80, 320, 4, True), Recurrence(1, 64, 512, 512, 2),
    Recurrence(1000, 1, 32, 128, 1), Recurrence(10, 512, 16, 64, 2), Recurrence(50, 128, 100, 33, 1),
    Recurrence(256, 32, 1024, 2048, 1), Recurrence(24, 256, 7, 128, 2, False, 0.2), Recurrence(64, 64, 512, 768, 6),
]  # fmt: skip


def recurrences(device: str) -> Named:
    """Run recurrent layers and differentiate."""

    def prepare(kind: type[nn.RNNBase], shape: Recurrence, dtype: torch.dtype, training: bool) -> Call:
        options = {"bidirectional": shape.bidirectional, "dropout": shape.dropout}
        layer = kind(shape.features, shape.hidden, shape.layers, **options, device=device, dtype=dtype)
        states = torch.randn(shape.steps, shape.batch, shape.features, device=device, dtype=dtype)

        def call() -> None:
            layer(states)[0].sum().backward()

        def infer() -> None:
            with torch.no_grad():
                layer.eval()(states)

        return call if training else infer

    for kind, shape in itertools.product((nn.LSTM, nn.GRU, nn.RNN), RECURRENCES):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{kind.__name__} {shape} {_name(dtype)}"
            yield name, functools.partial(prepare, kind, shape, dtype, True)
        yield f"{kind.__name__} {shape} inference", functools.partial(prepare, kind, shape, torch.float32, False)
    yield from _variants(device)


_PLAIN = [Recurrence(20, 8, 96, 160), Recurrence(20, 8, 96, 160, 2, True, 0.3), Recurrence(20, 8, 96, 320, 2)]
_VARIANTS: dict[str, dict[str, Any]] = {
    "no bias": {"bias": False}, "batch first": {"batch_first": True}, "projected": {"proj_size": 24},
}  # fmt: skip


def _variants(device: str) -> Named:
    """Run layers in float16, in which cuDNN's persistent algorithms run too, and layers with other options."""

    def prepare(kind: type[nn.RNNBase], shape: Recurrence, dtype: torch.dtype, variant: str) -> Call:
        options = {"bidirectional": shape.bidirectional, "dropout": shape.dropout, **_VARIANTS.get(variant, {})}
        layer = kind(shape.features, shape.hidden, shape.layers, **options, device=device, dtype=dtype)
        ends = (shape.batch, shape.steps) if variant == "batch first" else (shape.steps, shape.batch)
        data = torch.randn(*ends, shape.features, device=device, dtype=dtype, requires_grad=True)

        def call() -> None:
            layer(data)[0].sum().backward()

        def infer() -> None:
            with torch.no_grad():
                layer.eval()(data)

        return infer if variant == "inference" else call

    kinds = (nn.LSTM, nn.GRU, nn.RNN)
    for kind, shape in itertools.product(kinds, [*_PLAIN, Recurrence(20, 16, 128, 256)]):
        for variant in ("training", "inference"):
            name = f"{kind.__name__} {shape} {variant} float16"
            yield name, functools.partial(prepare, kind, shape, torch.float16, variant)
    for kind, variant in itertools.product(kinds[:2], _VARIANTS):
        for dtype in () if kind is nn.GRU and variant == "projected" else (torch.float32, torch.bfloat16):
            shape = Recurrence(20, 8, 96, 200, 2)
            yield (
                f"{kind.__name__} {shape} {variant} {_name(dtype)}",
                functools.partial(prepare, kind, shape, dtype, variant),
            )


OF_SQUARE_MATRICES: dict[str, Callable[[torch.Tensor], object]] = {
    "solve": lambda m: torch.linalg.solve(m, m),
    "solve a vector": lambda m: torch.linalg.solve(m, m[..., 0]),
    "inv": torch.linalg.inv,
    "cholesky": torch.linalg.cholesky,
    "cholesky_inverse": torch.cholesky_inverse,
    "cholesky_solve": lambda m: torch.cholesky_solve(m, m),
    "solve_triangular": lambda m: torch.linalg.solve_triangular(m, m, upper=True),
    "eigh": torch.linalg.eigh,
    "eigvalsh": torch.linalg.eigvalsh,
    "det": torch.linalg.det,
    "slogdet": torch.linalg.slogdet,
    "lu_factor": torch.linalg.lu_factor,
    "ldl_factor": torch.linalg.ldl_factor,
    "matrix_exp": torch.linalg.matrix_exp,
    "eig": torch.linalg.eig,
}
OF_ANY_MATRIX: dict[str, Callable[[torch.Tensor], object]] = {
    "qr": torch.linalg.qr,
    "qr complete": lambda m: torch.linalg.qr(m, mode="complete"),
    "svd": lambda m: torch.linalg.svd(m, full_matrices=False),
    "svd full": torch.linalg.svd,
    "svdvals": torch.linalg.svdvals,
    "pinv": torch.linalg.pinv,
    "matrix_norm 2": lambda m: torch.linalg.matrix_norm(m, 2),
    "svd_lowrank": lambda m: torch.svd_lowrank(m, 16),
    "lstsq": lambda m: torch.linalg.lstsq(m, m[..., :8]),
}
_SQUARES = [(size, size) for size in (8, 33, 64, 128, 200, 256, 512, 768, 1024, 2048, 3000)]
_BATCHES = [(4, 16, 16), (64, 32, 32), (8, 64, 64), (16, 128, 128), (3, 300, 300), (2, 1024, 1024)]
_RECTANGLES = [(512, 128), (128, 512), (4096, 256), (1024, 768), (2048, 64), (300, 1000), (8, 512, 64), (16, 64, 16)]


def factorisations(device: str) -> Named:
    """Decompose and solve matrices that are symmetric and well conditioned, by cuSOLVER and cuBLAS."""

    def prepare(function: Callable[[torch.Tensor], object], shape: tuple[int, ...], dtype: torch.dtype) -> Call:
        matrix = torch.randn(*shape, device=device, dtype=dtype)
        if shape[-1] == shape[-2]:
            matrix = matrix @ matrix.mT + torch.eye(shape[-1], device=device, dtype=dtype) * shape[-1]
        return lambda: function(matrix)

    tables = ((OF_SQUARE_MATRICES, [*_SQUARES, *_BATCHES]), (OF_ANY_MATRIX, [*_SQUARES, *_BATCHES, *_RECTANGLES]))
    for table, shapes in tables:
        for (name, function), shape in itertools.product(table.items(), shapes):
            size = "x".join(map(str, shape))
            yield f"linalg.{name} {size}", functools.partial(prepare, function, shape, torch.float32)
            if shape in ((256, 256), (1024, 1024), (512, 128), (64, 32, 32)):
                for dtype in (torch.float64, torch.complex64):
                    yield f"linalg.{name} {size} {_name(dtype)}", functools.partial(prepare, function, shape, dtype)


_TRANSFORMS: dict[str, Callable[[torch.Tensor], object]] = {
    "fft": torch.fft.fft,
    "ifft of fft": lambda x: torch.fft.ifft(torch.fft.fft(x)),
    "rfft": torch.fft.rfft,
    "irfft of rfft": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=x.shape[-1]),
    "rfft2": torch.fft.rfft2,
    "irfft2 of rfft2": lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]),
    "fft2": torch.fft.fft2,
    "fftn": torch.fft.fftn,
    "fft of columns": lambda x: torch.fft.fft(x, dim=0),
}
_SIGNALS = [
    (64, 1024), (64, 4096), (8, 65_536), (2, 1 << 20), (2, 1 << 22), (64, 1000), (64, 1009), (16, 4099), (64, 44_100),
    (3, 480_000), (4, 999_983), (32, 64, 64), (16, 3, 224, 224), (2, 1024, 1024), (4, 720, 1280), (2, 64, 64, 64),
]  # fmt: skip


def transforms(device: str) -> Named:
    """Take Fourier transforms of sizes that are powers of two, products of small primes, and primes."""

    def prepare(function: Callable[[torch.Tensor], object], shape: tuple[int, ...]) -> Call:
        signal = torch.randn(*shape, device=device)
        return lambda: function(signal)

    for (name, function), shape in itertools.product(_TRANSFORMS.items(), _SIGNALS):
        yield f"fft.{name} {'x'.join(map(str, shape))}", functools.partial(prepare, function, shape)


_LAYOUTS_OF_SPARSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
}
_OF_SPARSE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "mm": torch.sparse.mm,
    "addmm": lambda sparse, dense: torch.sparse.addmm(dense, sparse, dense),
    "matmul": lambda sparse, dense: sparse @ dense,
    "matvec": lambda sparse, dense: sparse @ dense[:, 0],
    "sparse times sparse": lambda sparse, dense: torch.sparse.mm(sparse, sparse),
    "to_dense": lambda sparse, dense: sparse.to_dense(),
    "softmax": lambda sparse, dense: torch.sparse.softmax(sparse, -1),
    "sum": lambda sparse, dense: torch.sparse.sum(sparse),
    "coalesce": lambda sparse, dense: (sparse + sparse).coalesce() if sparse.layout is torch.sparse_coo else None,
    "transpose": lambda sparse, dense: sparse.t() @ dense,
}


def sparse_products(device: str) -> Named:
    """Multiply and convert sparse matrices, with gradients where torch has them."""

    def prepare(
        convert: Callable[[torch.Tensor], torch.Tensor], function: Callable[..., object], size: int, gradient: bool
    ) -> Call:
        matrix = torch.randn(size, size, device=device)
        sparse = convert(torch.where(matrix > 1.6, matrix, 0)).requires_grad_(gradient)
        dense = torch.randn(size, size, device=device, requires_grad=gradient)

        def call() -> object:
            result = function(sparse, dense)
            if gradient and isinstance(result, torch.Tensor) and result.layout is torch.strided:
                result.sum().backward()
            return result

        return call

    for (layout, convert), (name, function) in itertools.product(_LAYOUTS_OF_SPARSE.items(), _OF_SPARSE.items()):
        for size, gradient in itertools.product((256, 1000, 2048), (False, True)):
            title = f"sparse {layout} {name} {size}{' backward' if gradient else ''}"
            yield title, functools.partial(prepare, convert, function, size, gradient)


FAMILIES = (convolutions, recurrences, factorisations, transforms, sparse_products)


def operators(device: str) -> dict[str, Prepare]:
    """Return the whole table, with tensors on `device`."""
    return {name: prepare for family in FAMILIES for name, prepare in family(device)}
