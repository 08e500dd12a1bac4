"""Facts about GPUs and published models, with their sources, so that memprof works without a network."""

from memprof.catalog.gpus import DEFAULT_GPU, Gpu, custom_gpu, find_gpu, list_gpus
from memprof.catalog.models import ModelEntry, find_model, has_model, list_models, read_config_file
from memprof.catalog.sizes import resolve_size, synthesize

__all__ = [
    "DEFAULT_GPU",
    "Gpu",
    "ModelEntry",
    "custom_gpu",
    "find_gpu",
    "find_model",
    "has_model",
    "list_gpus",
    "list_models",
    "read_config_file",
    "resolve_size",
    "synthesize",
]
