"""Names of stages in plain words for a terminal: reports, captures and tests keep the short ones."""

from __future__ import annotations

from memprof.ledger.stages import EVALUATION_PREFIX, SETUP, describe_name, format_stage
from memprof.report.documents.report import Report


def describe_stage(name: str, step: int, micro_batch: int = 0) -> str:
    """Return a stage as text, such as "code outside modules of step 2" or "layer 3 of the evaluation"."""
    if name.startswith(EVALUATION_PREFIX):
        return f"{describe_name(name.removeprefix(EVALUATION_PREFIX))} of the evaluation"
    plain_name = describe_name(name)
    if plain_name == SETUP and step:  # a model that is built between steps, or after them
        return f"{SETUP} after step {step - 1}" if step > 1 else SETUP
    return format_stage(plain_name, step, micro_batch)


def describe_moment(document: Report, stage: str, step: int) -> str:
    """Return a stage of a report's run as text; without its step in a script that begins no training step."""
    last = find_last_step(document)
    if step <= last or stage.startswith(EVALUATION_PREFIX):
        return describe_stage(stage, step)
    return f"{describe_name(stage)}{f' after step {last}' * bool(last)}"


def describe_step(document: Report, step: int) -> str:
    """Return a step as text; "" for the setup, and in a script that begins no training step."""
    last = find_last_step(document)
    return f"step {step}" * bool(step) if step <= last else f"after step {last}" * bool(last)


def find_last_step(document: Report) -> int:
    """Return the number of the last training step that the program began: what is recorded as a later one came after it
    (an evaluation), and was not one."""
    return max((row.step for row in document.stages), default=0) if document.program is None else document.program.steps
