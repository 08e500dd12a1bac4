"""What the environment may say, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpu.settings import ROOT, STEPS, Settings, read_settings


def test_without_variables_the_defaults_hold() -> None:
    assert read_settings({}) == Settings("cuda", 570, STEPS, ROOT / "out", 1)


def test_a_cpu_has_more_time_for_each_program() -> None:
    assert read_settings({"GPU_DAY_DEVICE": "cpu"}).scale == 3


def test_every_variable_is_read(tmp_path: Path) -> None:
    environment = {
        "GPU_DAY_DEVICE": "cpu",
        "GPU_DAY_SECONDS": "90.5",
        "GPU_DAY_STEPS": "opinfo kineto",
        "OUT": str(tmp_path),
        "GPU_DAY_SCALE": "2",
    }
    # Steps run in the order of importance, however they are named.
    assert read_settings(environment) == Settings("cpu", 90.5, ("kineto", "opinfo"), tmp_path, 2)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("GPU_DAY_DEVICE", "tpu", "GPU_DAY_DEVICE is one of cuda, cpu, not 'tpu'"),
        ("GPU_DAY_STEPS", "probe prob", f"GPU_DAY_STEPS has some of {', '.join(STEPS)}, not 'prob'"),
        ("GPU_DAY_SECONDS", "ten", "GPU_DAY_SECONDS is a number above 0, not 'ten'"),
        ("GPU_DAY_SECONDS", "0", "GPU_DAY_SECONDS is a number above 0, not '0'"),
        ("GPU_DAY_SCALE", "nan", "GPU_DAY_SCALE is a number above 0, not 'nan'"),
    ],
)
def test_another_value_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        read_settings({name: value})
