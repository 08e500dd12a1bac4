"""The protocol side of `memprof mcp`: lists the tools, and answers a call by running its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, ListToolsResult, TextContent
from mcp.types import Tool as ListedTool

from memprof.cli.mcp_tools import TOOLS, Tool
from memprof.cli.warm_process import Finished, WarmProcesses
from memprof.errors import MemprofError, printable
from memprof.version import __version__

_WARM_UP = "memprof.cli.warm_up"
_INSTRUCTIONS = (
    "Sizes are bytes. will_it_fit answers at once, by formulas; profile runs a model on a virtual GPU, and run_script "
    "a training script, which takes seconds to minutes. run_script executes the script's code."
)
_SHOWN_ERROR_LINES = 20


def serve(roots: tuple[Path, ...]) -> None:
    """Serve one client over stdin and stdout until it closes them; files of `roots` may be read and run."""
    anyio.run(_serve, roots)


async def _serve(roots: tuple[Path, ...]) -> None:
    tools = {tool.name: tool for tool in TOOLS}
    listed = ListToolsResult(tools=[_list_tool(tool) for tool in TOOLS])

    async def list_tools(*_: Any) -> ListToolsResult:
        return listed

    async def call_tool(_: Any, params: Any) -> CallToolResult:
        tool, values = tools.get(params.name), dict(params.arguments or {})
        if tool is None:
            return _fail(f"no such tool: {params.name}")
        try:
            arguments = tool.build_arguments(values, roots)
        except MemprofError as error:
            return _fail(str(error))
        command = await anyio.to_thread.run_sync(processes.start, arguments, str(values.get("text", "")))
        try:
            return _build_result(await anyio.to_thread.run_sync(command.wait, abandon_on_cancel=True))
        except anyio.get_cancelled_exc_class():  # by the client, or because it has gone
            command.terminate()
            raise

    server = Server(
        "memprof",
        version=__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    async with stdio_server() as (reading, writing):
        processes = WarmProcesses(_WARM_UP)  # which inherit none of the client's streams
        await server.run(reading, writing, server.create_initialization_options())


def _list_tool(tool: Tool) -> ListedTool:
    return ListedTool(
        name=tool.name,
        description=tool.description,
        input_schema=tool.build_input_schema(),
        output_schema=tool.build_output_schema(),
    )


def _build_result(finished: Finished) -> CallToolResult:
    """Return the command's JSON as the result, and its first screen as text; the command's error as one."""
    try:
        document = json.loads(finished.output)
    except ValueError:
        lines = finished.errors.splitlines()[-_SHOWN_ERROR_LINES:]
        return _fail("\n".join([f"memprof ended with exit code {finished.code}", *lines]))
    if "error" in document:
        error = document["error"]
        return _fail(str(MemprofError(error["problem"], value=error["value"], hint=error["hint"])))
    return CallToolResult(content=[_make_text(_render(document))], structured_content=document)


def _render(document: dict[str, Any]) -> str:
    """Return the first screen of a report or an analysis, of which the JSON is long; of others, the JSON."""
    from memprof.report.documents.analysis import Analysis
    from memprof.report.documents.report import Report
    from memprof.report.terminal import analysis_brief, brief
    from memprof.report.terminal.console import to_text

    if "stages" in document:
        return to_text(brief.render(Report.from_json(document)))
    if document.get("command") == "analyze":
        return to_text(analysis_brief.render(Analysis.from_json(document)))
    return json.dumps(document)


def _make_text(text: str) -> TextContent:
    return TextContent(text=printable(text))


def _fail(text: str) -> CallToolResult:
    return CallToolResult(content=[_make_text(text)], is_error=True)
