"""CUDA graphs and flex attention; torch.compile where it is asked to run eagerly."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import EventKind
from memprof.virtual import VirtualGpu
from memprof.watch.failure import KernelError
from tests.processes import python

GPU = find_gpu("a100-80gb")
MIB = 1 << 20


def events(build: Callable[[Callable[[nn.Module], nn.Module]], nn.Module], wrap: Callable[[nn.Module], nn.Module]):
    with VirtualGpu(GPU, compiles=False) as gpu:
        model = build(wrap)
        for _ in range(2):
            model(torch.ones(4, 16, device="cuda")).sum().backward()
    trace = gpu.trace
    moves = [e for e in trace.events if e.kind in (EventKind.ALLOC, EventKind.FREE)]
    return moves, [(s.num_bytes, trace.op(s)) for s in trace.storages], trace.assumptions


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(x))


def in_place(model: nn.Module) -> nn.Module:
    model.compile(mode="reduce-overhead")
    return model


COMPILED = torch.compile(Net())


@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.Module.train,
        lambda model: torch.compile(model),
        lambda model: torch.compile(model, mode="max-autotune", fullgraph=True, dynamic=False),
        in_place,
    ],
)
def test_a_compiled_model_runs_as_it_was_written(wrap: Callable[[nn.Module], nn.Module]) -> None:
    moves, storages, assumptions = events(lambda w: w(Net().cuda()), wrap)
    plain = events(lambda w: w(Net().cuda()), lambda model: model)
    assert (moves, storages) == plain[:2]
    assert any("torch.compile runs eagerly" in text for text in assumptions) == (wrap is not torch.nn.Module.train)


def test_what_was_compiled_before_runs_too(gpu: VirtualGpu) -> None:
    model = COMPILED.cuda()
    model(torch.ones(4, 16, device="cuda")).sum().backward()
    assert next(model.parameters()).grad is not None
    assert model._orig_mod.linear.weight.is_cuda


@pytest.fixture
def eager() -> Iterator[VirtualGpu]:
    with VirtualGpu(GPU, workspaces=False, compiles=False) as virtual:
        yield virtual


def test_decorators(eager: VirtualGpu) -> None:
    @torch.compile
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.compile(fullgraph=True)
    def thrice(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    assert twice(torch.arange(3, device="cuda")).tolist() == [0, 2, 4]
    assert thrice(torch.arange(3, device="cuda")).tolist() == [0, 3, 6]


def test_cuda_graphs_run_at_once(gpu: VirtualGpu) -> None:
    graph = torch.cuda.CUDAGraph()
    static = torch.arange(3, device="cuda")
    with torch.cuda.graph(graph):
        result = static * 2
    graph.replay()
    assert result.tolist() == [0, 2, 4]
    assert any("CUDA graphs" in sentence for sentence in gpu.trace.assumptions)


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_writes_no_scores(gpu: VirtualGpu, compiled: bool) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    heads, length, width = 8, 2048, 64
    attention = torch.compile(flex_attention) if compiled else flex_attention
    query, key, value = (
        torch.randn(1, heads, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention(query, key, value, block_mask=mask, score_mod=lambda s, b, h, q, k: s + 1)
    one, per_row = 2 * heads * length * width, 4 * heads * length
    assert out.shape == query.shape and out.stride() == query.stride()
    assert torch.cuda.memory_allocated() - before == one + per_row  # kept for the backward: output and logsumexp
    assert torch.cuda.max_memory_allocated() - before < 2 * one  # one head's scores alone would be 8 MiB
    out.backward(torch.empty_like(out))
    assert torch.cuda.memory_allocated() - before == one + 3 * one  # the output and three gradients


@pytest.mark.slow
def test_tracing_is_refused_where_it_would_abort_the_process() -> None:
    program = """
import torch, memprof
gpu = memprof.virtual_gpu("t4")
try:
    with gpu:
        model = torch.nn.Linear(4, 4).cuda()
        torch.export.export(model, (torch.ones(2, 4, device="cuda"),))
