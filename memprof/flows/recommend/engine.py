"""The memory of an inference engine at start-up (`memprof recommend --engine vllm`), in closed form, without torch."""

from __future__ import annotations

from memprof.device.catalog import Gpu
from memprof.estimate.serving.changes import SGLANG_FLAGS, VLLM_FLAGS, complete_budget
from memprof.estimate.serving.llama_cpp import compute_llama_cpp_budget
from memprof.estimate.serving.lookup import load_served_model
from memprof.estimate.serving.options import ServingOptions
from memprof.estimate.serving.sglang import compute_sglang_budget
from memprof.estimate.serving.vllm import compute_vllm_budget
from memprof.serving.budget import EngineBudget

_ENGINES = {"vllm": (compute_vllm_budget, VLLM_FLAGS), "sglang": (compute_sglang_budget, SGLANG_FLAGS)}


def recommend_engine(
    engine: str, model: str, gpu: Gpu, options: ServingOptions, *, is_size: bool = False
) -> EngineBudget:
    """Return the memory of one GPU of `engine`, with what to change and the command that starts it.

    Raises UsageError: the model, its architecture or a release is not known, or its heads cannot be divided.
    """
    served = load_served_model(model, is_size=is_size)
    if engine == "llama.cpp":
        return compute_llama_cpp_budget(served, gpu, options)
    compute_budget, flags = _ENGINES[engine]

    def compute(changed: ServingOptions) -> EngineBudget:
        return compute_budget(served, gpu, changed)

    return complete_budget(compute(options), options, compute, gpu, flags, served.hf_id)
