"""Bytes of Transformer Engine's layers, forward and backward, in bfloat16 and with products in float8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.stubs.extension import StubExtension
from memprof.virtual import VirtualGpu
from tests.unit.stubs.test_flash_attention import backward, half, measured, single, tensor

GPU = find_gpu("h100-80gb")
ROWS, SIZE, WIDE = 512, 256, 1024
HEADS, HEAD = 4, 64


def byte(*shape: int) -> int:
    return torch.Size(shape).numel()


def layer(name: str, *args: Any, **options: Any) -> Any:
    import transformer_engine.pytorch as te

    return getattr(te, name)(*args, params_dtype=torch.bfloat16, **options)


def parts(norms: int) -> int:
    """Sums of the gradients of a norm's parameters, one for each multiprocessor."""
    return single(norms, GPU.num_sms, SIZE)


def test_a_product_saves_its_input(gpu: VirtualGpu) -> None:
    linear = layer("Linear", SIZE, WIDE)
    x = tensor(ROWS, SIZE)
    stays, peak, out = measured(lambda: linear(x))
    assert (out.shape, stays, peak) == ((ROWS, WIDE), half(ROWS, WIDE), half(ROWS, WIDE))
    assert backward(out) == half(ROWS, SIZE) + half(WIDE, SIZE) + half(WIDE)


def test_in_float8_it_saves_the_transposed_input_and_both_forms_of_the_weight(gpu: VirtualGpu) -> None:
    import transformer_engine.pytorch as te

    linear = layer("Linear", SIZE, WIDE, bias=False)
    x = tensor(ROWS, SIZE)
    with te.autocast():
        linear(x)  # its scales
        stays, peak, out = measured(lambda: linear(x))
    scales = 4 + 4
    assert stays == half(ROWS, WIDE) + byte(ROWS, SIZE) + 2 * byte(WIDE, SIZE) + scales
    assert peak == stays + byte(ROWS, SIZE)
    gradient = 2 * byte(ROWS, WIDE) + 4
    assert backward(out) == gradient + half(ROWS, SIZE) + half(WIDE, SIZE)


def test_a_gpu_that_multiplies_any_layout_transposes_nothing() -> None:
    with VirtualGpu(find_gpu("b200"), workspaces=False, extensions=[StubExtension()]):
        import transformer_engine.pytorch as te

        linear = layer("Linear", SIZE, WIDE, bias=False)
        x = tensor(ROWS, SIZE)
        with te.autocast():
            linear(x)
            stays, _, _ = measured(lambda: linear(x))
        assert stays == half(ROWS, WIDE) + byte(ROWS, SIZE) + byte(WIDE, SIZE) + 4 + 4


def test_weights_in_float8_are_kept_between_micro_batches(gpu: VirtualGpu) -> None:
    import transformer_engine.pytorch as te

    linear = layer("Linear", SIZE, WIDE, bias=False)
    x = tensor(ROWS, SIZE)
    with te.autocast():
        kept = measured(lambda: linear(x, is_first_microbatch=True).sum().backward())[0]
        again = measured(lambda: linear(x, is_first_microbatch=False).sum().backward())[0]
    assert kept - again >= 2 * byte(WIDE, SIZE) and again == 0


@pytest.mark.parametrize(("normalization", "numbers"), [("LayerNorm", 2), ("RMSNorm", 1)])
def test_a_norm_before_it_is_saved_with_its_numbers(gpu: VirtualGpu, normalization: str, numbers: int) -> None:
    linear = layer("LayerNormLinear", SIZE, WIDE, normalization=normalization)
    x = tensor(ROWS, SIZE)
    stays, _, out = measured(lambda: linear(x))
    assert stays == half(ROWS, WIDE) + half(ROWS, SIZE) + numbers * single(ROWS)
    # The norm's output is released before the norm's own backward.
    gradients = half(WIDE, SIZE) + half(WIDE) + 2 * half(ROWS, SIZE) + numbers * half(SIZE)
    assert backward(out) == gradients + parts(numbers) - half(ROWS, SIZE)


def test_the_feed_forward_network_keeps_two_wide_tensors(gpu: VirtualGpu) -> None:
    mlp = layer("LayerNormMLP", SIZE, WIDE)
    x = tensor(ROWS, SIZE)
    stays, _, out = measured(lambda: mlp(x))
    assert stays == 2 * half(ROWS, SIZE) + 2 * single(ROWS) + 2 * half(ROWS, WIDE)
    # Most while the gradient goes through the activation: three wide ones, the activation's output gone.
    most = 2 * half(ROWS, WIDE) + half(SIZE, WIDE) + half(SIZE) + half(WIDE) - half(ROWS, WIDE)
    assert backward(out) == most
    out = mlp(x)
    out.sum().backward()
    assert all(one.grad is not None and one.grad.shape == one.shape for one in mlp.parameters())


