"""Operators of libraries: with a fake, without one, and those that are a Triton kernel's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.trace.events import FailureKind
from memprof.virtual import VirtualGpu

LIBRARY = torch.library.Library("memprof_library_test", "DEF")
for schema in (
    "fill_(Tensor(a!) x, float value) -> Tensor(a!)",
    "swap_(Tensor(a!) x, Tensor(b!) y) -> ()",
    "into(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    "scores(Tensor query, Tensor[] keys, float scale=1.0) -> (Tensor, Tensor[])",
):
    LIBRARY.define(schema)
OPERATORS = torch.ops.memprof_library_test


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, skips_kernels=True) as gpu:
        yield gpu


def test_what_only_fills_its_arguments_needs_no_kernel(gpu: VirtualGpu) -> None:
    x, y = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.ones(4, dtype=torch.int64, device="cuda")
    before = torch.cuda.memory_allocated()
    assert OPERATORS.fill_(x, 2.0) is x
    assert OPERATORS.swap_(y, y.clone()) is None
    assert torch.cuda.memory_allocated() == before
    assert x.tolist() == y.tolist() == [1, 1, 1, 1]  # no longer known: an unknown integer reads as 1
    told = [line for line in gpu.trace.assumptions if "has no kernel that works without data" in line]
    assert [line.partition(" ")[0] for line in told] == ["memprof_library_test::fill_", "memprof_library_test::swap_"]


def test_what_writes_into_an_argument_by_name_too(gpu: VirtualGpu) -> None:
    x, out = torch.zeros(4, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    before = torch.cuda.memory_allocated()
    assert OPERATORS.into(x, out=out) is out
    assert torch.cuda.memory_allocated() == before
    assert out.tolist() == [1, 1, 1, 1]


def test_what_makes_tensors_is_named_with_the_lines_that_would_say_which() -> None:
    gpu = VirtualGpu(find_gpu("a100-80gb"))

    def call() -> None:
        with gpu:
            x = torch.zeros(4, device="cuda")
            OPERATORS.scores(x, [x, x])

    with pytest.raises(NotImplementedError):
        call()
    failure = gpu.trace.failure
    assert failure is not None
    assert (failure.kind, failure.op) == (FailureKind.NO_META_KERNEL, "memprof_library_test.scores")
    assert failure.hint is not None
    lines = failure.hint.splitlines()[1:-1]
    assert lines == [
        '@torch.library.register_fake("memprof_library_test::scores")',
        "def _(query, keys, scale=1.0):",
        "    return torch.empty_like(query), [torch.empty_like(query)]",
    ]
    exec("\n".join(lines), {"torch": torch})
    with VirtualGpu(find_gpu("a100-80gb")):
        x = torch.zeros(4, device="cuda")
        found, [other] = OPERATORS.scores(x, [x, x])
        assert found.is_cuda and other.shape == x.shape
        assert torch.cuda.memory_allocated() == 3 * 16


triton = pytest.importorskip("triton", reason="no Triton here: its operators did not run")
import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402


@triton.jit
def double_kernel(given, made, number, BLOCK: tl.constexpr) -> None:  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(made + at, 2 * tl.load(given + at, mask=at < number), mask=at < number)


@triton_op("memprof_library_test::doubled", mutates_args={})
def doubled(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    wrap_triton(double_kernel)[(triton.cdiv(x.numel(), 64),)](x, made, x.numel(), BLOCK=64)
    return made


@triton_op("memprof_library_test::halved_", mutates_args={"x"})
def halved_(x: torch.Tensor) -> None:
    wrap_triton(double_kernel)[(1,)](x, x, x.numel(), BLOCK=64)


doubled.register_autograd(lambda ctx, gradient: doubled(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_operator_of_a_triton_kernel(gpu: VirtualGpu, is_compiled: bool) -> None:
    """It allocates what its Python does, launches nothing, and what the kernel would write is unknown."""
    call = torch.compile(doubled, fullgraph=True) if is_compiled else doubled
    x = torch.ones(1024, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    made = call(x)
    assert torch.cuda.memory_allocated() - before == made.nbytes == 4096
    made.backward(torch.ones_like(made))
    assert x.grad is not None and x.grad.shape == x.shape


def test_what_a_triton_kernel_writes_is_unknown_and_not_what_was_there(gpu: VirtualGpu) -> None:
    x = torch.zeros(8, dtype=torch.int64, device="cuda")
    made = doubled(x)
    assert made.tolist() == [1] * 8  # zeros before the launch
    halved_(x)
    assert x.tolist() == [1] * 8
