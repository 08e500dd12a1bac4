"""The reported messages, and what they are compared by."""

from __future__ import annotations

import io
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.doctor import Diagnosis, ReportedRun, diagnose

HERE = Path(__file__).parent
FACTORS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 2**10, "MB": 2**20, "GB": 2**30}


@dataclass(frozen=True)
class Message:
    source: str
    text: str
    cause: str
    figures: dict[str, Any]
    device: int | None = None
    devices: tuple[str, ...] = ()
    known: dict[str, Any] | None = None
    tensor: dict[str, Any] | None = None
    where: str = ""
    program: str = ""
    engine: dict[str, Any] | None = None
    commands: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    def diagnosis(self) -> Diagnosis | None:
        found = diagnose(io.BytesIO(self.text.encode()), "message", ReportedRun(**(self.known or {})))
        return found[0] if found else None


def messages(name: str) -> list[Message]:
    table = tomllib.loads((HERE / name).read_text(encoding="utf-8"))
    return [
        Message(**{**entry, **{name: tuple(entry.get(name, ())) for name in ("devices", "commands", "never")}})
        for entry in table["message"]
    ]


def amount(text: str) -> float:
    number, unit = text.split()
    return float(number) * FACTORS[unit]


def wrong_figures(message: Message, found: Diagnosis) -> list[str]:
    """The amounts that differ from what stands in the message by more than its last decimal."""
    expected, actual = dict(message.figures), found.figures
    got: dict[str, float | None] = {
        name: None if (size := getattr(actual, name)) is None else size.num_bytes
        for name in ("tried", "total", "free", "process", "allowed", "allocated", "reserved", "private_pools")
    }
    if "unallocated" in expected:
        expected["reserved"] = f"{amount(expected['allocated']) + amount(expected.pop('unallocated')):.0f} bytes"
    others = {str(pid): size.num_bytes for pid, size in actual.others}
    wrong = []
    for pid, text in expected.pop("others", {}).items():
        if abs(others.pop(pid, 0) - amount(text)) > 1:
            wrong.append(f"process {pid}: {text}")
    wrong += [f"process {pid} is not in the message" for pid in others]
    for name, value in got.items():
        if name not in expected:
            if value is not None:
                wrong.append(f"{name} is not in the message: {value}")
        elif value is None or abs(value - amount(expected[name])) > 2:
            wrong.append(f"{name}: {value} for {expected[name]}")
    if (message.device or 0) != (actual.device or 0):
        wrong.append(f"device {actual.device} for {message.device}")
    return wrong
