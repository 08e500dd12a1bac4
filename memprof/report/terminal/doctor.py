"""The diagnoses of `memprof doctor` as plain text, without rich, whose import takes longer than the diagnosis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from memprof.doctor.diagnosis import Candidate, Cause, Diagnosis, EngineFigures, MessageSizes
from memprof.report.terminal.layout import WIDTH, output_width, wrap_line
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.doctor.installation import Installation

_MAX_ALTERNATIVES = 2  # Tensors shown after the likeliest.
_LABELS = {
    "tried": "requested",
    "total": "capacity",
    "free": "free",
    "process": "this process",
    "allocated": "allocated",
    "reserved": "reserved",
    "private_pools": "private pools",
    "allowed": "limit",
    "outside": "outside torch",
}
_CACHE_LABELS = {"tried": "needed", "free": "available"}  # of an engine's KV cache  # fmt: skip


def render_diagnoses(diagnoses: Sequence[Diagnosis], *, quiet: bool = False) -> str:
    """Return the first diagnosis in full, and one line for each other one; `quiet` leaves only the first title."""
    if quiet:
        return "\n".join(_wrap([diagnoses[0].title], "")) + "\n"
    lines = _render_diagnosis(diagnoses[0])
    if len(diagnoses) > 1:
        lines += ["", "Also in this log"]
        lines += _wrap((f"line {d.line}: {d.title}{_format_count(d)}" for d in diagnoses[1:]), "  ")
    return "\n".join(lines) + "\n"


def _format_count(diagnosis: Diagnosis) -> str:
    return f" ({diagnosis.count} times)" if diagnosis.count > 1 else ""


def _render_diagnosis(diagnosis: Diagnosis) -> list[str]:
    lines = _wrap([f"{diagnosis.title}{_format_count(diagnosis)}"], "")
    lines += _wrap([f"line {diagnosis.line}, {diagnosis.source}: {diagnosis.message}"], "  ")
    sizes = _format_sizes(diagnosis.figures, _CACHE_LABELS if diagnosis.cause is Cause.KV_CACHE else {})
    if diagnosis.engine is not None:
        sizes += _format_engine_figures(diagnosis.engine)
    parts = (("Figures", sizes), ("Why", diagnosis.explanation), ("Where", diagnosis.where))
    for title, sentences in parts:
        if sentences:
            lines += ["", title, *_wrap(sentences, "  ")]
    if diagnosis.tensors:
        first, *alternatives = diagnosis.tensors
        lines += ["", "Which tensor", *_wrap([_format_tensor(first)], "  ")]
        lines += _wrap((f"or {_format_tensor(candidate)}" for candidate in alternatives[:_MAX_ALTERNATIVES]), "  ")
    return lines + render_steps(diagnosis)


def render_steps(diagnosis: Diagnosis) -> list[str]:
    """Return the lines of what to try, with a heading; none if there is nothing."""
    lines = ["", "Try in order"] if diagnosis.steps else []
    for number, step in enumerate(diagnosis.steps, start=1):
        lines += _wrap([f"{step.what}"], f"{number:>3}. ", "     ")
        if step.command:
            lines.append(f"       {step.command}")
    return lines


def _format_sizes(sizes: MessageSizes, labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the sizes in one line, or none; `labels` replaces labels by field."""
    labels = {**_LABELS, **labels}
    parts = [f"{label} {size.text}" for name, label in labels.items() if (size := getattr(sizes, name)) is not None]
    parts += [f"process {pid} {size.text}" if pid else f"others {size.text}" for pid, size in sizes.others]
    device_note = f" (device {sizes.device})" if sizes.device is not None else ""
    return (", ".join(parts) + device_note,) if parts else ()


def _format_engine_figures(figures: EngineFigures) -> tuple[str, ...]:
    """Return the engine's figures in one line, or none."""
    parts = (
        ("", figures.missing and f"{figures.missing.text} missing"),
        ("length ", figures.length and f"{figures.length:,} tokens"),
        ("at most ", figures.fitting_length and f"{figures.fitting_length:,} tokens fit"),
        ("batch ", figures.batch and f"{figures.batch:,}"),
        ("fraction of the GPU ", figures.fraction),
        ("at least ", figures.least_fraction and f"{figures.least_fraction:.4f} of the GPU"),
    )
    line = ", ".join(f"{label}{value}" for label, value in parts if value)
    return (line,) if line else ()


def _format_tensor(candidate: Candidate) -> str:
    shape = " x ".join(map(str, candidate.shape))
    relation = ", if the model is" if candidate.is_guess else " of"
    model = f"{relation} {candidate.model}" if candidate.model else ""
    description = f"{candidate.role}{model} ({candidate.why})"
    return f"{format_bytes(candidate.num_bytes)} = {shape} x {candidate.dtype}: {description}"


def _wrap(lines: Iterable[str], indent: str, hanging: str | None = None) -> list[str]:
    width = min(WIDTH, output_width())
    return [piece for line in lines for piece in wrap_line(line, width, indent, hanging)]


def render_installation(installation: Installation, *, quiet: bool = False) -> str:
    """Return facts and problems of an installation; `quiet` leaves only the problems."""
    lines = [] if quiet else [*(f"{name:<22} {value}" for name, value in installation.facts), ""]
    if not installation.findings:
        lines.append("Nothing wrong was found.")
    for finding in installation.findings:
        lines += _wrap([f"{finding.severity}: {finding.problem}"], "")
        if finding.hint:
            lines += _wrap([finding.hint], "  ")
        if finding.command:
            lines.append(f"    {finding.command}")
        if finding.source:
            lines += _wrap([f"source: {finding.source}"], "  ")
    return "\n".join(lines) + "\n"
