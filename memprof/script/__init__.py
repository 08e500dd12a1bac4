"""Scripts: the user's own program, located, run as `__main__`, and stopped according to a rule."""

from memprof.script.program import Program
from memprof.script.stop import EndReason, ScriptOutcome, StopRule

__all__ = ["EndReason", "Program", "ScriptOutcome", "StopRule"]
