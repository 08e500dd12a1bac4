"""Rule `device-mismatch`: an operator has arguments on two devices, which raises an error on a real GPU."""

from __future__ import annotations

from memprof.findings.evidence import file_and_line, format_shape, suggest_fixes
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.trace.events import NONE, DeviceMismatch, Operand, Trace, is_gpu, without_numbers
from memprof.trace.mismatch import find_misplaced_operand, format_mismatch_error


@rule(20, guides_search=True)
def find(context: Context) -> list[Finding]:
    """Return one finding per source line with a mismatch, which counts the repetitions in other layers and steps."""
    trace = context.ledger.trace
    groups: dict[tuple[object, ...], list[DeviceMismatch]] = {}
    for mismatch in trace.mismatches:
        operands = tuple((o.device, len(o.shape), o.dtype, o.source) for o in mismatch.operands)
        groups.setdefault((mismatch.op, mismatch.source, operands), []).append(mismatch)
    fixes = suggest_fixes(context, "device-mismatch")
    return [
        _finding(trace, group, fixes if any(not is_gpu(o.device) for o in group[0].operands) else ())
        for group in groups.values()
    ]


def _finding(trace: Trace, group: list[DeviceMismatch], fixes: tuple[str, ...]) -> Finding:
    mismatch = group[0]
    op = trace.ops[mismatch.op]
    module = None if mismatch.module == NONE else trace.modules[mismatch.module].path
    line = trace.source_at(mismatch.source)
    odd, other = find_misplaced_operand(mismatch.operands)
    times = f", {len(group)} times" if len(group) > 1 else ""
    inside = "" if module is None else f" in {without_numbers(module) or 'the model'}"
    title = (
        f"Device mismatch: {op} at {file_and_line(line)} is given {other.device} and {odd.device}; "
        f"{format_shape(odd.shape)} {odd.dtype} was made on {odd.device} at "
        f"{file_and_line(trace.source_at(odd.source))}"
    )
    evidence = [Evidence(f"{op} met them at {file_and_line(line)}{inside}{times}", module=module, op=op, source=line)]
    for operand in mismatch.operands:
        made = trace.source_at(operand.source)
        text = f"{format_shape(operand.shape)} {operand.dtype} on {operand.device}, made at {made or 'an unknown line'}"
        evidence.append(
            Evidence(text, shape=operand.shape, dtype=operand.dtype, source=made, device=operand.device, module=module)
        )
    evidence.append(
        Evidence(f"on a real GPU: RuntimeError: {format_mismatch_error(op, mismatch.operands)}", op=op, source=line)
    )
    evidence.append(Evidence(_fix(trace, odd, other, line), source=trace.source_at(odd.source) or line))
    return Finding("device-mismatch", Severity.ERROR, title, None, tuple(evidence), fixes)


def _fix(trace: Trace, odd: Operand, other: Operand, line: str | None) -> str:
    made = trace.source_at(odd.source)
    move = f"move it with .to(<the {other.device} tensor>.device) before {file_and_line(line)}"
    if is_gpu(odd.device):  # then the other one is on a GPU too
        return f"fix: {move}"
    if made is None:
        return f"fix: {move}; if a module keeps it, register_buffer() lets model.to() take it along"
    return (
        f"fix: at {file_and_line(made)} create it with device=<the {other.device} tensor>.device; if a module keeps "
        f"it, register_buffer() lets model.to() take it along; else {move}"
    )
