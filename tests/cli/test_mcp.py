"""`memprof mcp`, asked by the client of the protocol's own SDK."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memprof
from memprof.cli.mcp_tools import TOOLS
from memprof.errors import UsageError
from tests.processes import ROOT
from tests.schemas import checked

SCRIPT = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
for _ in range(3):
    model(torch.zeros(64, 1024, device="cuda")).sum().backward()
"""
NAMES = {"will_it_fit", "profile", "run_script", "recommend", "doctor", "analyze_snapshot", "serving_plan"}
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.52 GiB"


def ask(folder: Path, questions: Callable[[Any], Awaitable[None]], *options: str) -> None:
    """Start the server in `folder`, and ask it."""
    pytest.importorskip("mcp")
    import anyio
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async def main() -> None:
        environment = {"PYTHONPATH": str(ROOT), "MEMPROF_CACHE": "off", "OMP_NUM_THREADS": "1"}
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "memprof", "mcp", *options], cwd=folder, env=environment
        )
        with open(os.devnull, "w") as errors:
            async with stdio_client(server, errlog=errors) as streams, ClientSession(*streams) as session:
                await session.initialize()
                await questions(session)

    anyio.run(main)


def test_questions_that_need_no_torch(tmp_path: Path) -> None:
    async def questions(session: Any) -> None:
        listed = {tool.name: tool for tool in (await session.list_tools()).tools}
        assert listed.keys() == NAMES
        assert listed["run_script"].input_schema["required"] == ["script"]

        found = await session.call_tool("will_it_fit", {"params": "1.2B", "gpu": "rtx-4090"})
        assert checked(found.structured_content)["command"] == "estimate"
        assert json.loads(found.content[0].text) == found.structured_content
        refused = await session.call_tool("run_script", {"script": "/etc/passwd"})
        assert refused.is_error and "may not be read" in refused.content[0].text
        unknown = await session.call_tool("will_it_fit", {"model": "gpt-nothing"})
        assert unknown.is_error and "unknown model" in unknown.content[0].text

    ask(tmp_path, questions)


@pytest.mark.nightly
def test_each_tool_answers_with_the_json_of_its_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with memprof.virtual_gpu("t4") as gpu:
        torch.nn.Linear(64, 64).cuda()
    gpu.save(tmp_path / "layer.memprof")

    async def questions(session: Any) -> None:
        answers = {
            "profile": {"model": "gpt2", "context_length": 64, "gpu": "t4"},
            "run_script": {"script": "train.py", "gpu": "t4", "arguments": ["--verbose"]},
            "doctor": {"text": OOM, "model": "gpt2"},
            "serving_plan": {"engine": "vllm", "model": "qwen3-4b", "gpu": "rtx-4090"},
            "analyze_snapshot": {"file": "layer.memprof", "top": 3},
            "recommend": {"model": "gpt2", "mode": "inference", "context_length": 64, "gpu": "t4"},
        }
        for tool, inputs in answers.items():
            found = await session.call_tool(tool, inputs)
            assert not found.is_error, found.content[0].text
            checked(found.structured_content)
            if tool in ("profile", "run_script"):
                assert found.content[0].text.startswith("Fits: ")
        failed = await session.call_tool("run_script", {"script": "sub/train.py"})
        assert failed.is_error and "no such file" in failed.content[0].text

    ask(tmp_path, questions)


@pytest.mark.nightly
def test_what_runs_ends_with_the_client(tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)")

    async def questions(session: Any) -> None:
        import anyio

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.call_tool, "run_script", {"script": "sleep.py"})
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()
        for _ in range(100):
            if subprocess.run(["kill", "-0", (tmp_path / "pid").read_text()], capture_output=True).returncode:
                break
            await anyio.sleep(0.1)
        else:
            pytest.fail("the script still runs")

    ask(tmp_path, questions)


def tool(name: str) -> Any:
    return next(one for one in TOOLS if one.name == name)


def test_inputs_become_options(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    values = {"script": script, "gpu": "t4", "suggest_patch": True, "worst_batch": False, "arguments": ["--json", 1]}
    words = tool("run_script").build_arguments(values, (tmp_path,))
    assert words == ["run", "--json", "--gpu=t4", "--suggest-patch", script, "--json", "1"]
    assert tool("profile").build_arguments({"model": "org/name"}, (tmp_path,))[-1] == "--model=org/name"


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("run_script", {}, "an input is missing"),
        ("run_script", {"script": "train.py", "save": "x"}, "unknown input"),
        ("run_script", {"script": "../train.py"}, "may not be read"),
        ("run_script", {"script": "link.py"}, "may not be read"),
        ("run_script", {"script": "inside/none.py"}, "no such file"),
        ("run_script", {"script": "a\0b"}, "may not be read"),
        ("run_script", {"script": "--save=x"}, "no such file"),
        ("doctor", {"file": "/etc/hostname"}, "may not be read"),
        ("profile", {"model": "../model.py:build"}, "may not be read"),
        ("will_it_fit", {"model": "/etc/passwd"}, "may not be read"),
        ("will_it_fit", {"model": "~"}, "may not be read"),
        ("doctor", {"file": "~nobody-of-this-name/log"}, "may not be read"),
    ],
)
def test_other_files_are_out_of_reach(
    name: str, values: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    for outside in ("train.py", "model.py"):
        (tmp_path / outside).touch()
    (root / "link.py").symlink_to(tmp_path / "train.py")
    monkeypatch.chdir(root)
    with pytest.raises(UsageError, match=problem):
        tool(name).build_arguments(values, (root,))


def test_every_option_of_a_tool_exists() -> None:
    for one in TOOLS:
        properties = one.build_input_schema()["properties"]
        assert all(about["description"] and about["type"] for about in properties.values())
        assert one.build_output_schema()["type"] == "object"
        assert one.description
