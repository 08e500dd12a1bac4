"""Bytes of xformers' memory-efficient attention, on the kernels that its wheels choose."""

from __future__ import annotations

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.stubs.extension import StubExtension
from memprof.virtual import VirtualGpu
from tests.unit.stubs.test_flash_attention import backward, half, measured, single, tensor

BATCH, TOKENS, HEADS = 2, 1000, 16
SUMS = single(BATCH, HEADS, TOKENS)


@pytest.mark.parametrize("gpu", ["h100-80gb", "a100-80gb"])
def test_flash_attention_3_and_its_sums(gpu: str) -> None:
    with VirtualGpu(find_gpu(gpu), workspaces=False, extensions=[StubExtension()]):
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
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=[StubExtension()]):
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
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=[StubExtension()]):
        from xformers.ops import memory_efficient_attention, unbind

        packed = tensor(BATCH, TOKENS, HEADS, 3, 64)
        out = memory_efficient_attention(*unbind(packed, 3))
        gradient = torch.empty_like(out)
        out.backward(gradient)
        assert packed.grad is not None and packed.grad.shape == packed.shape


def test_without_a_gradient_sums_are_dropped_and_what_is_not_known_is_refused() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=[StubExtension()]):
        from xformers.ops import memory_efficient_attention
        from xformers.ops.fmha.attn_bias import BlockDiagonalGappyKeysMask

        q = torch.empty(BATCH, TOKENS, 64, device="cuda", dtype=torch.float16)
        stays, _, out = measured(lambda: memory_efficient_attention(q, q, q))
        assert (out.shape, stays) == (q.shape, half(BATCH, TOKENS, 64))
        with pytest.raises(MemprofError, match="with op"):
            memory_efficient_attention(q, q, q, op=object())  # type: ignore[arg-type]
        with pytest.raises(NotImplementedError, match=r"in torch\.float64"):
            memory_efficient_attention(q.double(), q.double(), q.double())
        with pytest.raises(MemprofError, match=r"xformers\.ops\.fmha\.attn_bias\.BlockDiagonalGappyKeysMask"):
            BlockDiagonalGappyKeysMask.from_seqlens([1, 2])


