"""Matrix products in Triton: one that loads two numbers for each multiplication, and one in tiles of 16 x 16.

Both run 16 x 16 results per program, as a CUDA block of 256 threads does, so that only their loads differ:

* naive: each result loads its own row of A and column of B, number by number: 2 M N K loads;
* tiled: the program loads 16 x 16 of A and of B once for all its results: 2 M N K / 16 loads.

Triton puts a tile into shared memory itself. Without a GPU the kernels run in Triton's interpreter: set
TRITON_INTERPRET=1 before this module is imported, for `triton.jit` looks at it there. As a script, it prints what the
recipe shows.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

TILE = 16
_TILE = tl.constexpr(TILE)


@triton.jit
def naive_kernel(a, b, c, m, n, k, a_row, a_column, b_row, b_column, c_row, c_column, _widen: tl.constexpr):
    """16 x 16 results, each of which loads its own operands."""
    rows = (tl.program_id(0) * _TILE + tl.arange(0, _TILE))[:, None]
    columns = (tl.program_id(1) * _TILE + tl.arange(0, _TILE))[None, :]
    inside = (rows < m) & (columns < n)
    # A pointer for each result: in a row of results all read the same number of A, and each reads it.
    a_pointers = a + rows.to(tl.int64) * a_row + columns * 0
    b_pointers = b + columns.to(tl.int64) * b_column + rows * 0
    total = tl.full((_TILE, _TILE), 0.0, dtype=tl.float32)
    for _ in range(k):
        left = tl.load(a_pointers, mask=inside, other=0.0)
        right = tl.load(b_pointers, mask=inside, other=0.0)
        total += left.to(tl.float32) * right.to(tl.float32)
        a_pointers += a_column
        b_pointers += b_row
    c_pointers = c + rows.to(tl.int64) * c_row + columns.to(tl.int64) * c_column
    tl.store(c_pointers, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def tiled_kernel(a, b, c, m, n, k, a_row, a_column, b_row, b_column, c_row, c_column, widen: tl.constexpr):
    """16 x 16 results from tiles of A and B that are loaded once for all of them."""
    rows = (tl.program_id(0) * _TILE + tl.arange(0, _TILE))[:, None]
    columns = (tl.program_id(1) * _TILE + tl.arange(0, _TILE))[None, :]
    within = tl.arange(0, _TILE)
    a_pointers = a + rows.to(tl.int64) * a_row + within[None, :].to(tl.int64) * a_column
    b_pointers = b + within[:, None].to(tl.int64) * b_row + columns.to(tl.int64) * b_column
    total = tl.full((_TILE, _TILE), 0.0, dtype=tl.float32)
    for start in range(0, k, _TILE):
        left = tl.load(a_pointers, mask=(rows < m) & (within[None, :] < k - start), other=0.0)
        right = tl.load(b_pointers, mask=(within[:, None] < k - start) & (columns < n), other=0.0)
        if widen:
            left, right = left.to(tl.float32), right.to(tl.float32)
        # ieee: on tensor cores float32 would otherwise be rounded to the 10 bits of TF32.
        total = tl.dot(left, right, acc=total, input_precision="ieee")
        a_pointers += _TILE * a_column
        b_pointers += _TILE * b_row
    inside = (rows < m) & (columns < n)
    c_pointers = c + rows.to(tl.int64) * c_row + columns.to(tl.int64) * c_column
    tl.store(c_pointers, total.to(c.dtype.element_ty), mask=inside)


KERNELS = {"naive": naive_kernel, "tiled": tiled_kernel}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def matmul(a: torch.Tensor, b: torch.Tensor, kernel: str = "tiled") -> torch.Tensor:
    """The product of two matrices; sums are in float32 whatever the dtype.

    Args:
        a: [m, k], any strides.
        b: [k, n], of the same dtype and device.
        kernel: naive or tiled.

    Returns:
        [m, n], in the operands' dtype.

    Raises:
        ValueError: the operands do not go together, or their dtype is none of `DTYPES`.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"no matrix product of {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        raise ValueError(f"{a.dtype} and {b.dtype}: both must be one of {', '.join(map(str, DTYPES))}")
    if a.device != b.device:
        raise ValueError(f"operands on {a.device} and {b.device}")
    (m, k), n = a.shape, b.shape[1]
    result = a.new_empty(m, n)
    if not result.numel():
        return result
    grid = (triton.cdiv(m, TILE), triton.cdiv(n, TILE))
    # The interpreter has no numbers in bfloat16: its dot would multiply their bits as integers.
    widen = interpreted() and a.dtype is torch.bfloat16
    KERNELS[kernel][grid](a, b, result, m, n, k, *a.stride(), *b.stride(), *result.stride(), widen)
    return result


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter."""
    return not isinstance(tiled_kernel, triton.JITFunction)


class Loads:
    """Numbers loaded from global memory."""

    def __init__(self) -> None:
        self.count = 0


@contextlib.contextmanager
def counted_loads() -> Iterator[Loads]:
    """Counts what kernels load within, in Triton's interpreter: every pointer whose mask is set."""
    from triton.runtime import interpreter

    loads = Loads()
    builder = interpreter.InterpreterBuilder
    original = builder.create_masked_load

    def create_masked_load(self: object, pointers: object, mask: object, *args: object) -> object:
        loads.count += int(mask.data.sum())  # type: ignore[attr-defined]
        return original(self, pointers, mask, *args)

    builder.create_masked_load = create_masked_load
    try:
        yield loads
    finally:
        builder.create_masked_load = original


