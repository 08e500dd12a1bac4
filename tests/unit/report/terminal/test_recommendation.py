"""The heading of a recommendation names a custom GPU, whose name has its size, once."""

from types import SimpleNamespace

import pytest

from memprof.report.terminal.recommendation import render_heading


@pytest.mark.parametrize(
    ("name", "gpus", "text"),
    [
        ("custom GPU with 8.00 GiB", 1, "What fits a custom GPU with 8.00 GiB"),
        ("custom GPU with 8.00 GiB", 2, "What fits 2 x custom GPU with 8.00 GiB"),
        ("NVIDIA A10", 1, "What fits NVIDIA A10 (8.00 GiB)"),
    ],
)
def test_the_gpu_is_named_once(name: str, gpus: int, text: str) -> None:
    result = SimpleNamespace(device=SimpleNamespace(name=name, total_bytes=8 << 30), gpus=gpus, model=None)
    assert render_heading(result).plain == text