@pytest.mark.parametrize("gpu", ["h100-80gb", "rtx-4090"])
def test_sequences_one_after_another(gpu: str) -> None:
    """As DINOv2 has them: pictures of two sizes in one call (BlockDiagonalMask.from_tensor_list)."""
    lengths, heads, size = [257] * 2 + [50] * 8, 6, 64
    total = sum(lengths)
    with VirtualGpu(find_gpu(gpu), workspaces=False, extensions=[StubExtension()]):
        from xformers.ops import fmha, memory_efficient_attention

        pictures = [tensor(2, 257, heads, 3 * size), tensor(8, 50, heads, 3 * size)]
        stays, _, (bias, joined) = measured(lambda: fmha.BlockDiagonalMask.from_tensor_list(pictures))
        assert (joined.shape, stays) == ((1, total, heads, 3 * size), half(total, heads, 3 * size) + 4 * 11)
        assert bias.q_seqinfo.seqstart.tolist()[-1] == total and bias.q_seqinfo.max_seqlen == 257
        assert [tuple(one.shape[:2]) for one in bias.split(joined)] == [(2, 257), (8, 50)]
        q, k, v = (tensor(1, total, heads, size) for _ in range(3))
        stays, peak, out = measured(lambda: memory_efficient_attention(q, k, v, attn_bias=bias))
        one, sums = half(total, heads, size), 4 * heads * total
        assert (out.shape, stays) == (q.shape, one + sums)
        assert peak == stays + 4 * (10 + (gpu == "h100-80gb"))  # one number for each sequence, on Hopper one for all
        # Sums twice and accumulators, in blocks of 128 rows or 64, of which each sequence may fill one more; locks.
        block = 128 if gpu == "h100-80gb" else 64
        rows = -(-(total + len(lengths) * block) // block) * block
        locks = single(-(-257 // block), len(lengths), heads)
        scratch = 2 * single(heads, rows) + single(heads, rows, size) + locks
        assert backward(out) == 3 * one + sums + scratch


def test_sequences_with_dropout_take_flash_attention_2() -> None:
    lengths, heads, size = [300, 200], 4, 64
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=[StubExtension()]):
        from xformers.ops import memory_efficient_attention
        from xformers.ops.fmha.attn_bias import BlockDiagonalMask

        bias = BlockDiagonalMask.from_seqlens(lengths).make_local_attention(128)
        q, k, v = (tensor(1, 500, heads, size) for _ in range(3))
        stays, _, out = measured(lambda: memory_efficient_attention(q, k, v, attn_bias=bias, p=0.1))
        one, sums = half(500, heads, size), 4 * heads * 500
        assert stays == one + sums + 16  # and the state of the random numbers
        rows = 500 + 128 * len(lengths)
        assert backward(out) == 3 * one + sums + single(heads, rows) + single(rows, heads, size)


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_tensor_as_bias_takes_pytorchs_efficient_attention(dtype: torch.dtype, wanted: bool) -> None:
    """Sums of rows are padded to 32; the bias has a gradient if it asks for one."""
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=[StubExtension()]):
        from xformers.ops import memory_efficient_attention

        q, k, v = (tensor(BATCH, 992, 4, 64, dtype=dtype) for _ in range(3))
        bias = torch.zeros(BATCH, 4, 992, 992, device="cuda", dtype=dtype, requires_grad=wanted)
        stays, _, out = measured(lambda: memory_efficient_attention(q, k, v, attn_bias=bias))
        of_rows = single(BATCH, 4, 992)
        assert stays == q.nbytes + of_rows
        tiles = BATCH * 4 * -(-992 // 64) * (16 + 4 * 64 * 64)
        # Gradients, zeros for that of the sums, and what PyTorch's operator takes.
        assert backward(out) == 3 * q.nbytes + wanted * bias.nbytes + 2 * of_rows + tiles
        assert (bias.grad is not None) == wanted


def test_gpus_before_ampere_take_pytorchs_efficient_attention() -> None:
    with VirtualGpu(find_gpu("v100-32gb"), workspaces=False, extensions=[StubExtension()]):
        from xformers.ops import LowerTriangularMask, memory_efficient_attention

        q, k, v = (tensor(1, 1000, 4, 64, dtype=torch.float16) for _ in range(3))
        stays, _, _ = measured(lambda: memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask()))
        assert stays == half(1000, 4, 64) + single(4, 1024)
        q, k, v = (tensor(1, 1000, 4, 64) for _ in range(3))
        with pytest.raises(NotImplementedError, match=r"in torch\.bfloat16"):
            memory_efficient_attention(q, k, v)


def test_keys_in_a_cache_have_no_backward() -> None:
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=False, extensions=[StubExtension()]):
        from xformers.ops import memory_efficient_attention
        from xformers.ops.fmha import BlockDiagonalMask
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetPaddedKeysMask

        bias = BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 1], kv_padding=256, kv_seqlen=[100, 7])
        assert bias.k_seqinfo.seqstart_py == [0, 256, 512] and bias.k_seqinfo.seqlen.tolist() == [100, 7]
        q, cache = tensor(1, 2, 8, 64), tensor(1, 512, 8, 64)
        with pytest.raises(NotImplementedError, match="memory_efficient_attention_backward"):
            memory_efficient_attention(q, cache, cache, attn_bias=bias)
        q, cache = q.detach(), cache.detach()
        stays, _, out = measured(lambda: memory_efficient_attention(q, cache, cache, attn_bias=bias))
        assert (out.shape, stays) == (q.shape, half(2, 8, 64))
        rows = tensor(2, 8, 8, 64)
        with pytest.raises(ValueError, match="batch_size=1"):
            memory_efficient_attention(rows, rows, rows, attn_bias=BlockDiagonalMask.from_seqlens([8, 8]))


