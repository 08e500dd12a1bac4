"""The user's script: finding it, running it as `__main__`, and stopping it by a rule."""

from memprof.script.program import Program, read_program
from memprof.script.stop import EndReason, ScriptOutcome, StopRule

__all__ = ["EndReason", "Program", "ScriptOutcome", "StopRule", "read_program"]
