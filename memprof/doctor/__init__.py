"""Diagnoses of error messages about memory: cause, figures, tensor, and advice (without torch).

    text -log-> [Passage] -signatures, figures-> [Error] -causes-> cause -tensors-> [Candidate] -advice-> [Advice]

`diagnose` puts these together; `installation` is `memprof doctor --env`.
"""

from memprof.doctor.advice import ReportedRun
from memprof.doctor.diagnosis import Advice, Candidate, Cause, Diagnosis, Figures, Size
from memprof.doctor.doctor import diagnose

__all__ = ["Advice", "Candidate", "Cause", "Diagnosis", "Figures", "ReportedRun", "Size", "diagnose"]
