"""docs/security.md says how many adversarial inputs there are, as the tests count them.

`MEMPROF_BLESS=1 pytest tests/adversarial/test_counts.py` writes the table anew.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
_TABLE = re.compile(r"(?<=<!-- table of adversarial inputs -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
MODULES = ("bombs", "files", "options", "surroundings")


def counted() -> dict[str, int]:
    found: dict[str, int] = {}
    for name in MODULES:
        found |= importlib.import_module(f"tests.adversarial.test_{name}").INPUTS
    return found


def test_the_table_is_current() -> None:
    inputs = counted()
    rows = [f"| {name} | {number:,} |" for name, number in inputs.items()]
    total = f"| total | {sum(inputs.values()):,} |"
    wanted = "\n".join(["| adversarial inputs | number |", "|---|---:|", *rows, total, ""])
    text = PAGE.read_text(encoding="utf-8")
    if os.environ.get("MEMPROF_BLESS"):
        PAGE.write_text(_TABLE.sub(lambda _: wanted, text), encoding="utf-8")
    else:
        assert _TABLE.findall(text) == [wanted], "MEMPROF_BLESS=1 pytest tests/adversarial/test_counts.py"
    assert sum(inputs.values()) >= 1500