def test_in_float8_its_activation_is_one_byte(gpu: VirtualGpu) -> None:
    import transformer_engine.pytorch as te

    mlp = layer("LayerNormMLP", SIZE, WIDE, activation="swiglu", bias=False, normalization="RMSNorm")
    x = tensor(ROWS, SIZE)
    with te.autocast():
        mlp(x)
        stays, _, _ = measured(lambda: mlp(x))
    weights = 2 * (byte(2 * WIDE, SIZE) + byte(SIZE, WIDE))
    # The norm's output stays in both forms, other than in LayerNormLinear; so does the first product, in bfloat16.
    assert stays == half(ROWS, SIZE) + 2 * byte(ROWS, SIZE) + single(ROWS) + half(ROWS, 2 * WIDE) + byte(ROWS, WIDE) + (
        weights + 4 * 4
    )


@pytest.mark.parametrize("groups", [HEADS, 2])
def test_attention_copies_what_lies_in_no_known_way(gpu: VirtualGpu, groups: int) -> None:
    attention = layer("MultiheadAttention", SIZE, HEADS, num_gqa_groups=groups, attention_dropout=0.0, bias=False)
    tokens, batch = 128, 2
    x = tensor(tokens, batch, SIZE)
    attention(x)  # the lengths of sequences
    stays, _, out = measured(lambda: attention(x))
    mixed = half(tokens, batch, HEADS + 2 * groups, HEAD)
    copies = mixed if groups != HEADS else 0
    one = half(tokens, batch, SIZE)
    # Where queries, keys and values are copied, the product that they came from is not kept.
    assert stays == (copies or mixed) + 2 * one + single(batch, HEADS, tokens) + 16
    out.sum().backward()
    assert all(one.grad is not None for one in attention.parameters()) and x.grad is not None


def test_a_layer_with_dropout_keeps_its_masks(gpu: VirtualGpu) -> None:
    from transformer_engine.pytorch import TransformerLayer

    def stays(dropout: float) -> int:
        block = TransformerLayer(
            SIZE, WIDE, HEADS, hidden_dropout=dropout, attention_dropout=0.0, params_dtype=torch.bfloat16
        )
        x = tensor(ROWS, 1, SIZE)
        block(x)
        made = measured(lambda: block(x))
        made[2].sum().backward()
        assert x.grad is not None
        return made[0]

    assert stays(0.1) - stays(0.0) == 2 * byte(ROWS, SIZE)


def test_the_workspace_of_its_products_is_kept() -> None:
    with VirtualGpu(GPU, extensions=[StubExtension()]):
        linear = layer("Linear", SIZE, WIDE, bias=False)
        x = tensor(ROWS, SIZE)
        assert measured(lambda: linear(x))[0] == half(ROWS, WIDE) + 32 * 1024 * 1024 + 1024
        assert measured(lambda: linear(x))[0] == half(ROWS, WIDE)


def test_what_is_not_known_is_refused_by_name(gpu: VirtualGpu) -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, MXFP8BlockScaling

    with pytest.raises(MemprofError, match=r"recipe\.MXFP8BlockScaling, which is not installed"):
        MXFP8BlockScaling()
    with pytest.raises(MemprofError, match=r"autocast with the recipe DelayedScaling.*fp8_dpa=True"):
        te.autocast(recipe=DelayedScaling(fp8_dpa=True))
    with pytest.raises(MemprofError, match=r"uses transformer_engine\.pytorch\.quantized_model_init"):
        te.quantized_model_init()
    with pytest.raises(MemprofError, match=r"TransformerLayer with layer_type='decoder'"):
        te.TransformerLayer(SIZE, WIDE, HEADS, layer_type="decoder")
    with pytest.raises(MemprofError, match="tensor parallelism"):
        te.Linear(SIZE, WIDE, tp_size=2)
    half_heads = [torch.empty(8, 1, 2, 64, device="cuda") for _ in range(3)]
    with pytest.raises(MemprofError, match=r"DotProductAttention with tensors of torch\.float32"):
        te.DotProductAttention(2, 64)(*half_heads)
    with pytest.raises(TypeError, match="must match when outside of autocasted region"):
        te.Linear(SIZE, WIDE)(tensor(ROWS, SIZE))


def test_a_gpu_without_float8_says_so() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), extensions=[StubExtension()]):
        import transformer_engine.pytorch as te

        assert not te.is_fp8_available() and te.is_bf16_available()
        with pytest.raises(AssertionError, match=r"8\.9 or higher"), te.autocast():
            pass
