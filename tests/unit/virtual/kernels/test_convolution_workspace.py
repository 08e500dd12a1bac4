"""The rule for cuDNN's workspaces, and its bound, against what others measured."""

from __future__ import annotations

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.ledger.workspaces import Workspaces
from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import convolution
from memprof.virtual.kernels.convolution import compute_workspace

A100, V100, RTX_3090, P100, H100 = (
    DeviceProperties.from_gpu(find_gpu(name)) for name in ("a100-80gb", "v100-16gb", "rtx-3090", "p100", "h100-80gb")
)
HALF, SINGLE, BRAIN = torch.float16, torch.float32, torch.bfloat16
GIB = 1 << 30


def asked(gpu, data, weight, output, *, made="output", dtype=HALF, **named):
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in (("data", data), ("weight", weight), ("output", output))
    }
    return compute_workspace(gpu, *tensors.values(), tensors[made], **{"is_channels_last": False, **named})


def numel_bytes(shape, dtype=HALF):
    return torch.empty(shape, dtype=dtype, device="meta").nbytes


def test_a_conv3d_in_half_precision_to_the_byte():
    """pytorch/pytorch issue 95024, A100: 12,874,233,344 bytes at the peak of the forward."""
    data, weight, output = (1, 64, 361, 370, 251), (32, 64, 3, 3, 3), (1, 32, 361, 370, 251)
    tensors = sum(map(numel_bytes, (data, weight, output)))
    found = asked(A100, data, weight, output).num_bytes
    assert found == tensors
    blocks = [*map(numel_bytes, (data, weight, output)), 2 * 32, found]
    assert sum(-(-size // 512) * 512 for size in blocks) == 12_874_233_344


@pytest.mark.parametrize(
    ("width", "reserved"),
    [
        (1152, 5.52),
        (1280, 6.15),
        (1408, 6.77),
        (1536, 7.40),
        (1664, 8.02),
        (1792, 8.65),
        (1920, 9.27),
        (2048, 9.90),
        (2176, 10.52),
    ],
)
def test_a_conv2d_in_half_precision(width, reserved):
    """pytorch/pytorch issue 123533: GiB reserved with one input, the one before it, one output and the weights."""
    data, weight = (1, 256, 2048, width), (256, 256, 3, 3)
    held = numel_bytes((1, 256, 2048, width - 128)) + 2 * numel_bytes(data) + (22 << 20)
    found = asked(A100, data, weight, data).num_bytes
    segments = held + -(-found // (2 << 20)) * (2 << 20)
    assert segments / GIB == pytest.approx(reserved, abs=0.01)


@pytest.mark.parametrize(
    ("channels", "size", "made", "num_bytes"),
    [
        ((30, 16), 64, "output", 82_880),
        ((16, 32), 32, "output", 51_328),
        ((32, 64), 16, "output", 205_056),
        ((32, 64), 16, "data", 204_928),
        ((16, 32), 32, "data", 84_032),
        ((30, 16), 64, "data", 50_168),
    ],
)
def test_float32_lays_out_the_weight(channels, size, made, num_bytes):
    """A recording of a small network, torch 2.3; tests/accuracy/test_convolutions.py reads it."""
    data, output = ((16, count, size, size) for count in channels)
    weight = (channels[1], channels[0], 5, 5)
    assert asked(A100, data, weight, output, made=made, dtype=SINGLE).num_bytes == num_bytes


@pytest.mark.parametrize(
    ("length", "num_bytes"),
    [(32, 886_272), (64, 1_082_880), (128, 1_771_008), (256, 5_310_464), (512, 17_795_072), (1024, 68_126_720)],
)
def test_the_gradient_of_a_weight_in_half_precision(length, num_bytes):
    """Of 4 to 4 channels on an RTX 3090; measured is the block, a multiple of 512 bytes."""
    data = (2, 4, length, length)
    found = asked(RTX_3090, data, (4, 4, 3, 3), data, made="weight", dtype=torch.bfloat16)
    parts = (num_bytes - found.num_bytes) / 98_352
    assert abs(parts - round(parts)) < 0.01
    assert -3 <= round(parts) <= 1
    assert found.max_bytes >= num_bytes


SQUARE = (8, 64, 112, 112), (64, 64, 3, 3), (8, 64, 112, 112)
STEM = (8, 3, 224, 224), (64, 3, 7, 7), (8, 64, 112, 112)
PATCHES = (8, 3, 224, 224), (768, 3, 16, 16), (8, 768, 14, 14)
WIDE = (32, 256, 28, 28), (256, 256, 3, 3), (32, 256, 28, 28)
SMALL = (32, 512, 7, 7), (2048, 512, 1, 1), (32, 2048, 7, 7)
GROUPS = (8, 128, 56, 56), (128, 4, 3, 3), (8, 128, 56, 56)
IN_LAST_ORDER = {"is_channels_last": True}
BY_TWO = {"stride": [2, 2]}
LAST_BY_TWO = IN_LAST_ORDER | BY_TWO
PATCHES_OF_16 = (16, 3, 224, 224), (768, 3, 16, 16), (16, 768, 14, 14)


WHAT_AN_H100_REQUESTED = [
    (SQUARE, SINGLE, {}, 51_527_827, 51_527_827, 53_592_743),
    (SQUARE, SINGLE, IN_LAST_ORDER, 131, 131, 2_065_047),
    (SQUARE, BRAIN, {}, 25_763_987, 25_763_987, 27_681_447),
    (SQUARE, BRAIN, IN_LAST_ORDER, 131, 131, 1_917_591),
    (((8, 256, 28, 28), (64, 256, 1, 1), (8, 64, 28, 28)), SINGLE, {}, 0, 0, 524_288),
    (((8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56)), SINGLE, {}, 6_570_000, 12_992_528, 15_057_575),
    (((8, 128, 28, 28), (128, 128, 3, 3), (8, 128, 28, 28)), SINGLE, {}, 7_012_368, 7_012_368, 16_809_984),
    (((8, 256, 14, 14), (512, 256, 3, 3), (8, 512, 7, 7)), SINGLE, BY_TWO, 7_127_056, 7_127_187, 7_127_056),
    (((8, 512, 7, 7), (512, 512, 3, 3), (8, 512, 7, 7)), SINGLE, {}, 11_042_832, None, 11_042_832),
    (((8, 128, 28, 28), (256, 128, 1, 1), (8, 256, 14, 14)), SINGLE, BY_TWO, 4_816_912, 4_817_043, 5_079_231),
    (((8, 80, 1, 3000), (384, 80, 1, 3), (8, 384, 1, 3000)), SINGLE, {}, 44_912_787, 44_912_656, 53_170_855),
    (WIDE, SINGLE, {}, None, None, 60_818_015),
    (STEM, SINGLE, BY_TWO, 30_544_656, None, 34_872_464),
    (PATCHES, SINGLE, {"stride": [16, 16]}, 0, None, 14_385_296),
    (((1, 3, 4, 4), (3, 3, 3, 3), (1, 3, 4, 4)), SINGLE, BY_TWO, 0, 0, 0),
    (((1, 1, 5, 5, 5), (1, 1, 3, 3, 3), (1, 1, 1, 1, 1)), SINGLE, {}, 3_760, 3_760, 3_760),
    # Of library_table.py: images of 7 x 7 and 14 x 14 by kernels of one point, few channels, groups, odd channels.
    (SMALL, BRAIN, {}, 8_028_176, 8_028_176, 8_028_176),
    (SMALL, SINGLE, {}, 16_056_336, 16_056_336, 16_056_336),
    (((32, 256, 14, 14), (1024, 256, 1, 1), (32, 1024, 14, 14)), BRAIN, {}, 0, 0, 16_056_336),
    (((64, 1, 28, 28), (6, 1, 5, 5), (64, 6, 28, 28)), SINGLE, {}, 0, 0, 0),
    (((2, 1, 64, 64, 64), (32, 1, 3, 3, 3), (2, 32, 64, 64, 64)), SINGLE, {}, 0, 0, None),
    (GROUPS, BRAIN, {}, 12_854_288, 12_854_288, 0),
    (GROUPS, BRAIN, IN_LAST_ORDER, 0, 0, 0),
    (GROUPS, SINGLE, {}, 25_708_691, 0, None),
    (((4, 4, 64, 64), (320, 4, 3, 3), (4, 320, 64, 64)), SINGLE, {}, 308_240, 0, None),
    (((4, 33, 50, 50), (65, 33, 3, 3), (4, 65, 50, 50)), BRAIN, IN_LAST_ORDER, 2_291_856, 2_291_856, 2_291_856),
    (((16, 3, 224, 224), (1024, 3, 14, 14), (16, 1024, 16, 16)), SINGLE, {"stride": [14, 14]}, 28_819_472, 0, None),
    (((128, 3, 32, 32), (64, 3, 3, 3), (128, 64, 32, 32)), SINGLE, IN_LAST_ORDER, 1_579_792, None, 0),
    (((128, 3, 32, 32), (64, 3, 3, 3), (128, 64, 32, 32)), BRAIN, IN_LAST_ORDER, 2_106_384, None, None),
    (((2, 1, 64, 64, 64), (32, 1, 3, 3, 3), (2, 32, 64, 64, 64)), BRAIN, {}, 0, 41_956_880, None),
    (((32, 3, 224, 224), (64, 3, 7, 7), (32, 64, 112, 112)), SINGLE, LAST_BY_TWO, None, 122_065_680, None),
    (((128, 64, 16, 16), (128, 64, 3, 3), (128, 128, 8, 8)), BRAIN, BY_TWO, 6_438_928, None, None),
    (((128, 1, 28, 28), (32, 1, 3, 3), (128, 32, 28, 28)), SINGLE, IN_LAST_ORDER, 0, None, None),
    (((4, 4, 64, 64), (320, 4, 3, 3), (4, 320, 64, 64)), BRAIN, {}, None, 10_794_000, None),
    (((4, 64, 256, 256), (2, 64, 1, 1), (4, 2, 256, 256)), SINGLE, IN_LAST_ORDER, 0, None, None),
    (((4, 64, 256, 256), (128, 64, 2, 2), (4, 128, 128, 128)), SINGLE, LAST_BY_TWO, 131, None, None),
    (((2, 320, 64, 64), (4, 320, 3, 3), (2, 4, 64, 64)), BRAIN, IN_LAST_ORDER, None, 177_168, None),
    (((4, 33, 50, 50), (65, 33, 3, 3), (4, 65, 50, 50)), SINGLE, IN_LAST_ORDER, 4_248_144, None, None),
    (PATCHES_OF_16, BRAIN, {"stride": [16, 16]}, 20_807_696, None, None),
    (PATCHES_OF_16, SINGLE, {"stride": [16, 16], **IN_LAST_ORDER}, None, None, 25_624_720),
    (
        ((16, 3, 224, 224), (96, 3, 4, 4), (16, 96, 56, 56)),
        SINGLE,
        {"stride": [4, 4], **IN_LAST_ORDER},
        9_652_240,
        None,
        None,
    ),
    (((2, 32, 32, 32, 32), (64, 32, 3, 3, 3), (2, 64, 32, 32, 32)), SINGLE, IN_LAST_ORDER, 131, None, None),
    (((64, 256, 16, 16), (512, 256, 4, 4), (64, 512, 8, 8)), SINGLE, BY_TWO, None, None, 33_554_448),
    (((32, 256, 14, 14), (1024, 256, 1, 1), (32, 1024, 14, 14)), SINGLE, {}, None, None, 33_554_432),
    (((32, 256, 56, 56), (64, 256, 1, 1), (32, 64, 56, 56)), BRAIN, IN_LAST_ORDER, None, 131, None),
    (((2, 16, 256, 256), (16, 16, 3, 3), (2, 16, 256, 256)), BRAIN, IN_LAST_ORDER, None, 0, None),
    (((8, 256, 28, 28), (256, 8, 3, 3), (8, 256, 28, 28)), SINGLE, IN_LAST_ORDER, 0, None, None),
    (((64, 64, 64, 64), (128, 64, 4, 4), (64, 128, 32, 32)), SINGLE, BY_TWO, 67_633_168, None, None),
]


def test_what_an_h100_requested():
    """operators.jsonl, convolutions.jsonl and `convolutional` of the recorded H100, script convnet; None where
    the rule is off, or not seen. Transposed convolutions and signals are those in two dimensions."""
    for shapes, dtype, named, output, data, weight in WHAT_AN_H100_REQUESTED:
        seen = {"output": output, "data": data, "weight": weight}
        for made, num_bytes in seen.items():
            if num_bytes is not None:
                assert asked(H100, *shapes, made=made, dtype=dtype, **named).num_bytes == num_bytes, made


@pytest.mark.parametrize(("shapes", "dtype", "made", "named", "num_bytes"), [
    # Kernels of one point multiply matrices, of 64 points or more; images of fewer are copied, as is the result.
    (((8, 32, 8, 8), (96, 32, 1, 1), (8, 96, 8, 8)), BRAIN, "output", {}, 0),
    (((8, 32, 7, 9), (96, 32, 1, 1), (8, 96, 7, 9)), BRAIN, "output", {}, 2 * 8 * 63 * (32 + 96) + 16),
    (((8, 32, 7, 9), (96, 32, 1, 1), (8, 96, 7, 9)), BRAIN, "weight", {}, 2 * 8 * 63 * (32 + 96) + 16),
    # The gradient of the weight is made for each image, unless that is more than twice what is read.
    (((8, 32, 8, 8), (32, 32, 1, 1), (8, 32, 8, 8)), SINGLE, "weight", {}, 4 * 8 * 32 * 32),
    (((8, 256, 8, 8), (256, 256, 1, 1), (8, 256, 8, 8)), SINGLE, "weight", {}, 4 * 8 * 256 * 256),
    (((8, 257, 8, 8), (257, 257, 1, 1), (8, 257, 8, 8)), SINGLE, "weight", {}, 2 * 4 * 8 * 257 * 64 + 16),
    # Of a small kernel of images nothing is copied, of 4 x 7 what is read and made.
    (((1, 3, 32, 32), (8, 3, 3, 9), (1, 8, 30, 24)), SINGLE, "output", {}, 0),
    (((1, 3, 32, 32), (8, 3, 4, 7), (1, 8, 29, 26)), SINGLE, "output", {}, 4 * (3072 + 8 * 29 * 26 + 8 * 84) + 16),
    (GROUPS, SINGLE, "weight", {}, 2 * 12_845_056 + 16 * 18_432 + 16),
])  # fmt: skip
def test_edges_of_the_rule_of_an_h100(shapes, dtype, made, named, num_bytes):
    assert asked(H100, *shapes, made=made, dtype=dtype, **named).num_bytes == num_bytes


def meta(*shape, dtype=SINGLE):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("weight", "positions", "dtype", "num_bytes"), [
    # Of float32 768 positions or more for each of two slices or more; all multiprocessors from 16,384 positions on.
    ((128, 128, 1, 1), 1535, SINGLE, 0), ((128, 128, 1, 1), 1536, SINGLE, 4 * (2 * 16_384 + 2 + 7) + 131),
    ((128, 128, 1, 1), 16_383, SINGLE, 4 * (21 * 16_384 + 21 + 7) + 131),
    ((128, 128, 1, 1), 16_384, SINGLE, 4 * (132 * 16_384 + 132 + 7) + 131),
    # In half precision none is stored of the last one, and none of few positions.
    ((128, 128, 1, 1), 16_383, BRAIN, 0), ((128, 128, 1, 1), 16_384, BRAIN, 4 * (131 * 16_384 + 132 + 7) + 131),
    # Tiles of 128 x 128; up to 64 filters or channels are not padded.
    ((65, 64, 1, 1), 1536, SINGLE, 4 * (2 * 128 * 64 + 2 + 7) + 131),
    ((129, 64, 1, 1), 16_384, SINGLE, 4 * (66 * 256 * 64 + 66 * 2 + 7) + 131),
    ((64, 129, 3, 3), 16_384, SINGLE, 4 * (7 * 64 * 256 * 9 + 7 * 18 + 7) + 131),
    ((256, 1024, 3, 3), 16_384, SINGLE, 0),  # 144 tiles for 132 multiprocessors
    ((128, 17, 1, 1), 1536, SINGLE, 4 * (2 * 128 * 17 + 2 + 7) + 131),
    # Few channels.
    ((128, 16, 1, 1), 16_383, SINGLE, 128), ((128, 16, 1, 1, 1), 16_383, SINGLE, 0),
    ((8, 3, 3, 3), 16_384, SINGLE, 4 * 54 * 8 * 4 * 9 + 128), ((8, 3, 3, 3), 16_384, BRAIN, 4 * 58 * 8 * 8 * 9 + 128),
])  # fmt: skip
def test_partial_sums_of_the_gradient_of_a_weight(weight, positions, dtype, num_bytes):
    output = meta(1, weight[0], 1, positions, dtype=dtype)
    assert convolution._partial_sums_bytes(H100, output, meta(*weight, dtype=dtype), output) == num_bytes


@pytest.mark.parametrize(("filters", "channels", "size", "num_bytes"), [
    # 36 values of each tile of 4 x 4 results, of channels and filters, and of each weight.
    (64, 64, (8, 8), 144 * (4096 + 128 * 4)), (64, 96, (9, 8), 144 * (6144 + 160 * 6)),
    (63, 64, (8, 8), 0), (64, 63, (8, 8), 0),
    (256, 256, (4, 4 * 213), 144 * (65_536 + 512 * 213)), (256, 256, (4, 4 * 214), 0),  # up to 24 MiB
])  # fmt: skip
def test_transformed_values_of_winograds_algorithm(filters, channels, size, num_bytes):
    data, output = meta(1, channels, *size), meta(1, filters, *size)
    assert convolution._winograd_bytes(data, meta(filters, channels, 3, 3), output) == num_bytes


SMALL_HALF = (2, 8, 10, 10), (8, 8, 3, 3), (2, 8, 8, 8)  # 3,200, 1,152 and 2,048 bytes
VOLUME = (1, 8, 4, 4, 4), (8, 8, 3, 3, 3), (1, 8, 2, 2, 2)  # in float32 2,048, 6,912 and 256 bytes


@pytest.mark.parametrize(("gpu", "shapes", "dtype", "made", "num_bytes", "max_bytes"), [
    # Copies of all; at most a result in float32 as well, and 34 KiB, or a tile of 64 KiB for each multiprocessor.
    (A100, SMALL_HALF, HALF, "output", 6400, 6400 + 2048 + (34 << 10)),
    (A100, SMALL_HALF, HALF, "data", 6400, 6400 + 3200 + (34 << 10)),
    (A100, SMALL_HALF, HALF, "weight", 983_520 + 32_768 + 6400, 6400 + 108 * 65_536),
    (V100, SMALL_HALF, HALF, "weight", 983_520 + 32_768 + 6400, 6400 + 80 * 65_536),
    (H100, SMALL_HALF, HALF, "output", 6416, 6400 + 2048 + 2 * 132 * 65_536),
    (V100, SMALL_HALF, HALF, "output", 6400, 6400 + 2048 + (34 << 10)),
    (P100, SMALL_HALF, HALF, "output", 0, 6400 + 2048 + (34 << 10)),
    (P100, SMALL_HALF, HALF, "weight", 0, 6400 + 56 * 65_536),
    # TF32 is for compute capability 8.0 and later; 16 channels are few, 17 are not.
    (A100, VOLUME, SINGLE, "output", 9216, 9216 + 256 + (34 << 10)),
    (V100, VOLUME, SINGLE, "output", 6912 + 32 + 32_768, 9216 + 256 + (34 << 10)),
    (A100, ((1, 4, 9, 9), (16, 4, 3, 3), (1, 16, 7, 7)), SINGLE, "output", 4 * 576 + 64 + 32_768, None),
    (A100, ((1, 4, 9, 9), (17, 4, 3, 3), (1, 17, 7, 7)), SINGLE, "output", 4 * 612 + 68 + 2048, None),
    (A100, ((1, 5, 9, 9), (20, 5, 3, 3), (1, 20, 7, 7)), SINGLE, "output", 4 * 900 + 80 + 2048, None),
    (A100, ((1, 4, 9, 9), (20, 4, 1, 2), (1, 20, 9, 8)), SINGLE, "output", 4 * 160 + 80, None),
    (V100, ((1, 4, 9, 9), (20, 4, 1, 2), (1, 20, 9, 8)), torch.float64, "output", 0, None),
])  # fmt: skip
def test_the_rule_and_its_bound_by_hand(gpu, shapes, dtype, made, num_bytes, max_bytes):
    found = asked(gpu, *shapes, made=made, dtype=dtype)
    assert found.num_bytes == num_bytes
    assert max_bytes is None or found.max_bytes == max_bytes


def test_float32_without_tf32_is_the_older_rule_on_an_h100():
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert asked(H100, *SQUARE, dtype=SINGLE) == asked(A100, *SQUARE, dtype=SINGLE)


def test_channels_are_padded():
    found = asked(A100, (1, 3, 100, 100), (12, 3, 3, 3), (1, 12, 98, 98)).num_bytes
    assert found == numel_bytes((1, 8, 100, 100)) + numel_bytes((16, 8, 3, 3)) + numel_bytes((1, 16, 98, 98))


def test_without_copies():
    shapes = (2, 16, 32, 32), (32, 16, 3, 3), (2, 32, 32, 32)
    assert asked(A100, *shapes, is_channels_last=True).num_bytes == 0
    assert asked(P100, *shapes).num_bytes == 0
    assert asked(A100, *shapes, dtype=torch.float64).num_bytes == 0
    assert asked(A100, (2, 16, 32, 32), (32, 16, 1, 1), (2, 32, 32, 32), dtype=SINGLE).num_bytes == 0
    assert (
        asked(A100, *shapes, made="weight", is_channels_last=True).num_bytes
        < asked(A100, *shapes, made="weight").num_bytes
    )


def test_float32_in_three_dimensions_is_copied_with_tf32(monkeypatch):
    """pytorch/pytorch issue 128947, A100: 17 GiB at the peak, 8.99 of them data and output."""
    shapes = (1, 256, 4, 1090, 1922), (64, 256, 3, 3, 3), (1, 64, 2, 1088, 1920)
    copies = sum(numel_bytes(shape, SINGLE) for shape in shapes)
    assert asked(A100, *shapes, dtype=SINGLE).num_bytes == copies
    assert int((2 * copies) / GIB) == 17
    with torch.backends.cudnn.flags(allow_tf32=False):  # other tests may have frozen the flag itself
        assert asked(A100, *shapes, dtype=SINGLE).num_bytes < GIB


@pytest.mark.parametrize(
    ("gpu", "shapes", "dtype", "num_bytes"),
    [
        # Recorded under torch 2.5: kernels of one point, from 32 to 64 channels.
        (RTX_3090, ((1, 32, 302, 302), (64, 32, 1, 1), (1, 64, 302, 302)), SINGLE, 4 << 20),
        (RTX_3090, ((1, 32, 604, 604), (64, 32, 1, 1), (1, 64, 604, 604)), SINGLE, 128 << 20),
        # cuDNN 7.6: pytorch/pytorch issues 50990, where 1,123,495,936 bytes were the peak, and 31500.
        (V100, ((512, 32, 84, 84), (32, 32, 3, 3), (512, 32, 82, 82)), HALF, 671_933_952),
        (V100, ((1024, 1, 1024, 1024), (1, 1, 1, 1), (1024, 1, 1024, 1024)), HALF, round(48.01 * GIB)),
    ],
)
def test_the_bound_holds(gpu, shapes, dtype, num_bytes):
    found = asked(gpu, *shapes, dtype=dtype)
    assert num_bytes <= 1.001 * found.max_bytes
    assert found.num_bytes <= found.max_bytes


@pytest.fixture
def gpu():
    with VirtualGpu(find_gpu("rtx-3090")) as gpu:
        yield gpu


def test_each_call_takes_its_own_and_gives_it_back(gpu):
    layer = torch.nn.Conv2d(4, 8, 3, padding=1, bias=False).cuda().half()
    data = torch.randn(2, 4, 64, 64, device="cuda", dtype=HALF, requires_grad=True)
    output = layer(data)
    output.backward(torch.ones_like(output))
    forward, of_data, of_weight = gpu.trace.workspaces
    assert forward == of_data._replace(event=forward.event)
    assert of_weight.num_bytes > forward.num_bytes == 2 * (2 * 2 * 8 * 64 * 64) + 2 * 8 * 8 * 9
    for one in gpu.trace.workspaces:
        taken, given_back = gpu.trace.events[one.event : one.event + 2]
        assert taken.ref == given_back.ref
        assert gpu.trace.storages[taken.ref].hidden
        assert gpu.trace.storages[taken.ref].num_bytes == one.num_bytes


@pytest.mark.parametrize("options", [{"workspaces": False}, {"tensors_only": True}])
def test_nothing_is_taken_where_libraries_are_not_counted(options):
    with VirtualGpu(find_gpu("rtx-3090"), **options) as gpu:
        torch.nn.Conv2d(4, 8, 3).cuda().half()(torch.randn(2, 4, 64, 64, device="cuda", dtype=HALF))
    assert not gpu.trace.workspaces


def test_torchs_own_kernels_have_none(gpu):
    with torch.backends.cudnn.flags(enabled=False):
        torch.nn.Conv2d(4, 8, 3).cuda()(torch.randn(2, 4, 64, 64, device="cuda"))
    torch.nn.Conv2d(8, 8, 3, groups=8).cuda()(torch.randn(2, 8, 64, 64, device="cuda"))
    assert not gpu.trace.workspaces
    assert not any("workspace" in sentence for sentence in gpu.trace.assumptions)


@pytest.mark.parametrize("benchmark", [False, True])
def test_benchmarking_is_said_not_to_be_counted(gpu, benchmark):
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
        torch.nn.Conv2d(4, 8, 3).cuda()(torch.randn(2, 4, 64, 64, device="cuda"))
    assert any("benchmark is on" in sentence for sentence in gpu.trace.assumptions) is benchmark
    assert any("Which kernel cuDNN takes" in sentence for sentence in gpu.trace.assumptions)


def test_the_peak_has_bounds(gpu):
    layer = torch.nn.Conv2d(8, 8, 3, padding=1, bias=False).cuda().half()
    data = torch.randn(8, 8, 512, 512, device="cuda", dtype=HALF)
    with torch.no_grad():
        layer(data)
    weight = 1536
    allocated = [2 * data.nbytes + weight, 4 * data.nbytes + 2 * weight, 0]
    trace = gpu.trace
    (call,) = trace.workspaces
    assert Workspaces.from_trace(trace, [0] * (call.event - 1) + allocated, call.event) == Workspaces(
        call.num_bytes, 2 * data.nbytes + weight, 2 * data.nbytes + weight + -(-call.most_bytes // 512) * 512
    )
    trace.workspaces.clear()
    assert Workspaces.from_trace(trace, [1], 0) is None


def test_another_gpu_has_its_own():
    with VirtualGpu(find_gpu("rtx-3090"), gpus=2) as gpu:
        layer = torch.nn.Conv2d(8, 8, 3, bias=False).to("cuda:1").half()
        layer(torch.randn(2, 8, 64, 64, device="cuda:1", dtype=HALF))
    (call,) = gpu.trace.workspaces
    assert call.device == gpu.trace.storages[gpu.trace.events[call.event].ref].device == "cuda:1"
    assert Workspaces.from_trace(gpu.trace, [0] * len(gpu.trace.events), 0) is None
