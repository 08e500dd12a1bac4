"""What the environment says about the day."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In the order in which they run: what decides most comes first.
STEPS = ("probe", "kineto", "commands", "truth", "operators", "scripts", "opinfo", "questions", "libraries")
# By device, what each program's limit is multiplied by: the limits are those of a machine with a GPU.
_SCALE = {"cuda": 1.0, "cpu": 3.0}


@dataclass(frozen=True)
class Settings:
    # GPU_DAY_DEVICE: "cpu" runs the logic on a machine without a GPU, and skips what needs CUDA.
    device: str = "cuda"
    # GPU_DAY_SECONDS: for the whole day.
    seconds: float = 570
    # GPU_DAY_STEPS: names separated by spaces.
    steps: tuple[str, ...] = STEPS
    # OUT: where the results go.
    out: Path = ROOT / "out"
    # GPU_DAY_SCALE: each program's limit is multiplied by it; 3 on the CPU, if nothing is said.
    scale: float = 1


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the settings from environment variables; ValueError names one whose value it cannot have."""
    device = environment.get("GPU_DAY_DEVICE") or Settings.device
    if device not in _SCALE:
        raise ValueError(f"GPU_DAY_DEVICE is one of {', '.join(_SCALE)}, not {device!r}")
    steps = tuple((environment.get("GPU_DAY_STEPS") or " ".join(STEPS)).split())
    for name in steps:
        if name not in STEPS:
            raise ValueError(f"GPU_DAY_STEPS has some of {', '.join(STEPS)}, not {name!r}")
    return Settings(
        device,
        _positive(environment, "GPU_DAY_SECONDS", Settings.seconds),
        tuple(name for name in STEPS if name in steps),
        Path(environment.get("OUT") or Settings.out).resolve(),
        _positive(environment, "GPU_DAY_SCALE", _SCALE[device]),
    )


def _positive(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is a number above 0, not {text!r}")
    return value
