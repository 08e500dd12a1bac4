"""Scripts: the user's own program, found, run as `__main__`, and stopped when enough was seen."""

from memprof.script.program import Program
from memprof.script.stop import EndReason, ScriptOutcome, StopRule

__all__ = ["EndReason", "Program", "ScriptOutcome", "StopRule"]
