"""Of the recipes that take half a minute and more, whose own tests are for the night: what their pages show of a part
is what it prints.
"""

from __future__ import annotations

import pytest

from tests.lanes import by_day
from tests.processes import ROOT, python
from tests.recipes.conftest import PAGES

PARTS = {
    "2-pythia-vocabulary": """
leave_out(audit, [], "model_claims", "memory_claims")
leave_out(run, None, "show_kernels")
sys.argv[1:] = ["--no-measure"]
run.main()
""",
    "1-npt-weight-delta": """
leave_out(audit, [], "claims", "rows", "configurations")
run.main()
""",
    "3-precision-and-vram-guide": """
leave_out(audit, [], "steps", "gpus", "claims")
leave_out(precision, {}, "measured")
run.main()
""",
    "4-npt-high-num-ranks": """
leave_out(audit, [], "claims")
run.COUNTS = run.COUNTS[:1]
sys.argv[1:] = ["--no-clock"]
run.main()
""",
    "5-long-context-logits": """
for length in audit.lengths():
    print(f"{length.tokens:,} tokens: logits of {format_bytes(length.logits_bytes)}")
    print(f"(largest tensor with a vocabulary {format_bytes(length.largest_bytes)})")
claim = audit.placement_claim()
print(f"* {claim.text}: {claim.verdict.upper()}")
""",
}
BEGIN = """
import sys
from memprof.units import format_bytes
sys.path.insert(0, sys.argv[1])
import audit, run
precision = sys.modules.get("precision")

def leave_out(module, answer, *names):
    for name in names:
        assert hasattr(module, name), name
        setattr(module, name, lambda *found: answer)
"""


@pytest.mark.parametrize("name", by_day(PARTS, "4-npt-high-num-ranks"))
def test_the_page_shows_what_a_part_prints(name):
    done = python("-c", BEGIN + PARTS[name], ROOT / "recipes" / name, folder=ROOT)
    assert done.exit_code == 0, done.stderr
    (page,) = PAGES.glob(f"{name[0]}-*.md")
    text = " ".join(page.read_text(encoding="utf-8").split())
    printed = [" ".join(line.split()) for line in done.stdout.splitlines() if line]
    assert len(printed) > 3 and not [line for line in printed if line not in text]
