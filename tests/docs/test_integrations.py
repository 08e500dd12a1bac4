"""docs/integrations.md: what other tools are given to read is what memprof prints, and its tables are complete."""

from __future__ import annotations

import json
import re

from memprof.cli.mcp_tools import TOOLS
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")


def test_the_problem_matcher_finds_the_line_to_change() -> None:
    """In the output that README.md shows, which tests/docs/test_docs.py keeps current."""
    blocks = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)]
    (pattern,) = (block["tasks"][0]["problemMatcher"]["pattern"] for block in blocks if "tasks" in block)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    output = text.partition("<!-- output of: memprof run --gpu rtx-4090 docs/train.py -->")[2].partition("<!-- end")[0]
    found = [match for line in output.splitlines() if (match := re.search(pattern["regexp"], line))]
    assert [match.group(pattern["file"], pattern["line"]) for match in found] == [("docs/train.py", "20")]
    assert found[0][pattern["message"]].startswith("keep the tensors of each step in host memory")


def test_every_tool_of_the_server_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `memprof (\w+).* \| `([\w-]+)\.json` \|$", PAGE, re.MULTILINE)
    assert rows == [(tool.name, tool.command, tool.schema) for tool in TOOLS]
