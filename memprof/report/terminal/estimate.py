"""The result of `memprof estimate` as plain text, without rich, whose import takes longer than the estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from memprof.device.catalog import Gpu
from memprof.estimate.explain import CONSTANTS, format_formula, list_assumptions, list_saved_tensors
from memprof.estimate.methods import BANDED_KINDS, METHOD_BY_KEY, METHODS, WEIGHT_DTYPES
from memprof.estimate.table import (
    BORDERLINE,
    DEVICE_USED,
    FITS,
    MEMORY_KINDS,
    NO,
    Cell,
    Estimate,
    SimulatedRun,
    read_band,
)
from memprof.report.terminal.layout import align_columns, note_dropped_columns, output_width, wrap_line
from memprof.units import MIB, format_bytes, gib

_WORD_BY_VERDICT = {FITS: "fits", BORDERLINE: "borderline", NO: "does not fit"}


def render_estimate(
    estimate: Estimate,
    gpus: tuple[Gpu, ...],
    runs: Mapping[str, SimulatedRun] | None = None,
    *,
    explain: bool = False,
    quiet: bool = False,
) -> str:
    """Return an estimate as text; `explain` adds bands, formulas and assumptions, `quiet` leaves only the answer."""
    lines = [*_format_answer(estimate, gpus)]
    if not quiet:
        lines += [*_format_heading(estimate), *_format_methods(estimate, gpus)]
        lines += ["", *_format_sharded(estimate)] if estimate.sharded else []
        lines += [] if runs is None else ["", *_format_simulated(estimate, runs)]
        lines += ["", *_format_gpus(estimate, gpus), "", *_format_explanation(estimate)] if explain else []
        lines += [] if explain else ["More: --explain (bands, counts of GPUs, formulas, assumptions), --exact (a run)"]
    return "".join(f"{piece}\n" for line in lines for piece in _wrap_line(line, output_width()))


def _wrap_line(line: str, width: int) -> list[str]:
    text = line.lstrip()
    return [line] if len(line) <= width else wrap_line(text, width, indent=line[: len(line) - len(text)])


def _format_answer(estimate: Estimate, gpus: Sequence[Gpu]) -> Iterator[str]:
    """Yield a sentence with what the model needs for each use that is estimated, and whether a single GPU has it."""
    uses = {"inference": "inference", "lora": "LoRA", "full": "full training"}
    verdicts = _judge_methods(estimate, gpus)[1] if len(gpus) == 1 else {}
    sizes = [
        f"{gib(cell.device_bytes)} GiB for {name}{f' ({_WORD_BY_VERDICT[verdicts[key]]})' if verdicts else ''}"
        for key, name in uses.items()
        if (cell := estimate.cells.get((key, estimate.dtype))) is not None
    ]
    if sizes:
        on_gpu = f" on {gpus[0].key}" if verdicts else ""
        yield f"{estimate.subject.name} in {estimate.dtype}{on_gpu}: about {', '.join(sizes)}."


def _format_heading(estimate: Estimate) -> Iterator[str]:
    subject = estimate.subject
    weights = estimate.cells.get(("weights", estimate.dtype))
    name = subject.name if subject.is_derived else f"{subject.name}: {subject.num_parameters:,} parameters"
    size = None if weights is None else weights.allocated_bytes
    suffix = "" if size is None else f" in {estimate.dtype}: {format_bytes(size)} of weights ({size / 1e9:,.1f} GB)"
    yield name + suffix
    tokens = f"context {estimate.context_length:,} tokens, batch size {estimate.batch_size}"
    if estimate.lengths is not None:
        at_most = f"{estimate.context_length:,} at most"
        tokens = f"batches of {estimate.batch_size} with lengths {estimate.lengths}: {at_most}"
    yield f"{tokens}. In GiB, by formula: device memory used, but in the first row the weights alone."
    if subject.is_derived:
        yield "~ depends on a shape that was derived from the number of parameters: a Llama of this size (--explain)"
    if subject.geometry_error:
        yield f"Weights alone: {subject.geometry_error}; --exact runs the model on the virtual GPU."


def _format_cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    size = cell.allocated_bytes if cell.method.kind == "weights" else cell.device_bytes
    return f"{'~' if cell.is_derived else ''}{gib(size)}"


def _format_methods(estimate: Estimate, gpus: Sequence[Gpu]) -> Iterator[str]:
    yield ""
    column, fit = _judge_methods(estimate, gpus)
    columns = dict.fromkeys((*WEIGHT_DTYPES, estimate.dtype))
    names = [f">{name}*" if name == estimate.dtype else f">{name}" for name in columns]
    rows = []
    for method in METHODS:
        cells = [estimate.cells.get((method.key, name)) for name in columns]
        if any(cells):
            title = next(cell.title for cell in cells if cell is not None)
            rows.append([title, *map(_format_cell, cells), fit.get(method.key, "-")])
    others = [name for name in columns if name != estimate.dtype]
    yield from _format_table(["", *names, column], rows, optional=others)


def _judge_methods(estimate: Estimate, gpus: Sequence[Gpu]) -> tuple[str, dict[str, str]]:
    """Return the header of a column for the dtype marked `*`, and by method the smallest of `gpus` that it fits, or of
    a single one the verdict."""
    cells = estimate.list_column()
    if len(gpus) == 1:
        return f"* on {gpus[0].key}", {cell.method.key: cell.judge_fit(gpus[0]) for cell in cells}
    by_size = sorted(gpus, key=lambda gpu: gpu.total_bytes)
    return "* smallest GPU", {cell.method.key: _find_smallest(cell, by_size) for cell in cells}


def _find_smallest(cell: Cell, by_size: Sequence[Gpu]) -> str:
    """Return the smallest GPU that `cell` fits for sure, with its GiB."""
    fitting = (f"{gpu.key} ({gib(gpu.total_bytes)})" for gpu in by_size if cell.judge_fit(gpu) == FITS)
    return next(fitting, "none")


def _format_gpus(estimate: Estimate, gpus: tuple[Gpu, ...]) -> Iterator[str]:
    yield f"* {estimate.dtype} on the {len(gpus)} GPU{'s' * (len(gpus) != 1)} looked at:"
    headers = ["", ">allocated", ">reserved", ">device used, band"]
    headers += [f">{FITS}", f">{BORDERLINE}", f">{NO}", "smallest that fits"] if len(gpus) > 1 else ["verdict"]
    rows = []
    by_size = sorted(gpus, key=lambda gpu: gpu.total_bytes)
    for cell in estimate.list_column():
        ranges = cell.compute_ranges()
        device, low, high = (gib(size) for size in ranges[DEVICE_USED])
        row = [cell.title, *(gib(ranges[kind][0]) for kind in MEMORY_KINDS[:2]), f"{device:>6}  {f'{low}-{high}':>11}"]
        verdicts = {gpu.key: cell.judge_fit(gpu) for gpu in gpus}
        if len(gpus) == 1:
            rows.append([*row, verdicts[gpus[0].key]])
            continue
        fits, borderline, no = (list(verdicts.values()).count(verdict) for verdict in (FITS, BORDERLINE, NO))
        rows.append([*row, *map(str, (fits, borderline, no)), _find_smallest(cell, by_size)])
    yield from _format_table(headers, rows, optional=("allocated", "reserved", NO, BORDERLINE, "smallest that fits"))
    if len(gpus) == 1:
        yield f"{gpus[0].name}: {gib(gpus[0].total_bytes)} GiB"
    yield f"Within the band a GPU is {BORDERLINE}. Bands, against published figures (`memprof help estimate`):"
    rows = []
    for method in BANDED_KINDS:
        bands = [read_band(kind, method) for kind in MEMORY_KINDS]
        widths = [f"{band.low:+.0%} to {band.high:+.0%}" for band in bands]
        figures = sum(band.figures for band in bands)
        inside, held_out = (
            f"{sum(band.figures * getattr(band, name) for band in bands) / max(1, figures):.0%}"
            for name in ("inside", "held_out")
        )
        rows.append([method, *widths, str(figures), *((inside, held_out) if figures else ("-", "-"))])
    yield from _format_table(["", *(f">{kind}" for kind in MEMORY_KINDS), ">figures", ">within", ">held out"], rows)
    yield "held out: within a band in which the figure's source had no part"


def _format_sharded(estimate: Estimate) -> Iterator[str]:
    strategies = list(dict.fromkeys(cell.strategy for cell in estimate.sharded))
    is_data_parallel = any(cell.strategy == "DDP" for cell in estimate.sharded)
    subject = "each with a micro-batch of its own" if is_data_parallel else "of the rank that needs most"
    yield f"{estimate.dtype} on each of {estimate.gpus} GPUs, {subject}:"
    rows: dict[str, list[str]] = {}
    for cell in estimate.sharded:
        rows.setdefault(cell.method.key, [cell.title]).append(gib(cell.device_bytes))
    yield from _format_table(["", *(f">{name}" for name in strategies)], [*rows.values()])


def _format_table(headers: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str] = ()) -> Iterator[str]:
    lines, dropped_names = align_columns(headers, rows, output_width(), optional)
    yield from lines
    if dropped_names:
        yield note_dropped_columns(dropped_names)


def _format_simulated(estimate: Estimate, runs: Mapping[str, SimulatedRun]) -> Iterator[str]:
    yield "Beside the virtual GPU, which ran the model (MiB allocated at the peak):"
    for key, run in runs.items():
        cell = estimate.cells.get((key, estimate.dtype))
        title = METHOD_BY_KEY[key].title.strip()
        if key.endswith("checkpointing"):
            title = f"{key.removesuffix('-checkpointing')} with checkpointing"
        if cell is None:
            yield f"{title}: simulated {run.allocated_bytes / MIB:,.1f}, peak in {run.stage}"
            continue
        error = cell.allocated_bytes / run.allocated_bytes - 1
        yield f"{title}: {error:+.2%} ({cell.peak.name}; simulated: {run.stage})"
        yield f"  {'':20}{'closed form':>14}{'simulated':>14}{'difference':>14}"
        for name, (estimated, simulated) in _merge_terms(cell.peak.terms, run.categories).items():
            sizes = (estimated, simulated, estimated - simulated)
            yield "  " + f"{name:20}" + "".join(f"{size / MIB:>14,.1f}" for size in sizes)


def _merge_terms(estimated: Mapping[str, int], simulated: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return (estimated, simulated) bytes by category, without those below 50,000 bytes in both, and their totals."""
    # The closed form counts a layer's temporaries as activations, and has no inputs and buffers.
    aliases = {"inputs": "activations", "buffers": "activations", "fragmentation": "rounding"}
    if not estimated.get("temporaries"):
        aliases["temporaries"] = "activations"
    sums: dict[str, list[int]] = {}
    for index, terms in enumerate((estimated, simulated)):
        for name, size in terms.items():
            sums.setdefault(aliases.get(name, name), [0, 0])[index] += size
    rows = {name: (a, b) for name, (a, b) in sums.items() if max(a, b) >= 50_000}
    return {**rows, "together": (sum(estimated.values()), sum(simulated.values()))}


def _format_explanation(estimate: Estimate) -> Iterator[str]:
    yield f"{estimate.dtype}, term by term (MiB):"
    for cell in estimate.list_column():
        yield f"{cell.method.key}: the peak is at: {cell.peak.name}"
        for name, size in cell.peak.terms.items():
            if size:
                yield f"  {name:18}{size / MIB:>12,.1f}  {format_formula(estimate, cell, name)}"
    training = estimate.cells.get(("full", estimate.dtype)) or estimate.cells.get(("lora", estimate.dtype))
    if training is not None:
        yield ""
        yield f"What a layer keeps for the backward ({training.method.key}), in bytes per token:"
        for name, per_token in list_saved_tensors(estimate, training):
            yield f"  {per_token:>12,.0f}  {name}"
    yield ""
    yield "Constants:"
    for constant in CONSTANTS:
        yield f"  {constant.name}: {constant.value}"
        yield f"      {constant.source}"
    yield ""
    yield "Assumptions:"
    for sentence in list_assumptions(estimate):
        yield f"  - {sentence}"
