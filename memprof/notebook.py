"""Notebook magic: after `%load_ext memprof`, a cell with `%%memprof --gpu rtx-4090` runs on a virtual GPU."""

from __future__ import annotations

import argparse
import importlib.util
import linecache
import shlex
from typing import TYPE_CHECKING, Any, NoReturn

from memprof.errors import MemprofError, UsageError

if TYPE_CHECKING:
    from memprof.report.documents.report import Report


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            message, value="%%memprof", hint=f"as in: %%memprof --gpu rtx-4090; {self.format_usage().strip()}"
        )


def _make_parser() -> _Parser:
    parser = _Parser(prog="%%memprof", add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu", default="h100-80gb", metavar="NAME")
    parser.add_argument("--gpu-vram", metavar="GIB")
    parser.add_argument("--alloc-conf", metavar="SETTINGS")
    return parser


def register(shell: Any) -> None:
    """Register the cell magic `%%memprof` with IPython's `shell`."""

    def memprof(line: str, cell: str) -> Report | None:
        """Run the cell with "cuda" as a virtual GPU, and return the report: --gpu, --gpu-vram, --alloc-conf.

        In a notebook memory over the run is drawn above it, if plotly is installed.
        """
        try:
            report = run_cell(shell, line, cell)
            if getattr(shell, "kernel", None) is not None and importlib.util.find_spec("plotly"):
                _display(report.plot())
            return report
        except MemprofError as error:
            # As on the command line: a sentence, and no traceback of what is not the cell's.
            print(f"error: {error}")  # noqa: T201
            return None

    shell.register_magic_function(memprof, "cell", "memprof")


def _display(figure: Any) -> None:
    from IPython.display import display

    display(figure)  # type: ignore[no-untyped-call]


def run_cell(shell: Any, line: str, cell: str) -> Report:
    """Run a cell's code in the notebook's namespace on a virtual GPU; return the report.

    Args:
        shell: IPython's shell.
        line: the text after `%%memprof`: options as on the command line.
        cell: the source code of the cell.

    Raises:
        UsageError: an unknown GPU or option.
        EmptyTraceError: the cell put nothing on the GPU.
        Exception: any exception of the cell.
    """
    from memprof.api import virtual_gpu

    try:
        arguments = shlex.split(line)
    except ValueError as error:
        raise UsageError("the options cannot be read", value=line, hint=str(error)) from None
    options = _make_parser().parse_args(arguments)
    # Source lines of the report are then the cell's: `cell 3:2`. What counts cells is ahead of them in some releases.
    name = f"cell {len(shell.user_ns['In']) - 1}"
    code = shell.transform_cell(cell)
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    code_object = compile(code, name, "exec")
    with virtual_gpu(options.gpu, vram=options.gpu_vram, alloc_conf=options.alloc_conf) as gpu:
        exec(code_object, shell.user_ns)
    return gpu.report()
