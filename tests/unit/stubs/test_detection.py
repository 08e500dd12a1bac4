"""torchvision's operators and models of detection; the operators also where torchvision is not installed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.stubs import detection
from memprof.stubs import torchvision as torchvision_operators
from memprof.stubs.extension import extensions
from memprof.virtual import VirtualGpu
from memprof.virtual.kernels import registry

IS_HERE = importlib.util.find_spec("torchvision") is not None
WHY = "torchvision is not installed: its models of detection did not run"


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    if IS_HERE:
        import torchvision  # noqa: F401
    else:
        _defined()
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=extensions()) as gpu:
        registry.register_library_operators("torchvision")
        yield gpu


@functools.cache
def _defined() -> torch.library.Library:
    """The operators, and the shape that torchvision's Python gives for one."""
    library = torchvision_operators.define_operators()
    library.impl(
        "roi_align", lambda data, rois, _, *size: data.new_empty((len(rois), data.shape[1], *size[:2])), "Meta"
    )
    return library


def sizes(gpu: VirtualGpu, first: int) -> list[int]:
    return [storage.num_bytes for storage in gpu.trace.storages[first:]]


def test_regions_are_pooled_from_contiguous_features(gpu: VirtualGpu) -> None:
    features = torch.randn(2, 8, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    boxes = torch.zeros(3, 5, device="cuda")
    first = len(gpu.trace.storages)
    pooled = torch.ops.torchvision.roi_align(features, boxes, 1.0, 7, 7, 2, False)
    assert pooled.shape == (3, 8, 7, 7)
    assert sizes(gpu, first) == [pooled.nbytes, features.nbytes]


def test_pairs_of_rotated_boxes_have_a_number_each(gpu: VirtualGpu) -> None:
    first, second = torch.zeros(3, 5, device="cuda"), torch.zeros(7, 5, device="cuda")
    before = len(gpu.trace.storages)
    assert torch.ops.torchvision.box_iou_rotated(first, second).shape == (3, 7)
    assert sizes(gpu, before) == [3 * 7 * 4]
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.ops.torchvision.box_iou_rotated(first, second.double())


BOXES, IMAGES, DEPTH, TALL, WIDE = 3, 2, 8, 16, 24
POOLED = (1.0, 7, 7)
OF_IMAGES = (IMAGES, DEPTH, TALL, WIDE)
BACKWARDS: dict[str, tuple[tuple[object, ...], bool]] = {
    # What comes after the boxes; and whether the gradient is made contiguous, or taken by its strides.
    "_roi_align_backward": ((*POOLED, *OF_IMAGES, 2, False), False),
    "_roi_pool_backward": ((*POOLED, *OF_IMAGES), False),
    "_ps_roi_align_backward": ((*POOLED, 2, *OF_IMAGES), True),
    "_ps_roi_pool_backward": ((*POOLED, *OF_IMAGES), True),
}


@functools.cache
def _shapes() -> torch.library.Library:
    """The shapes that torchvision's Python gives for those that go back."""
    library = _defined()

    def made(grad: torch.Tensor, *rest: object) -> torch.Tensor:
        return grad.new_empty(OF_IMAGES)

    for name in BACKWARDS:
        library.impl(name, made, "Meta")
    return library


@pytest.mark.skipif(IS_HERE, reason="torchvision has shapes of its own")
@pytest.mark.parametrize("name", BACKWARDS)
def test_the_way_back_from_regions_makes_features_anew(gpu: VirtualGpu, name: str) -> None:
    _shapes()
    rest, copies = BACKWARDS[name]
    gradient = torch.empty(BOXES, DEPTH, 7, 7, device="cuda").to(memory_format=torch.channels_last)
    boxes, places = torch.zeros(5, BOXES, device="cuda").t(), torch.zeros(BOXES, DEPTH, 7, 7, device="cuda").int()
    between = () if name == "_roi_align_backward" else (places,)
    first = len(gpu.trace.storages)
    made = getattr(torch.ops.torchvision, name)(gradient, boxes, *between, *rest)
    assert made.shape == OF_IMAGES
    assert sizes(gpu, first) == [made.nbytes, *([gradient.nbytes] if copies else []), boxes.nbytes]


def test_each_operator_that_goes_back_is_tested() -> None:
    back = {name for name in torchvision_operators.SCHEMAS if name.endswith("_backward")}
    assert back == BACKWARDS.keys() | {"_deform_conv2d_backward"}


def test_a_deformable_convolution_keeps_windows_of_up_to_32_images(gpu: VirtualGpu) -> None:
    """Twice the result, windows, and the result with its bias."""
    data, weight = torch.randn(33, 4, 8, 8, device="cuda"), torch.randn(6, 4, 3, 3, device="cuda")
    offset, mask = torch.randn(33, 18, 8, 8, device="cuda"), torch.randn(33, 9, 8, 8, device="cuda")
    bias, rest = torch.randn(6, device="cuda"), (1, 1, 1, 1, 1, 1, 1, 1, True)
    result_bytes, window_bytes = 33 * 6 * 64 * 4, 4 * 9 * 11 * 64 * 4  # 11 at a time divide 33
    first = len(gpu.trace.storages)
    result = torch.ops.torchvision.deform_conv2d.default(data, weight, offset, mask, bias, *rest)
    assert result.shape == (33, 6, 8, 8)
    assert sizes(gpu, first) == [result_bytes, result_bytes, window_bytes, result_bytes]
    first = len(gpu.trace.storages)
    with torch.no_grad():
        gradients = torch.ops.torchvision._deform_conv2d_backward.default(
            torch.randn_like(result), data, weight, offset, mask, bias, *rest
        )
    assert [each.shape for each in gradients] == [each.shape for each in (data, weight, offset, mask, bias)]
    taken = sizes(gpu, first)
    assert taken.count(window_bytes) == 2
    assert taken.count(result_bytes) == 2  # the gradient, and the gradient in another order


MODELS = (
    *("fasterrcnn_mobilenet_v3_large_320_fpn", "maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn"),
    *("retinanet_resnet50_fpn", "fcos_resnet50_fpn", "ssdlite320_mobilenet_v3_large", "ssd300_vgg16"),
)


@pytest.mark.slow
@pytest.mark.skipif(not IS_HERE, reason=WHY)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_detection(gpu: VirtualGpu, name: str) -> None:
    """Training and inference; every box that suppression is given is kept."""
    import torchvision

    model = getattr(torchvision.models.detection, name)(weights=None, weights_backbone=None).cuda()
    images = [torch.randn(3, 320, 320, device="cuda") for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        loss = sum(model(images, [_target(name) for _ in images]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained = torch.cuda.max_memory_allocated()
    model.eval()
    with torch.no_grad():
        found = model(images)
    assert len(found) == 2
    assert found[0]["boxes"].shape[0] > 0
    assert trained > sum(p.nbytes for p in model.parameters())
    assert not gpu.trace.mismatches


def _target(name: str) -> dict[str, Any]:
    target = {
        "boxes": torch.tensor([[10.0, 10, 90, 90], [20, 30, 120, 200]], device="cuda"),
        "labels": torch.tensor([1, 1], device="cuda"),
    }
    if "mask" in name:
        target["masks"] = torch.zeros(2, 320, 320, dtype=torch.uint8, device="cuda")
    if "keypoint" in name:
        target["keypoints"] = torch.full((2, 17, 3), 50.0, device="cuda")
    return target


def test_autocast_pools_regions_in_float32(gpu: VirtualGpu) -> None:
    """And gives what the features were of; boxes are kept by numbers."""
    gpu.dispatch_mode.function_mode.register_float32_operators(detection.list_float32_operators())
    features, boxes = torch.randn(2, 8, 16, 16, device="cuda").half(), torch.zeros(3, 5, device="cuda")
    rest = (1.0, 7, 7, 2, False)
    with pytest.raises(RuntimeError, match="same type") if IS_HERE else contextlib.nullcontext():
        torch.ops.torchvision.roi_align(features, boxes, *rest)
    first = len(gpu.trace.storages)
    with torch.autocast("cuda", torch.float16):
        pooled = torch.ops.torchvision.roi_align(features, boxes, *rest)
        kept = torch.ops.torchvision.nms(boxes[:, :4].half(), torch.rand(3, device="cuda"), 0.5)
    assert pooled.dtype is torch.float16 and kept.dtype is torch.int64
    assert sizes(gpu, first)[:3] == [2 * features.nbytes, 2 * pooled.nbytes, pooled.nbytes]


def test_suppression_keeps_every_box(gpu: VirtualGpu) -> None:
    boxes, scores = torch.randn(1000, 4, device="cuda"), torch.randn(1000, device="cuda")
    kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
    assert sorted(kept.tolist()) == list(range(1000))
    assert any("keeps every box" in sentence for sentence in gpu.trace.assumptions)
