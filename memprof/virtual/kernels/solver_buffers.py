"""Buffers of cuSOLVER, in bytes: formulas fitted to recorded allocations on an H100, with torch 2.11 and CUDA 13.0.

cuSOLVER's formulas are not published. Each docstring says which recorded matrices the formula reproduces. A buffer is
for one matrix; `item_bytes` is the size of an element.
"""

from __future__ import annotations

from memprof.units import round_up

BUFFERS_ASSUMPTION = (
    "cuSOLVER's buffers, gone when each call returns, follow what was measured on an H100, and are not counted on "
    "other GPUs. How they are computed is not published."
)


def potrf_buffer_bytes(rows: int) -> int:
    """Return the bytes for a Cholesky factorization. Exact for all 13 recorded sizes, 8 to 3000 rows, every dtype."""
    return 128 + round_up(4 * (round_up(rows, 32) // 32) ** 2, 32)


def getrf_buffer_bytes(rows: int) -> int:
    """Return the bytes for LU factors. Exact for all 12 sizes up to 1024 rows; 34 KiB too few for 2048 and 3000."""
    return 256 + round_up(8 * rows, 256) + 8 * min(512, max(32, 1 << (rows - 1).bit_length()))


def sytrf_buffer_bytes(rows: int, item_bytes: int) -> int:
    """Return the bytes for an LDL factorization. Exact for all 23 recorded matrices, 8 to 3000 rows."""
    return max(90_240 + 2048 * item_bytes, 64 * item_bytes * (rows + 1))


def geqrf_buffer_bytes(columns: int, item_bytes: int) -> int:
    """Return the bytes for Householder reflectors. Exact for all 31 recorded matrices, 8 to 3000 columns."""
    return 128 + item_bytes * (1024 * max(columns, 256) + (1 << 19))


def orgqr_buffer_bytes(rows: int, columns: int, num_reflectors: int, item_bytes: int) -> int:
    """Return the bytes for the Q of a QR factorization. Exact for all 44 recorded matrices (no 65 to 127
    reflectors)."""
    block_size = min(num_reflectors, 128)
    num_values = max(33_024 + rows * min(num_reflectors, 64), 16_640 + block_size * (rows + 2 * columns))
    return round_up(num_values, 32) * item_bytes


def ormqr_buffer_bytes(rows: int, num_reflectors: int, num_rhs: int, item_bytes: int) -> int:
    """Return the bytes for the product of Q with a matrix of `num_rhs` columns. Exact for 25 of 26 recorded ones."""
    num_values = (rows + num_reflectors) * num_reflectors + 256 * rows + 65_792 + 512 * num_rhs + round_up(num_rhs, 32)
    return round_up(num_values, 32) * item_bytes


def syevj_buffer_bytes(rows: int) -> int:
    """Return the bytes for eigenvalues by Jacobi's method, float32. Exact for all 7 recorded sizes, 33 to 512 rows."""
    return 4 * (rows * rows + _count_jacobi_values(rows, 32))


def syevd_buffer_bytes(rows: int, item_bytes: int) -> int:
    """Return the bytes for eigenvalues of a symmetric matrix. Exact for 768, 1024 and 2048 rows, within 32 bytes for
    3000; 150 KB and 1 MB too few for 8 and 256 rows."""
    return 128 + item_bytes * (4 * rows * rows + 127 * rows + 32_963)


def geev_buffer_bytes(rows: int, item_bytes: int) -> int:
    """Return the bytes for general eigenvalues. Exact for real 512 to 2048 rows, within 12 KB for 19 other matrices."""
    return max(orgqr_buffer_bytes(rows, rows, rows, item_bytes), item_bytes * (rows * rows + 4 * rows) + 512)


def gesvdj_buffer_bytes(rows: int, columns: int, item_bytes: int) -> int:
    """Return the bytes for singular values; rectangles are first reduced to squares by reflectors. Exact for all 23
    recorded squares and 7 of 10 rectangles; off by up to a third for the other 3."""
    min_dim = min(rows, columns)
    if max(rows, columns) <= 32:
        return 992 * item_bytes
    if rows == columns:
        num_values = rows * rows + round_up(rows * rows, 32) + _count_jacobi_values(rows, 64)
        return round_up(num_values, 32) * item_bytes
    num_values = 1024 * max(min_dim, 256) + (1 << 19) + 32 + round_up(min_dim, 32)
    num_values += round_up(rows * columns, 32) * (rows < columns)  # transposed
    return num_values * item_bytes


def _count_jacobi_values(rows: int, values_per_row: int) -> int:
    padded_rows = round_up(rows, 32)
    return values_per_row * padded_rows + rows + (padded_rows // 16) ** 2 + padded_rows // 32 + 1024
