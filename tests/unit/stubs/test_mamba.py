"""Bytes of the selective scan, of Mamba's layer around it and of its convolution."""

from __future__ import annotations

import pytest
import torch

from memprof.errors import MemprofError
from memprof.virtual import VirtualGpu
from tests.unit.stubs.test_flash_attention import backward, half, measured, single, tensor

BATCH, CHANNELS, TIME, STATES = 2, 64, 3000, 16
CHUNKS = 2  # Of 2,048 steps of time.


def test_a_convolution_sums_the_gradients_of_its_weight_in_single_precision(gpu: VirtualGpu) -> None:
    from causal_conv1d import causal_conv1d_fn

    x, weight, bias = tensor(BATCH, CHANNELS, TIME), tensor(CHANNELS, 4), tensor(CHANNELS)
    stays, peak, out = measured(lambda: causal_conv1d_fn(x, weight, bias, activation="silu"))
    size = half(BATCH, CHANNELS, TIME)
    assert (out.shape, stays, peak) == (x.shape, size, size)
    assert backward(out) == size + single(CHANNELS, 4) + half(CHANNELS, 4) + single(CHANNELS) + half(CHANNELS)
    with pytest.raises(MemprofError, match="causal_conv1d_fn with states"):
        causal_conv1d_fn(x, weight, return_final_states=True)


def test_a_scan_keeps_a_state_for_each_chunk(gpu: VirtualGpu) -> None:
    from mamba_ssm import selective_scan_fn

    u, delta, z = (tensor(BATCH, CHANNELS, TIME) for _ in range(3))
    a = tensor(CHANNELS, STATES, dtype=torch.float32)
    b, c = (tensor(BATCH, STATES, TIME) for _ in range(2))
    d, bias = (tensor(CHANNELS, dtype=torch.float32) for _ in range(2))
    stays, _, out = measured(lambda: selective_scan_fn(u, delta, a, b, c, d, z, bias, delta_softplus=True))
    size, kept = half(BATCH, CHANNELS, TIME), single(BATCH, CHANNELS, CHUNKS, 2 * STATES)
    assert stays == 2 * size + kept
    made = 3 * size + single(CHANNELS, STATES) + 2 * single(CHANNELS)
    of_b_and_c = 2 * (single(BATCH, STATES, TIME) + half(BATCH, STATES, TIME))
    assert backward(out) == made + of_b_and_c


def test_mambas_layer_computes_its_convolution_again(gpu: VirtualGpu) -> None:
    from mamba_ssm import Mamba

    layer = Mamba(32, d_state=STATES, device="cuda", dtype=torch.bfloat16)
    x = tensor(BATCH, TIME, 32)
    stays, _, out = measured(lambda: layer(x))
    inner, rank = layer.d_inner, layer.dt_rank
    assert inner == CHANNELS
    saved = half(BATCH, 2 * inner, TIME)  # input and gate
    saved += half(BATCH, TIME, rank + 2 * STATES) + 2 * half(BATCH, STATES, TIME)  # projected; B and C
    saved += half(BATCH, inner, TIME) + single(BATCH, inner, CHUNKS, 2 * STATES)  # the output and states
    parameters = 2 * single(inner, STATES) + single(inner)  # A with its exponential, and a bias in float32
    assert stays == saved + parameters + half(BATCH, TIME, 32)
    out.sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.shape == parameter.shape for parameter in layer.parameters()
    )
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("rms_norm", [True, False])
def test_the_language_model_keeps_a_stream_in_float32_for_each_layer(gpu: VirtualGpu, rms_norm: bool) -> None:
    """Beside what Mamba's own layers keep: the sum before each norm, its numbers a row, and the last norm's output."""
    from mamba_ssm import Mamba, MambaLMHeadModel
    from mamba_ssm.models.config_mamba import MambaConfig

    config = MambaConfig(d_model=32, n_layer=3, vocab_size=100, rms_norm=rms_norm)
    model = MambaLMHeadModel(config, device="cuda", dtype=torch.bfloat16)
    assert model.lm_head.weight is model.backbone.embedding.weight and model.lm_head.weight.shape == (104, 32)
    ids = torch.zeros(BATCH, TIME, dtype=torch.int64, device="cuda")
    layer = Mamba(32, device="cuda", dtype=torch.bfloat16)
    of_layer = measured(lambda: layer(tensor(BATCH, TIME, 32)))[0] - half(BATCH, TIME, 32)  # without its input
    stays, _, out = measured(lambda: model(ids).logits)
    assert out.shape == (BATCH, TIME, 104)
    rows, numbers = BATCH * TIME, 1 if rms_norm else 2
    norms = 4 * (single(rows, 32) + numbers * single(rows) + half(rows, 32))
    # The stream's sums are made of each layer's output, which nobody keeps; the head's input is the last norm's.
    of_outputs = 3 * half(rows, 32)
    assert stays == 3 * of_layer + norms - of_outputs + half(rows, 104)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(MemprofError, match=r"MambaLMHeadModel\.generate with decoding"):
        model.generate(ids)
    with pytest.raises(MemprofError, match=r"mamba_ssm\.modules\.mamba2\.Mamba2"):
        MambaLMHeadModel(MambaConfig(n_layer=1, ssm_cfg={"layer": "Mamba2"}))
