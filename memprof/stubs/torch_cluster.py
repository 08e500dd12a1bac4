"""torch_cluster: neighbors of points, and farthest points. No function has a backward.

Sources: torch_cluster/knn.py, radius.py, fps.py and csrc/cuda/knn_cuda.cu, radius_cuda.cu, fps_cuda.cu of
rusty1s/pytorch_cluster@1.6.3. Distances are unknown: each point has the maximum number of neighbors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.stubs.registry import register_in
from memprof.stubs.tools import check_on_gpu, mark_written, require

_SOURCE = "rusty1s/pytorch_cluster@1.6.3:"


def _register(file: str) -> Callable[[Any], Any]:
    source = f"{_SOURCE}torch_cluster/{file}.py, csrc/cuda/{file}_cuda.cu"
    return register_in(f"torch_cluster.{file}", "torch_cluster", source=source)


def _find_neighbors(
    x: torch.Tensor, y: torch.Tensor, max_neighbors: int, batches: tuple[Any, Any], num_batches: int | None
) -> torch.Tensor:
    """Return edges [2, points of `y` times `max_neighbors`]; scratch: two lists of edges and a mask."""
    if x.numel() == 0 or y.numel() == 0:
        return torch.empty(2, 0, dtype=torch.long, device=x.device)
    x = (x.view(-1, 1) if x.dim() == 1 else x).contiguous()
    y = (y.view(-1, 1) if y.dim() == 1 else y).contiguous()
    require(x.size(1) == y.size(1), "torch_cluster", "x and y of as many coordinates")
    require(x.is_floating_point(), "torch_cluster", f"floating-point numbers, not {x.dtype}")
    if num_batches is None:
        num_batches = max([1, *(int(batch.max()) + 1 for batch in batches if batch is not None)])
    if num_batches > 1:
        bounds = torch.arange(num_batches + 1, device=x.device)
        boundaries = [torch.bucketize(bounds, batch) for batch in batches]
    else:
        boundaries = [torch.arange(0, len(points) + 1, len(points), device=x.device) for points in (x, y)]
    row, col = (torch.full((y.size(0) * max_neighbors,), -1, dtype=torch.int64, device=x.device) for _ in range(2))
    mark_written(row, col)
    mask = row != -1
    mark_written(mask)
    del boundaries
    return torch.stack([row.masked_select(mask), col.masked_select(mask)], dim=0)


def _remove_loops(edges: torch.Tensor, loop: bool, flow: str) -> torch.Tensor:
    row, col = (edges[1], edges[0]) if flow == "source_to_target" else (edges[0], edges[1])
    if not loop:
        mask = row != col
        row, col = row[mask], col[mask]
    return torch.stack([row, col], dim=0)


@_register("knn")
def knn(x, y, k, batch_x=None, batch_y=None, cosine=False, num_workers=1, batch_size=None):
    """Return edges [2, points of `y` times `k`]; scratch: both rows of edges and a mask."""
    check_on_gpu("torch_cluster.knn", x, y, batch_x, batch_y)
    return _find_neighbors(x, y, k, (batch_x, batch_y), batch_size)


@_register("knn")
def knn_graph(x, k, batch=None, loop=False, flow="source_to_target", cosine=False, num_workers=1, batch_size=None):
    """Return the edges between neighbors in `x`; unless `loop`, k + 1 neighbors are found and self-loops removed."""
    check_on_gpu("torch_cluster.knn_graph", x, batch)
    edges = knn(x, x, k if loop else k + 1, batch, batch, cosine, num_workers, batch_size)
    return _remove_loops(edges, loop, flow)


@_register("radius")
def radius(x, y, r, batch_x=None, batch_y=None, max_num_neighbors=32, num_workers=1, batch_size=None):
    """Return edges [2, points of `y` times `max_num_neighbors`]; scratch: both rows of edges and a mask."""
    check_on_gpu("torch_cluster.radius", x, y, batch_x, batch_y)
    return _find_neighbors(x, y, max_num_neighbors, (batch_x, batch_y), batch_size)


@_register("radius")
def radius_graph(
    x, r, batch=None, loop=False, max_num_neighbors=32, flow="source_to_target", num_workers=1, batch_size=None
):
    """Return the edges between points of `x` within a radius; self-loops are removed unless `loop`."""
    check_on_gpu("torch_cluster.radius_graph", x, batch)
    max_neighbors = max_num_neighbors if loop else max_num_neighbors + 1
    return _remove_loops(radius(x, x, r, batch, batch, max_neighbors, num_workers, batch_size), loop, flow)


@_register("fps")
def fps(src, batch=None, ratio=None, random_start=True, batch_size=None, ptr=None):
    """Return the indices of farthest points, `ratio` of each group's points; scratch: a distance for each point."""
    check_on_gpu("torch_cluster.fps", src, batch)
    fraction = ratio
    if not isinstance(ratio, torch.Tensor):
        fraction = torch.tensor(0.5 if ratio is None else ratio, dtype=src.dtype, device=src.device)
    if isinstance(ptr, list):
        offsets = torch.tensor(ptr, device=src.device)
    elif ptr is not None:
        offsets = ptr
    elif batch is not None:
        num_batches = int(batch.max()) + 1 if batch_size is None else batch_size
        sizes = src.new_zeros(num_batches, dtype=torch.long)
        sizes.scatter_add_(0, batch, torch.ones_like(batch))
        offsets = sizes.new_zeros(num_batches + 1)
        offsets[1:].copy_(sizes.cumsum(0))  # a copy into a part of a tensor loses the known values
    else:
        offsets = torch.tensor([0, src.size(0)], device=src.device)
    points = src.view(src.size(0), -1).contiguous()
    num_groups = offsets.numel() - 1
    num_chosen = (offsets.narrow(0, 1, num_groups) - offsets.narrow(0, 0, num_groups)).to(fraction.dtype) * fraction
    bounds = torch.cat([offsets.new_zeros(1), num_chosen.ceil().to(torch.long).cumsum(0)], 0)
    start = torch.zeros(num_groups, dtype=offsets.dtype, device=offsets.device)
    if random_start:
        start = (torch.rand(num_groups, dtype=src.dtype, device=src.device) * start.to(fraction.dtype)).to(torch.long)
    distances = torch.full((points.size(0),), 5e4, dtype=src.dtype, device=src.device)
    indices = torch.empty(int(bounds[-1]), dtype=torch.long, device=src.device)
    del start, distances
    return indices
