"""The models that `memprof verify` takes, by name: checked before torch is imported."""

from __future__ import annotations

from memprof.errors import UsageError
from memprof.spec import TargetSpec
from memprof.workload.models import ModelSource, find_source_without_imports

SMALL_MODELS = ("gpt2", "llama", "gemma2", "handwritten", "npt")  # the keys of SPECIMENS


def check_model(name: str, trust_remote_code: bool) -> None:
    """Raise UsageError if `name` is no model that fixes are verified on, as far as is known without imports."""
    if name in SMALL_MODELS:
        return
    source = find_source_without_imports(make_spec(name, trust_remote_code))
    if source is not None:
        check_task(name, source)


def make_spec(name: str, trust_remote_code: bool) -> TargetSpec:
    """Return the spec in which the model `name` is verified."""
    return TargetSpec(model=name, dtype="float32", attention="eager", trust_remote_code=trust_remote_code)


def check_task(name: str, source: ModelSource) -> None:
    """Raise UsageError if the model is no causal language model."""
    if source.task != "causal-lm" or source.vocab_size is None:
        hint = "small ones are there by name: " + ", ".join(SMALL_MODELS)
        raise UsageError("memprof verify needs a causal language model", value=f"{name}: {source.task}", hint=hint)