except RuntimeError as error:
    print(error)
print(gpu.trace.failure.kind)
"""
    done = python("-c", program, seconds=120)
    assert (done.exit_code, done.stdout) == (
        0,
        "tracing a model on the GPU (torch.export, FakeTensorMode) is not simulated\ntracing\n",
    ), done.stderr[-1500:]


def test_data_parallel_on_one_gpu(gpu: VirtualGpu) -> None:
    model = nn.DataParallel(nn.Linear(16, 16).cuda())
    model(torch.ones(4, 16, device="cuda")).sum().backward()
    assert model.module.weight.grad is not None and model.module.weight.grad.is_cuda


# -- Triton
# --------------------------------------------------------------------------------------------------------------


class KernelInterface:
    """The part of triton/runtime/jit.py that a launch passes through."""

    launched = 0

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


class JITFunction(KernelInterface):
    def run(self, *args, grid, warmup, **kwargs):
        KernelInterface.launched += 1


@pytest.fixture
def kernel(monkeypatch):
    """A kernel, with Triton as far as it is looked at; CPU builds of torch come without it."""
    pytest.importorskip("torch._dynamo")  # asks for the real Triton when it is first imported
    jit = types.ModuleType("triton.runtime.jit")
    jit.KernelInterface, jit.JITFunction = KernelInterface, JITFunction
    monkeypatch.setitem(sys.modules, jit.__name__, jit)
    monkeypatch.setattr(KernelInterface, "launched", 0)
    return JITFunction()


def test_a_kernel_that_is_passed_over_allocates_nothing_and_what_it_may_write_is_unknown(kernel) -> None:
    with VirtualGpu(GPU, workspaces=False, skips_kernels=True) as gpu:
        counts, other = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.arange(4, device="cuda")
        before = len(gpu.trace.events)
        assert kernel[(1,)](counts, counts.numel(), BLOCK=64) is None
        assert len(gpu.trace.events) == before
        assert gpu.trace.last_uses[0] == before  # the launch is a use of its arguments
        # Zeros were known; what a kernel may have written there is not, and 1 is the policy. The other is still known.
        assert counts.tolist() == [1, 1, 1, 1]
        assert other.tolist() == [0, 1, 2, 3]
    assert KernelInterface.launched == 0
    assert any("Triton kernels are not launched" in sentence for sentence in gpu.trace.assumptions)


@pytest.fixture
def autotuned() -> Callable[..., Any]:
    """`triton.autotune` over a kernel with two configurations; the real one, for its own code times a kernel."""
    triton = pytest.importorskip("triton", reason="Triton is not installed: no kernel was autotuned")

    def fill(x, number, IS_LARGE, BLOCK):  # noqa: N803, names of constants
        pass

    def tuned(**options: Any) -> Any:
        configs = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})]
        return triton.autotune(configs, **{"key": ["number"], **options})(triton.jit(fill))

    return tuned


def large_sizes(gpu: VirtualGpu) -> list[int]:
    """Of what was taken that has a MiB, or more, in MiB."""
    return [storage.num_bytes // MIB for storage in gpu.trace.storages if storage.num_bytes >= MIB]


def test_an_autotuned_kernel_is_timed_once_for_each_key(autotuned) -> None:
    """By the number of elements and the types of tensors; its buffer lives beside a copy of what it is to restore."""
    kernel = autotuned(restore_value=["x"])
    with VirtualGpu(GPU, workspaces=False, skips_kernels=True) as gpu:
        single, half = torch.zeros(1024, device="cuda"), torch.zeros(1024, dtype=torch.float16, device="cuda")
        held = torch.cuda.memory_allocated()
        for _ in range(2):
            kernel[(1,)](single, 1024, True)
            assert torch.cuda.memory_allocated() == held
        assert torch.cuda.max_memory_allocated() == held + 4 * 1024 + 256 * MIB
        kernel[(1,)](half, 1024, True)
        kernel[(1,)](single, number=512, IS_LARGE=False)
        kernel.configs = kernel.configs[:1]
        kernel[(1,)](single, 64, False)
    assert large_sizes(gpu) == [256] * 3
    assert not kernel.cache and kernel.nargs is None, "the run left timings behind"


def test_what_a_heuristic_says_is_part_of_a_key(autotuned) -> None:
    import triton

    heuristics = triton.heuristics({"IS_LARGE": lambda given: given["number"] > 100})
    kernel = heuristics(autotuned(key=["IS_LARGE"]))
    with VirtualGpu(GPU, workspaces=False, skips_kernels=True) as gpu:
        x = torch.zeros(1024, device="cuda")
        for number in (10, 20, 200, 300):
            kernel[(1,)](x, number)
    assert large_sizes(gpu) == [256] * 2


def test_what_times_in_place_of_tritons_benchmark_takes_its_own(autotuned) -> None:
    def ten_times(call: Callable[[], None], quantiles: Any) -> list[float]:
        buffer = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        for _ in range(10):
            call()
        del buffer
        return [1.0] * 3

    kernels = {"cuda graph": {"use_cuda_graph": True, "rep": 3}, "own": {"do_bench": ten_times}}
    for name, options in kernels.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of use_cuda_graph, which public kernels still give
            kernel = autotuned(restore_value=["x"], **options)
        with VirtualGpu(GPU, workspaces=False, skips_kernels=True) as gpu:
            kernel[(1,)](torch.zeros(MIB, device="cuda"), 1024, True)
        sizes = large_sizes(gpu)
        assert sizes.count(8) == (name == "own") and 256 not in sizes
        assert sizes.count(4) > 10, "x, and its copies"


def test_tritons_own_autotuner_takes_the_same(autotuned) -> None:
    """All its configurations, timed by its own `run` with launches that do nothing."""
    import triton

    def peak(kernel: Any, launch: Callable[[Any, torch.Tensor], None]) -> tuple[int, set[int]]:
        with VirtualGpu(GPU, workspaces=False, skips_kernels=True) as gpu:
            launch(kernel, torch.zeros(MIB, device="cuda"))
            return torch.cuda.max_memory_allocated(), set(large_sizes(gpu))

    options: dict[str, Any] = {"restore_value": ["x"], "reset_to_zero": ["x"]}
    ours = peak(autotuned(**options), lambda kernel, x: kernel[(1,)](x, 1024, True))
    original = triton.runtime.autotuner.Autotuner.run
    theirs = peak(autotuned(**options), lambda kernel, x: original(kernel, x, 1024, True, grid=(1,), warmup=False))
    assert ours == theirs == (264 * MIB, {4, 256})


def test_unless_asked_a_kernel_ends_the_run(kernel) -> None:
    with pytest.raises(KernelError, match="was launched with tensors that have no data"), VirtualGpu(GPU):
        kernel[(1,)](torch.zeros(4, device="cuda"))


def test_a_kernel_on_the_host_is_launched(kernel) -> None:
    """Triton's interpreter, for one, works on real tensors."""
    with VirtualGpu(GPU, skips_kernels=True):
        kernel[(1,)](torch.zeros(4))
    assert KernelInterface.launched == 1


def test_tritons_benchmark_takes_a_cache_that_it_clears() -> None:
    """Between the calls that it measures, 256 MiB are overwritten (triton/backends/nvidia/driver.py)."""
    pytest.importorskip("triton.backends.nvidia.driver", reason="Triton is not installed: do_bench did not run")
    import triton.runtime
    import triton.testing

    before = triton.runtime.driver._active
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        data = torch.ones(1024, device="cuda")
        assert triton.testing.do_bench(lambda: data + 1) == 1.0
        assert torch.cuda.max_memory_allocated() >= 256 << 20
    assert any(storage.num_bytes == 256 << 20 for storage in gpu.trace.storages)
    assert triton.runtime.driver._active is before