def expected_loads(m: int, n: int, k: int, kernel: str) -> int:
    """Loads of a product [m, k] x [k, n], by formula; numbers outside the matrices are masked and not loaded."""
    if kernel == "naive":
        return 2 * m * n * k
    return k * (m * triton.cdiv(n, TILE) + n * triton.cdiv(m, TILE))


def largest_error(m: int, n: int, k: int, dtype: torch.dtype, kernel: str, device: str = "cpu") -> float:
    """The largest difference from the product in float64, relative to the sum of magnitudes that were added, or to the
    smallest normal number: below it rounding is not relative any more."""
    generator = torch.Generator().manual_seed(m * 1_000_003 + n * 1_009 + k)
    a = torch.randn(m, k, generator=generator).to(device, dtype)
    b = torch.randn(k, n, generator=generator).to(device, dtype)
    exact, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    least = torch.finfo(dtype).smallest_normal
    return float(((matmul(a, b, kernel).double() - exact).abs() / magnitude.clamp(min=least)).max())


def error_bound(k: int, dtype: torch.dtype) -> float:
    """What rounding allows: k products and sums in float32 (Higham, 2002, section 3.1), then one cast to `dtype`.

    The cast may be off by a unit in the last place, not half of one: Triton's interpreter cuts off what bfloat16 lacks.
    """
    rounding = k * torch.finfo(torch.float32).eps / 2
    return rounding / (1 - rounding) + torch.finfo(dtype).eps * (1 + rounding)


def milliseconds(product: Callable[[], torch.Tensor], repeat: int = 20) -> float:
    """The median time of `product` on the current CUDA device, after warming up."""
    times = []
    for attempt in range(repeat + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        product()
        end.record()
        end.synchronize()
        if attempt >= 3:
            times.append(begin.elapsed_time(end))
    return sorted(times)[repeat // 2]


def compiled(kernel: str, dtype: str = "fp32", capability: int = 80) -> tuple[int, int]:
    """Bytes of shared memory of a program, and plain loads from global memory in its code, compiled without a GPU.

    Args:
        kernel: naive or tiled.
        dtype: Triton's name of the operands' dtype.
        capability: 80 for an A100.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = KERNELS[kernel]
    *names, widen = function.arg_names
    signature = {name: f"*{dtype}" if name in "abc" else "i32" for name in names} | {widen: "constexpr"}
    made = triton.compile(ASTSource(function, signature, {widen: False}), target=GPUTarget("cuda", capability, 32))
    return made.metadata.shared, made.asm["ptx"].count("ld.global")


def report() -> None:
    """Print errors and loads in the interpreter; else what is compiled, and errors and times where there is a GPU."""
    if interpreted():
        report_errors("cpu", "Triton's interpreter")
        m, n, k = 48, 80, 64
        for kernel in KERNELS:
            with counted_loads() as loads:
                matmul(torch.ones(m, k), torch.ones(k, n), kernel)
            print(f"{kernel}: {loads.count:,} loads counted for [{m} x {k}] x [{k} x {n}]")
        return
    for kernel in KERNELS:
        print(f"{kernel}: {compiled(kernel)[0]:,} bytes of shared memory, compiled for an A100 in float32")
    if not torch.cuda.is_available():
        print("Not timed: there is no GPU.")
        return
    place = torch.cuda.get_device_name()
    report_errors("cuda", place)
    size = 4096
    a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
    products: dict[str, Callable[[], torch.Tensor]] = {
        "naive": lambda: matmul(a, b, "naive"),
        "tiled": lambda: matmul(a, b, "tiled"),
        "torch": lambda: a @ b,
    }
    for name, product in products.items():
        print(f"{name}: {milliseconds(product):.2f} ms for {size}^3 in float32 ({place})")


def report_errors(device: str, place: str) -> None:
    """Print whether sizes that 16 divides and others come out right, in each dtype."""
    sizes = ((48, 80, 64), (17, 33, 19), (1, 5, 3))
    for kernel in KERNELS:
        errors = [
            largest_error(*s, dtype, kernel, device) / error_bound(s[2], dtype) for s in sizes for dtype in DTYPES
        ]
        holds = "within" if max(errors) <= 1 else "OUTSIDE"
        print(f"{kernel}: 3 sizes x 3 dtypes {holds} the bound of rounding, against float64 ({place})")


if __name__ == "__main__":
    sys.exit(report())
