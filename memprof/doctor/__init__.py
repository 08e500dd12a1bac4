"""A diagnosis of a run's error message about memory: its cause, figures, the tensor, and what to do (no torch).

    text -log-> [Passage] -signatures, figures-> [Error] -causes-> cause -tensors-> [Candidate] -advice-> [Advice]

`diagnose` puts these together; `installation` is `memprof doctor --env`.
"""

from memprof.doctor.advice import ReportedRun
from memprof.doctor.diagnosis import Advice, Candidate, Cause, Diagnosis, Figures, Size
from memprof.doctor.doctor import diagnose

__all__ = ["Advice", "Candidate", "Cause", "Diagnosis", "Figures", "ReportedRun", "Size", "diagnose"]
