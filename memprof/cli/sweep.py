"""`memprof sweep`: a grid of batches, contexts, GPUs and fixes, as a table with what fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memprof.cli.exits import ExitCode
from memprof.cli.options import FILES_PANEL, FixOptions, reuse_option
from memprof.cli.output import ExplainOptions, PageOptions, TableOptions, print_result
from memprof.cli.progress import Progress, show_progress
from memprof.errors import UsageError
from memprof.run_spec import RunSpec
from memprof.spec import option, repeat_option

if TYPE_CHECKING:
    from memprof.flows.sweep.axes import Grid
    from memprof.report.documents.sweep import Sweep

EXAMPLES = """
memprof sweep --model qwen3-4b --context-length 4k,16k --batch-size 1,2,4
memprof sweep --model-size 1B,4B --gpu t4,rtx-4090 --fix none,auto
memprof sweep --gpu t4,rtx-4090 train.py --batch-size {batch} -- batch=8,16,32
memprof sweep --model gpt2 --batch-size 1,4 --executor dask:tcp://HOST:8786
"""
MAIN_OPTIONS = (
    "command", "model", "model_is_size", "gpu", "gpu_vram_bytes", "context_length", "batch_size", "fix", "dtype",
    "optimizer", "adapter", "exact", "executor", "workers", "store", "html", "csv", "parquet", "full", "as_json",
    "help_all",
)  # fmt: skip
SETTINGS = {"allow_interspersed_args": False}  # arguments after the script's name are passed to the script
_RUNNING_PANEL = "Running"
_SEPARATOR = "--"


def _list_option(name: str, **changes: Any) -> Any:
    """Return a field with the option `name` of `memprof profile`, for several values with commas between them."""
    return reuse_option(
        name, default=None, note="Or a list of them.", parse=None, is_count=False, choices=(), **changes
    )


@dataclass(frozen=True, kw_only=True)
class SweepAxes:
    """The options of `memprof sweep` that may have several values: the axes of the grid."""

    model: str | None = _list_option("model")
    model_is_size: bool = reuse_option("model_is_size", note="Or a list of them.")
    context_length: str | None = _list_option("context_length")
    batch_size: str | None = _list_option("batch_size", unset="1")
    gradient_accumulation: str | None = _list_option("gradient_accumulation", unset="1")
    new_tokens: str | None = _list_option("new_tokens")
    mode: str | None = _list_option("mode", unset="train")
    dtype: str | None = _list_option("dtype")
    amp: str | None = _list_option("amp")
    quantize: str | None = _list_option("quantize")
    optimizer: str | None = _list_option("optimizer", unset="adamw")
    adapter: str | None = _list_option("adapter")
    lora_rank: str | None = _list_option("lora_rank")
    attention: str | None = _list_option("attention")
    gpu: str | None = _list_option("gpu", unset="h100-80gb")
    gpu_vram_bytes: bool = reuse_option("gpu_vram_bytes", default=False, note="Or a list of them.", parse=None)
    gpus: str | None = _list_option("gpus", unset="1")
    fix: str | None = repeat_option(
        "fix", cls=FixOptions, note="Or a list of them: none, auto, or names joined by +.", unset="none"
    )


@dataclass(frozen=True, kw_only=True)
class SweepConstants:
    """The options of `memprof sweep` that are the same for all cells."""

    trust_remote_code: bool = reuse_option("trust_remote_code")
    vocab_size: int | None = reuse_option("vocab_size")
    lengths: str | None = reuse_option("lengths")
    steps: int | None = reuse_option("steps")
    dataset_batches: int | None = reuse_option("dataset_batches")
    double_quant: bool = reuse_option("double_quant")
    optimizer_impl: str | None = reuse_option("optimizer_impl")
    zero_grad: str = reuse_option("zero_grad")
    freeze: str | None = reuse_option("freeze")
    evaluate: bool = reuse_option("evaluate")
    lora_targets: str | None = reuse_option("lora_targets")
    lora_dropout: float = reuse_option("lora_dropout")
    sdpa_backend: str | None = reuse_option("sdpa_backend")
    compile: bool = reuse_option("compile")
    activation_checkpointing: bool = reuse_option("activation_checkpointing")
    workspaces: bool = reuse_option("workspaces")
    alloc_conf: str | None = reuse_option("alloc_conf")
    parallel: str | None = reuse_option("parallel")
    host_memory_bytes: int | None = reuse_option("host_memory_bytes")
    worst_batch: bool = repeat_option("worst_batch", cls=RunSpec)
    no_compile: bool = repeat_option("no_compile", cls=RunSpec)
    no_stubs: bool = repeat_option("no_stubs", cls=RunSpec)
    module: bool = option(False, "Script", "SCRIPT is the name of a module, as for `python -m`.", flag="-m")


# Options of a script's run, beside the axes that a script has.
_SCRIPT_OPTIONS = ("steps", "alloc_conf", "host_memory_bytes", "worst_batch", "no_compile", "no_stubs")
_ONLY_SCRIPT_OPTIONS = ("worst_batch", "no_compile", "no_stubs", "module")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ExplainOptions, TableOptions, PageOptions):
    """Options of `memprof sweep`: where cells are run, and what is written."""

    exact: bool = reuse_option("exact", note="Every cell is run.")
    executor: str | None = option(
        None, _RUNNING_PANEL, "Where cells are run: dask:tcp://HOST:PORT of a scheduler (`memprof help sweep`).",
        metavar="NAME", unset="processes of this machine",
    )  # fmt: skip
    workers: int | None = option(
        None, _RUNNING_PANEL, "Cells that are run at once.", metavar="COUNT", is_count=True,
        unset="by cores and free memory; 1 for a script and code of your own; those of the scheduler",
    )  # fmt: skip
    store: str | None = option(
        None, _RUNNING_PANEL,
        "The folder of answers, or its address (s3://BUCKET/FOLDER), which a sweep goes on from; several may share it.",
        metavar="FOLDER", unset="below the cache's",
    )  # fmt: skip
    cache: bool = reuse_option("cache")
    parquet: Path | None = option(
        None, FILES_PANEL, "Write the table of cells into this Parquet file too.", metavar="FILE"
    )
    full: bool = reuse_option("full", note="It has every cell.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parquet is not None:
            from memprof.fixes.catalog import check_package
            from memprof.report.export.parquet_kind import PARQUET
            from memprof.trace.files import check_output_path

            check_package("--parquet", "pyarrow")
            check_output_path(self.parquet, PARQUET, force=self.force)

    def write_parquet(self, document: Sweep) -> None:
        """Write the table of cells if --parquet is given."""
        if self.parquet is not None:
            from memprof.report.export.parquet import write_parquet

            with self._report_file(f"Cells: {self.parquet}"):
                write_parquet(document, "cells", self.parquet, force=self.force)


def sweep(
    axes: SweepAxes,
    constants: SweepConstants,
    output: SweepOptions,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT [ARGS]... -- NAME=VALUES...]",
            help="A script with places such as {batch} in its arguments, and the values of each place.",
        ),
    ] = None,
) -> None:
    """Say of a grid of models, batches, contexts, GPUs and fixes what fits, with memory, time and the fix needed.

    Lists have commas between their values; the grid has a cell for each combination. Only what is near the limit is
    run: the analytical estimate and other runs decide the rest (--exact runs all). Answers are stored as they come: the
    same command goes on where an earlier one was ended. Exit code 0: something fits; 3: nothing does.
    """
    from memprof.platforms import require_posix

    require_posix("sweep")
    grid = _build_script_grid(axes, constants, command) if command else _build_spec_grid(axes, constants)
    with show_progress(quiet=output.quiet) as progress:
        document = _run(grid, output, progress)
    print_result(document, output, "sweep", full=output.full, explain=output.explain)
    output.write_parquet(document)
    raise typer.Exit(_choose_exit_code(document))


def _run(grid: Grid, output: SweepOptions, progress: Progress) -> Sweep:
    from memprof.device.visible import hide_gpus
    from memprof.flows.sweep.run import run_sweep

    hide_gpus()
    return run_sweep(
        grid, output.executor, exact=output.exact, store=output.store, cache=output.cache, workers=output.workers,
        progress=progress,
    )  # fmt: skip


def _choose_exit_code(document: Sweep) -> int:
    if document.ended == "interrupted":
        return ExitCode.INTERRUPTED
    if document.num_fitting:
        return ExitCode.FAILED if document.ended == "stopped" else ExitCode.DONE
    has_verdict = any(row.answer.fits is False for row in document.rows)
    return ExitCode.DOES_NOT_FIT if has_verdict and document.ended == "complete" else ExitCode.FAILED


def _build_spec_grid(axes: SweepAxes, constants: SweepConstants) -> Grid:
    for name in _ONLY_SCRIPT_OPTIONS:
        if getattr(constants, name):
            flag = "-m" if name == "module" else "--" + name.replace("_", "-")
            raise UsageError(f"{flag} is for a script", value="no script is given", hint=f"leave out {flag}")
    from memprof.flows.sweep.axes import build_spec_grid

    values = _list_given(axes) | _list_given(constants)
    if axes.gpu_vram_bytes:
        values["gpu_vram_bytes"] = values.pop("gpu")
    return build_spec_grid(values)


def _build_script_grid(axes: SweepAxes, constants: SweepConstants, command: Sequence[str]) -> Grid:
    if not constants.module and command[0].endswith((".yaml", ".yml", ".toml")):
        raise UsageError("this is no script", value=command[0], hint=f"memprof sweep --config {command[0]}")
    values = _list_given(axes)
    options = {name: value for name, value in _list_given(constants).items() if name in _SCRIPT_OPTIONS}
    others = {*values, *_list_given(constants)} - {"gpu", "gpu_vram_bytes", "gpus", "fix", "module"} - {*options}
    if others:
        flag = "--" + min(others).replace("_", "-")
        raise UsageError(f"{flag} is for models", value=command[0], hint=f"leave out {flag}, or the script")
    from memprof.flows.sweep.axes import build_script_grid, parse_values

    if axes.gpu_vram_bytes:
        values["gpu_vram_bytes"] = values.pop("gpu")
    if axes.gpus is not None:
        number, *more = parse_values("gpus", values.pop("gpus"))
        if more:
            raise UsageError("a script has one number of GPUs", value=f"--gpus {axes.gpus}", hint="give one number")
        options["gpus"] = number
    words = list(command)
    place = len(words) - 1 - words[::-1].index(_SEPARATOR) if _SEPARATOR in words else len(words)
    script_axes: dict[str, str] = {}
    for name, named in map(_parse_axis, words[place + 1 :]):
        if name in script_axes:
            hint = f"write {name}={script_axes[name]},{named}"
            raise UsageError("an axis of the script is given twice", value=f"{name}={named}", hint=hint)
        script_axes[name] = named
    words = ["-m", *words[:place]] if constants.module else words[:place]
    return build_script_grid(words, script_axes, values | options)


def _parse_axis(word: str) -> tuple[str, str]:
    """Return name and values of a script's axis, such as batch=1,2,4."""
    name, separator, values = word.partition("=")
    if not separator or not name.isidentifier():
        raise UsageError("no axis of the script", value=word, hint="write NAME=VALUES after --, such as batch=1,2,4")
    return name, values


def _list_given(options: SweepAxes | SweepConstants) -> dict[str, Any]:
    """Return the fields of `options` that differ from their defaults."""
    fields = ((field, getattr(options, field.name)) for field in dataclasses.fields(options))
    given = {field.name: value for field, value in fields if value != field.default}
    return {name: value for name, value in given.items() if name != "gpu_vram_bytes"}