@pytest.mark.parametrize(("size", "operator"), [(128, "xformers_flash3"), (16, "xformers_flash")])
def test_a_checkpoint_may_keep_what_attention_gave(size: int, operator: str) -> None:
    """Selective checkpoints name the operator that the real package defines (as Meta's lingua does)."""
    checkpoint = pytest.importorskip("torch.utils.checkpoint")
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=False, extensions=[StubExtension()]) as gpu:
        import xformers.ops as xops

        kept = getattr(torch.ops, operator).flash_fwd.default
        named = getattr(xops.fmha, operator.removeprefix("xformers_")).FwOp
        assert kept._overloadpacket == named.OPERATOR
        with pytest.raises(MemprofError, match=r"FwOp\.not_supported_reasons"):
            named.not_supported_reasons(None)
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
    with VirtualGpu(find_gpu("h100-80gb"), extensions=[StubExtension()]) as gpu:
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
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=[StubExtension()]):
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
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=[StubExtension()]):
        import xformers.ops as xops

        layer = xops.SwiGLU(256, 512, bias=False).cuda()
        x = torch.zeros(1024, 256, device="cuda", requires_grad=True)
        stays, _, _ = measured(lambda: layer(x))
        assert stays == 4 * single(1024, 512) + single(1024, 256)  # both gates, what silu gives, the product


@pytest.mark.parametrize("packed", [True, False])
def test_swiglu_under_autocast_casts_each_weight(packed: bool) -> None:
    """As TinyLlama trains: weights in float32. Packed ones are saved as they were cast; others autocast keeps till its
    end, and they are cast again in the backward."""
    rows, width, inner = 1024, 256, 512
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=[StubExtension()]):
        import xformers.ops as xops

        layer = xops.SwiGLU(width, inner, bias=False, _pack_weights=packed).cuda()
        x = tensor(rows, width, dtype=torch.float32)
        weights, gates, result = 3 * half(width, inner), 2 * half(rows, inner), half(rows, width)

        def call() -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out: torch.Tensor = layer(x)
                kept = weights + gates + result + packed * half(rows, width)
                assert torch.cuda.memory_allocated() - before == kept
                return out

        before = torch.cuda.memory_allocated()
        out = call()
        stays = gates + result + packed * (weights + half(rows, width))
        assert torch.cuda.memory_allocated() - before == stays
        out.backward(torch.empty_like(out))
        assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in layer.parameters())
        assert x.grad is not None and x.grad.dtype == torch.float32


def test_rows_by_an_index_as_stochastic_depth_has_them() -> None:
    """Each way: gradients of the sources, of the scaling one for each element, which autograd sums up."""
    rows, width = 1000, 384
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=[StubExtension()]):
        from xformers.ops import index_select_cat, scaled_index_add

        sources = [tensor(8, 200 * width), tensor(16, 50 * width)]
        indices = [torch.arange(number, device="cuda") for number in (4, 8)]
        stays, _, out = measured(lambda: index_select_cat(sources, indices))
        assert stays == out.nbytes == half(4 * 200 + 8 * 50, width)
        assert backward(out) == sum(source.nbytes for source in sources)
        x, source = tensor(rows, width), tensor(rows // 2, width)
        scale = tensor(width, dtype=torch.float32)
        whole, index = x * 1, torch.arange(rows // 2, device="cuda")
        stays, peak, out = measured(lambda: scaled_index_add(whole, index, source, scale.expand_as(source)))
        assert out is whole and stays == peak == 0
        # Of the source, of the scaling for each element and their sum; the gradient itself goes on to the input.
        most = half(rows // 2, width) + single(rows // 2, width) + single(width)
        assert backward(out) == max(most, half(rows, width) + half(rows // 2, width) + single(width))
        with pytest.raises(RuntimeError, match="rows of one shape"):
            scaled_index_add(whole, index, tensor(4, 8))
