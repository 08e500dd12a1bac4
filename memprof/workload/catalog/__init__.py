"""Facts about published models, with sources, so that memprof builds models without a network. No torch."""

from memprof.workload.catalog.models import ModelEntry, find_model, has_model, list_models, read_config_file
from memprof.workload.catalog.sizes import resolve_size, synthesize

__all__ = [
    "ModelEntry",
    "find_model",
    "has_model",
    "list_models",
    "read_config_file",
    "resolve_size",
    "synthesize",
]
