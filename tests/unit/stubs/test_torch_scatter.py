"""torch_scatter and torch_cluster: rows by an index, points by how near they are."""

from __future__ import annotations

import pytest
import torch

from memprof.virtual import VirtualGpu

EDGES, NODES, CHANNELS = 10_000, 1_000, 16
OF_EDGES, OF_NODES = EDGES * CHANNELS * 4, NODES * CHANNELS * 4


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(EDGES, device="cuda") % NODES
    return torch.ones(EDGES, CHANNELS, device="cuda", requires_grad=True), index


def taken(gpu: VirtualGpu, first: int) -> list[int]:
    return [storage.num_bytes for storage in gpu.trace.storages[first:]]


@pytest.mark.parametrize(
    ("reduce", "forward", "backward"),
    [
        ("sum", [OF_NODES], [OF_EDGES]),
        # The output and the places; a mask where nothing came. Back: zeros for the places, and others with a row more.
        ("max", [OF_NODES, 2 * OF_NODES, OF_NODES // 4], [2 * OF_NODES, OF_EDGES + CHANNELS * 4]),
        ("min", [OF_NODES, 2 * OF_NODES, OF_NODES // 4], [2 * OF_NODES, OF_EDGES + CHANNELS * 4]),
        # The gradient by the product, rows of it, and where they are no numbers.
        ("mul", [OF_NODES], [OF_NODES, OF_EDGES, OF_EDGES // 4]),
    ],
)
def test_rows_by_an_index(gpu: VirtualGpu, reduce: str, forward: list[int], backward: list[int]) -> None:
    import torch_scatter

    src, index = rows()
    first = len(gpu.trace.storages)
    made = torch_scatter.scatter(src, index, dim=0, dim_size=NODES, reduce=reduce)
    assert made.shape == (NODES, CHANNELS)
    assert taken(gpu, first) == forward
    gradient = torch.ones_like(made)
    first = len(gpu.trace.storages)
    made.backward(gradient)
    assert [size for size in taken(gpu, first) if size > CHANNELS][: len(backward)] == backward
    assert src.grad is not None and src.grad.shape == src.shape


def test_the_largest_index_says_how_many_rows_there_are(gpu: VirtualGpu) -> None:
    import torch_scatter

    src, index = rows()
    assert torch_scatter.scatter_mean(src, index, dim=0).shape == (NODES, CHANNELS)
    assert torch_scatter.scatter_softmax(src, index, dim=0).shape == src.shape


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_rows_by_where_segments_begin(gpu: VirtualGpu, reduce: str) -> None:
    import torch_scatter

    src, _ = rows()
    bounds = torch.arange(0, EDGES + 1, EDGES // NODES, device="cuda")
    first = len(gpu.trace.storages)
    made = torch_scatter.segment_csr(src, bounds, reduce=reduce)
    assert made.shape == (NODES, CHANNELS)
    assert taken(gpu, first) == ([OF_NODES, 2 * OF_NODES] if reduce == "max" else [OF_NODES])
    made.sum().backward()
    assert src.grad is not None and src.grad.shape == src.shape
    back = torch_scatter.gather_csr(made.detach().requires_grad_(), bounds)
    assert back.shape == src.shape


def test_rows_by_a_sorted_index_keep_their_counts(gpu: VirtualGpu) -> None:
    import torch_scatter

    src, _ = rows()
    index = torch.arange(EDGES, device="cuda") // (EDGES // NODES)
    first = len(gpu.trace.storages)
    made = torch_scatter.segment_coo(src, index, dim_size=NODES, reduce="mean")
    assert taken(gpu, first)[:2] == [OF_NODES, NODES * 4]
    made.sum().backward()
    assert src.grad is not None and src.grad.shape == src.shape


@pytest.mark.parametrize(
    ("name", "edges", "nodes"),
    [
        # Of each edge: the largest of its row, what is centred by it, the sum of its row, the result; of each node two.
        ("scatter_softmax", 4, 2),
        ("scatter_log_softmax", 3, 2),  # the result is written over what is centred
        ("scatter_logsumexp", 2.25, 1),  # while a mask of what is no number is there, there are no sums
    ],
)
def test_what_a_composite_function_names_lives_until_it_ends(
    gpu: VirtualGpu, name: str, edges: float, nodes: int
) -> None:
    import torch_scatter

    src, index = rows()
    with torch.no_grad():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = getattr(torch_scatter, name)(src, index, dim=0, dim_size=NODES)
    assert made.shape == ((NODES, CHANNELS) if name == "scatter_logsumexp" else src.shape)
    assert torch.cuda.max_memory_allocated() - before == edges * OF_EDGES + nodes * OF_NODES
    getattr(torch_scatter, name)(src, index, dim=0, dim_size=NODES).sum().backward()
    assert src.grad is not None and src.grad.shape == src.shape


def test_each_point_has_as_many_neighbours_as_it_may_have(gpu: VirtualGpu) -> None:
    import torch_cluster

    points = torch.rand(100, 3, device="cuda")
    assert torch_cluster.knn(points, points, 8).shape == (2, 800)
    assert torch_cluster.radius(points, points, 0.1, max_num_neighbors=5).shape == (2, 500)
    first = len(gpu.trace.storages)
    assert torch_cluster.knn_graph(points, 4, loop=True).shape == (2, 400)
    # The two lists and what was found; of each, the numbers of what is kept and that itself; both, and in order.
    large = [size for size in taken(gpu, first) if size == 400 or size > 1500]  # not CUB's bookkeeping
    assert large == [3200, 3200, 400, 3200, 3200, 3200, 3200, 6400, 6400]
    batch = torch.arange(100, device="cuda") // 50
    assert torch_cluster.knn(points, points, 8, batch, batch).shape == (2, 800)
    assert torch_cluster.fps(points, batch, ratio=0.25).shape == (26,)
