"""Bytes of xformers' memory-efficient attention, on the kernels that its wheels choose."""

from __future__ import annotations

import pytest
import torch

from memprof.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.virtual import VirtualGpu
from tests.unit.virtual.stand_ins.test_flash_attention import backward, half, measured, single, tensor

BATCH, TOKENS, HEADS = 2, 1000, 16
SUMS = single(BATCH, HEADS, TOKENS)


@pytest.mark.parametrize("card", ["h100-80gb", "a100-80gb"])
def test_flash_attention_3_and_its_sums(card: str) -> None:
    with VirtualGpu(find_gpu(card), workspaces=False):
        import xformers
        from xformers.ops import LowerTriangularMask, memory_efficient_attention

        assert xformers.__version__ == "0.0.32.post2"
        q, k, v = (tensor(BATCH, TOKENS, HEADS, 128) for _ in range(3))
        stays, _, out = measured(lambda: memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask()))
        size = half(BATCH, TOKENS, HEADS, 128)
        assert (out.shape, stays) == (q.shape, size + SUMS)
        # Gradients, zeros for that of the sums, two sums of rows, an accumulator, locks: blocks of 64 rows.
        rows = 2 * single(BATCH, HEADS, 1024) + single(BATCH, HEADS, 1024, 128) + single(16, BATCH, HEADS)
        assert backward(out) == 3 * size + SUMS + rows


def test_small_heads_and_dropout_take_flash_attention_2() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False):
        from xformers.ops import memory_efficient_attention

        q, k, v = (tensor(BATCH, TOKENS, HEADS, 40) for _ in range(3))
        stays, _, out = measured(lambda: memory_efficient_attention(q, k, v))
        size = half(BATCH, TOKENS, HEADS, 40)
        assert stays == size + SUMS
        scratch = single(BATCH, HEADS, 1024) + single(BATCH, 1024, HEADS, 64)
        assert backward(out) == 3 * size + SUMS + scratch
        stays, _, out = measured(lambda: memory_efficient_attention(q, k, v, p=0.1))
        assert stays == size + SUMS + 16  # the state of the random numbers


def test_gradients_of_a_packed_tensor_are_one() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False):
        from xformers.ops import memory_efficient_attention, unbind

        packed = tensor(BATCH, TOKENS, HEADS, 3, 64)
        out = memory_efficient_attention(*unbind(packed, 3))
        gradient = torch.empty_like(out)
        out.backward(gradient)
        assert packed.grad is not None and packed.grad.shape == packed.shape


def test_without_a_gradient_sums_are_dropped_and_what_is_not_known_is_refused() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False):
        from xformers.ops import memory_efficient_attention
        from xformers.ops.fmha import BlockDiagonalMask

        q = torch.empty(BATCH, TOKENS, 64, device="cuda", dtype=torch.float16)
        stays, _, out = measured(lambda: memory_efficient_attention(q, q, q))
        assert (out.shape, stays) == (q.shape, half(BATCH, TOKENS, 64))
        bias = torch.zeros(BATCH, TOKENS, TOKENS, device="cuda", dtype=torch.float16)
        for given, what in [
            ({"attn_bias": bias}, "attn_bias of type Tensor"), ({"op": object()}, "with op"),
        ]:  # fmt: skip
            with pytest.raises(MemprofError, match=what):
                memory_efficient_attention(q, q, q, **given)
        with pytest.raises(MemprofError, match=r"tensors of torch\.float32"):
            memory_efficient_attention(q.float(), q.float(), q.float())
        with pytest.raises(MemprofError, match=r"xformers\.ops\.fmha\.BlockDiagonalMask"):
            BlockDiagonalMask.from_seqlens([1, 2])


@pytest.mark.parametrize(("size", "operator"), [(128, "xformers_flash3"), (16, "xformers_flash")])
def test_a_checkpoint_may_keep_what_attention_gave(size: int, operator: str) -> None:
    """Selective checkpoints name the operator that the real package defines (as Meta's lingua does)."""
    checkpoint = pytest.importorskip("torch.utils.checkpoint")
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=False) as gpu:
        import xformers.ops as xops

        kept = getattr(torch.ops, operator).flash_fwd.default
        policy = checkpoint.CheckpointPolicy
        runs: dict[str, int] = {}
        for name, chosen in (("kept", policy.MUST_SAVE), ("made again", policy.PREFER_RECOMPUTE)):

            def choose(context: object, op: object, *args: object, chosen: object = chosen, **kwargs: object) -> object:
                return chosen if op is kept else policy.PREFER_RECOMPUTE

            q, k, v = (tensor(BATCH, TOKENS, HEADS, size) for _ in range(3))
            begin = len(gpu.trace.storages)
            out = checkpoint.checkpoint(
                lambda q, k, v: xops.memory_efficient_attention(q, k, v) * 2,
                q, k, v, use_reentrant=False,
                context_fn=lambda choose=choose: checkpoint.create_selective_checkpoint_contexts(choose),
            )  # fmt: skip
            out.backward(torch.empty_like(out))
            made = gpu.trace.storages[begin:]
            runs[name] = sum(one.shape == (BATCH, HEADS, TOKENS) and one.dtype == "float32" for one in made)
    # Sums of the forward, and the zeros that are their gradient; and sums of the second forward.
    assert runs == {"kept": 2, "made again": 3}


def test_the_profiler_takes_nothing() -> None:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        import xformers.profiler
        from xformers.profiler import MemSnapshotsProfiler, PyTorchProfiler

        class Own(PyTorchProfiler):
            pass

        begin = len(gpu.trace.events)
        with xformers.profiler.profile("nowhere", schedule=[(MemSnapshotsProfiler, 0, 2), (Own, 2, 4)]) as profiler:
            profiler.step()
            xformers.profiler.step()
        assert len(gpu.trace.events) == begin


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_keeps_both_gates_and_makes_their_product_again(packed: bool, bias: bool) -> None:
    """The input, x1 and x2 (csrc/swiglu/swiglu_packedw.cpp; ops/swiglu_op.py, _SwiGLUFusedFunc)."""
    rows, width, inner = 1024, 256, 512
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False):
        import xformers.ops as xops

        layer = xops.SwiGLU(width, inner, bias=bias, _pack_weights=packed).cuda().bfloat16()
        x = tensor(2, rows // 2, width)
        stays, peak, out = measured(lambda: layer(x))
        gates = 2 * half(rows, inner)
        assert (out.shape, stays) == (x.shape, gates + half(rows, width))
        assert peak == stays + half(rows, inner)
        weights = sum(one.nbytes + (-one.nbytes) % 512 for one in layer.parameters())
        # Gradients of the product and of both gates, and the product; or at the end those of all that there is.
        assert backward(out) == max(2 * gates, gates + half(rows, width) + weights)


def test_swiglu_elsewhere_is_three_linear_layers() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False):
        import xformers.ops as xops

        layer = xops.SwiGLU(256, 512, bias=False).cuda()
        x = torch.zeros(1024, 256, device="cuda", requires_grad=True)
        stays, _, _ = measured(lambda: layer(x))
        assert stays == 4 * single(1024, 512) + single(1024, 256)  # both gates, what silu gives, the product
        with torch.autocast("cuda"), pytest.raises(MemprofError, match=r"xformers\.ops\.swiglu with autocast"):
            layer(x)
