"""Facts about GPUs and published models, with their sources, so that memprof works without a network."""

from memprof.catalog.gpus import DEFAULT_GPU, Gpu, custom_gpu, find_gpu, list_gpus
from memprof.catalog.models import ModelEntry, find_model, has_model, list_models, load_config
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
    "load_config",
    "resolve_size",
    "synthesize",
]
