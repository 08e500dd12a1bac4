"""Diagnoses of error messages about memory: cause, sizes, tensor, and advice (without torch).

    text -log-> [Passage] -signatures, message_sizes-> error -causes-> cause -tensors-> [Candidate] -advice-> [Advice]

`diagnose` runs all steps; `installation` is `memprof doctor --env`.
"""

from memprof.doctor.advice import ReportedRun
from memprof.doctor.diagnosis import Advice, Candidate, Cause, Diagnosis, MessageSizes, PrintedSize
from memprof.doctor.doctor import diagnose

__all__ = ["Advice", "Candidate", "Cause", "Diagnosis", "MessageSizes", "PrintedSize", "ReportedRun", "diagnose"]
