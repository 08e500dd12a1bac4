"""The fast paths of attention and encoder layers in evaluation, whose intermediate tensors are seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu

BATCH, LENGTH, WIDTH, HEADS = 2, 10, 64, 8
TOKENS = BATCH * LENGTH


GPU = find_gpu("rtx-4090")


def made(gpu, first):
    return [(gpu.trace.op(storage).removeprefix("aten."), storage.num_bytes) for storage in gpu.trace.storages[first:]]


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_in_evaluation_shows_what_it_makes(gpu, norm_first):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 256, batch_first=True, norm_first=norm_first).cuda().half().eval()
    data = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.float16)
    first = len(gpu.trace.storages)
    with torch.no_grad():
        assert layer(data).shape == data.shape
    token = 2 * TOKENS * WIDTH
    steps = [step for step in made(gpu, first) if step[1] > 4 * TOKENS]
    norm = ("native_layer_norm", token)
    attention = [
        ("addmm", 3 * token),
        ("_scaled_dot_product_flash_attention", token),
        ("_scaled_dot_product_flash_attention", 4 * TOKENS * HEADS),
        ("addmm", token),
    ]
    network = [("_addmm_activation", 2 * TOKENS * 256), ("addmm", token)]
    expected = [norm, *attention, norm, *network] if norm_first else [*attention, norm, *network, norm]
    assert steps == expected


def test_attention_that_returns_weights_makes_the_scores_of_every_head(gpu):
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).cuda().eval()
    data = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")
    first = len(gpu.trace.storages)
    with torch.no_grad():
        result, weights = layer(data, data, data)
    assert result.shape == data.shape
    assert weights.shape == (BATCH, LENGTH, LENGTH)
    scores = 4 * BATCH * HEADS * LENGTH * LENGTH
    sizes = [size for _, size in made(gpu, first)]
    token = 4 * TOKENS * WIDTH
    # Projection, its parts with the bias, scores, their softmax, the heads side by side, the result, the mean weights.
    assert sizes == [3 * token, 3 * token, scores, scores, token, token, scores // HEADS]


def test_the_fast_path_gives_the_same_memory_back(gpu):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 256, batch_first=True).cuda().eval()
    data = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")
    before = gpu.recorder.storages.live_bytes
    with torch.no_grad():
        result = layer(data)
    assert gpu.recorder.storages.live_bytes - before == 4 * result.numel()
