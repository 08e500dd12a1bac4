"""The first use of each of CUDA's libraries: small calls, of which each loads one and may keep memory of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

# Called with the device.
FirstUse = Callable[[str], object]


def start(device: str) -> None:
    """Make CUDA's context."""
    torch.zeros(1, device=device)


def add(device: str) -> None:
    """Launch an elementwise kernel."""
    torch.randn(1024, device=device) + 1


def multiply(dtype: torch.dtype) -> FirstUse:
    """Multiply two matrices (cuBLAS)."""

    def use(device: str) -> None:
        matrix = torch.randn(512, 512, device=device, dtype=dtype)
        matrix @ matrix

    return use


def linear_with_bias(device: str) -> None:
    """Multiply and add a bias in one kernel (cuBLASLt)."""
    matrix = torch.randn(512, 512, device=device, dtype=torch.bfloat16)
    functional.linear(matrix, matrix, matrix[0])


def multiply_on_a_stream(device: str) -> None:
    """Multiply on a second stream, for which cuBLAS has another workspace."""
    if device != "cuda":
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        multiply(torch.float32)(device)
    stream.synchronize()


def convolve(device: str) -> None:
    """Convolve (cuDNN)."""
    functional.conv2d(torch.randn(2, 8, 64, 64, device=device), torch.randn(8, 8, 3, 3, device=device))


def attend(backend: SDPBackend) -> FirstUse:
    def use(device: str) -> None:
        states = torch.randn(2, 8, 512, 64, device=device, dtype=torch.bfloat16)
        with sdpa_kernel(backend):
            functional.scaled_dot_product_attention(states, states, states, is_causal=True)

    return use


def attend_and_differentiate(device: str) -> None:
    """Attend with the backend that torch chooses, and differentiate."""
    query, key, value = (
        torch.randn(2, 8, 512, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()


def recur(device: str) -> None:
    """Run an LSTM (cuDNN)."""
    nn.LSTM(64, 64, device=device)(torch.randn(16, 4, 64, device=device))


def transform(device: str) -> None:
    """Take a Fourier transform (cuFFT)."""
    torch.fft.rfft2(torch.randn(64, 256, 256, device=device))


def solve(device: str) -> None:
    """Solve a linear system (cuSOLVER)."""
    torch.linalg.solve(torch.randn(256, 256, device=device), torch.randn(256, 256, device=device))


def decompose(device: str) -> None:
    """Take a singular value decomposition (cuSOLVER)."""
    torch.linalg.svd(torch.randn(128, 128, device=device))


def multiply_sparse(device: str) -> None:
    """Multiply a sparse matrix (cuSPARSE)."""
    torch.sparse.mm(torch.eye(256, device=device).to_sparse(), torch.randn(256, 256, device=device))


def profile_on_cpu(device: str) -> None:
    """Profile with CPU activity alone, as memprof does (is CUPTI loaded?)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        multiply(torch.float32)(device)


def reduce_over_one_rank(device: str) -> None:
    """Reduce over a group of one rank (NCCL)."""
    if device != "cuda":
        return
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1)
    dist.all_reduce(torch.randn(1 << 20, device=device))
    torch.cuda.synchronize()
    dist.destroy_process_group()


# In the order in which they are tried, in one process.
FIRST_USES: dict[str, FirstUse] = {
    "init": start,
    "elementwise kernel": add,
    "mm float32": multiply(torch.float32),
    "mm bfloat16": multiply(torch.bfloat16),
    "mm float16": multiply(torch.float16),
    "linear with bias (cuBLASLt)": linear_with_bias,
    "mm on a side stream": multiply_on_a_stream,
    "conv2d (cuDNN)": convolve,
    "sdpa flash": attend(SDPBackend.FLASH_ATTENTION),
    "sdpa efficient": attend(SDPBackend.EFFICIENT_ATTENTION),
    "sdpa cuDNN": attend(SDPBackend.CUDNN_ATTENTION),
    "sdpa math": attend(SDPBackend.MATH),
    "sdpa default, backward": attend_and_differentiate,
    "lstm (cuDNN)": recur,
    "fft (cuFFT)": transform,
    "solve (cuSOLVER)": solve,
    "svd (cuSOLVER)": decompose,
    "sparse mm (cuSPARSE)": multiply_sparse,
    "torch's profiler, CPU activity alone": profile_on_cpu,
    "all_reduce over one rank (NCCL)": reduce_over_one_rank,
}
