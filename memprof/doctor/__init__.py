r"""Diagnoses of error messages about memory: cause, sizes, tensor, and advice (without torch).

    text -log-> [Passage] -signatures, message_sizes-> error -causes-> cause -tensors-> [Candidate] -advice-> [Advice]
                                   \-engines-> figures, stage and options of an inference engine ---^

`diagnose` runs all steps, and `engine_starts` reads what an engine printed of its start; `installation` is
`memprof doctor --env`.
"""

from memprof.doctor.diagnosis import Advice, Candidate, Cause, Diagnosis, EngineFigures, MessageSizes, PrintedSize
from memprof.doctor.doctor import diagnose, diagnose_log
from memprof.doctor.reported_run import ReportedRun

__all__ = [
    "Advice",
    "Candidate",
    "Cause",
    "Diagnosis",
    "EngineFigures",
    "MessageSizes",
    "PrintedSize",
    "ReportedRun",
    "diagnose",
    "diagnose_log",
]
