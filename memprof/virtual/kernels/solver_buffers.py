"""Buffers of cuSOLVER, in bytes: fits of what an H100 was recorded to allocate, with torch 2.11 and CUDA 13.0.

How they are computed is not published. Each function says what it agrees with; sizes are of one matrix, `item_bytes` of
one of its numbers.
"""

from __future__ import annotations

RULE = (
    "cuSOLVER's buffers, gone when each call returns, follow what was measured on an H100, and are not counted on "
    "other GPUs. How they are computed is not published."
)


def round_up(size: int, step: int) -> int:
    """Return the next multiple of `step`."""
    return -(-size // step) * step


def of_potrf(rows: int) -> int:
    """Cholesky factors: all 13 sizes of 8 to 3000 rows, whatever their type."""
    return 128 + round_up(4 * (round_up(rows, 32) // 32) ** 2, 32)


def of_getrf(rows: int) -> int:
    """LU factors: all 12 sizes up to 1024 rows, whatever their type; 2048 and 3000 take 34 KiB more."""
    return 256 + round_up(8 * rows, 256) + 8 * min(512, max(32, 1 << (rows - 1).bit_length()))


def of_sytrf(rows: int, item_bytes: int) -> int:
    """LDL factors: all 23 matrices of 8 to 3000 rows."""
    return max(90_240 + 2048 * item_bytes, 64 * item_bytes * (rows + 1))


def of_geqrf(columns: int, item_bytes: int) -> int:
    """Householder reflectors: all 31 matrices of 8 to 3000 columns."""
    return 128 + item_bytes * (1024 * max(columns, 256) + (1 << 19))


def of_orgqr(rows: int, columns: int, reflectors: int, item_bytes: int) -> int:
    """The orthogonal matrix of reflectors: all 44 matrices; of 65 to 127 reflectors none was measured."""
    block = min(reflectors, 128)
    numbers = max(33_024 + rows * min(reflectors, 64), 16_640 + block * (rows + 2 * columns))
    return round_up(numbers, 32) * item_bytes


def of_ormqr(rows: int, reflectors: int, sides: int, item_bytes: int) -> int:
    """Its product with `sides` columns: 25 matrices with 8 columns, all but that of 8 rows, and one with 256."""
    numbers = (rows + reflectors) * reflectors + 256 * rows + 65_792 + 512 * sides + round_up(sides, 32)
    return round_up(numbers, 32) * item_bytes


def of_syevj(rows: int) -> int:
    """Eigenvalues by Jacobi's method, in float32: all 7 sizes of 33 to 512 rows."""
    return 4 * (rows * rows + _of_jacobi(rows, 32))


def of_syevd(rows: int, item_bytes: int) -> int:
    """Eigenvalues: 768, 1024 and 2048 rows, 3000 within 32 bytes; 8 and 256 rows took 150 KB and 1 MB more."""
    return 128 + item_bytes * (4 * rows * rows + 127 * rows + 32_963)


def of_geev(rows: int, item_bytes: int) -> int:
    """Eigenvalues of any matrix: real ones of 512 to 2048 rows, and within 12 KB of the 19 others."""
    return max(of_orgqr(rows, rows, rows, item_bytes), item_bytes * (rows * rows + 4 * rows) + 512)


def of_gesvdj(rows: int, columns: int, item_bytes: int) -> int:
    """Singular values: all 23 squares and 7 of 10 rectangles, which are reduced to squares by reflectors; the others
    took up to three times as much."""
    least = min(rows, columns)
    if max(rows, columns) <= 32:
        return 992 * item_bytes
    if rows == columns:
        numbers = rows * rows + round_up(rows * rows, 32) + _of_jacobi(rows, 64)
        return round_up(numbers, 32) * item_bytes
    numbers = 1024 * max(least, 256) + (1 << 19) + 32 + round_up(least, 32)
    numbers += round_up(rows * columns, 32) * (rows < columns)  # transposed
    return numbers * item_bytes


def _of_jacobi(rows: int, per_row: int) -> int:
    padded = round_up(rows, 32)
    return per_row * padded + rows + (padded // 16) ** 2 + padded // 32 + 1024
