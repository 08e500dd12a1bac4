"""Configurations and sizes of published models, with sources, for use without a network. Does not import torch."""

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
