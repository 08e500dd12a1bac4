"""The memory of an inference engine at start-up (`memprof recommend --engine vllm`), in closed form, without torch."""

from __future__ import annotations

from dataclasses import replace

from memprof.device.catalog import Gpu, find_gpu
from memprof.errors import MemprofError
from memprof.estimate.serving.changes import SGLANG_FLAGS, VLLM_FLAGS, add_larger_gpu, complete_budget
from memprof.estimate.serving.llama_cpp import compute_llama_cpp_budget
from memprof.estimate.serving.lookup import load_served_model
from memprof.estimate.serving.options import ServingOptions
from memprof.estimate.serving.sglang import compute_sglang_budget
from memprof.estimate.serving.vllm import compute_vllm_budget
from memprof.serving.budget import EngineBudget

_DEFAULTS = ("utilization", "max_num_seqs", "max_num_batched_tokens")  # that an engine chooses by the GPU
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

    budget = complete_budget(compute(options), options, compute, gpu, flags, served.hf_id)
    if budget.starts:
        return budget
    return add_larger_gpu(budget, options, lambda larger: compute_budget(served, larger, options))


def advise_engine(budget: EngineBudget) -> EngineBudget:
    """Return the budget of a run, with what to change by closed form if the engine does not start; if it ran out of
    memory before it knew its parts, with the closed form's too. Unchanged if that does not know the model or the GPU.
    """
    if budget.starts or budget.engine not in _ENGINES:
        return budget
    options = ServingOptions(
        release=budget.release, context_length=budget.context_length, tensor_parallel=budget.tensor_parallel,
        kv_cache_dtype=budget.kv_cache_dtype or "auto", quantization=budget.quantization,
    )  # fmt: skip
    try:
        gpu = find_gpu(budget.gpu or "")
        form = recommend_engine(budget.engine, budget.model or "", gpu, options)
        given = {name: getattr(budget, name) for name in _DEFAULTS if getattr(budget, name) != getattr(form, name)}
        if given:  # other values than the engine's defaults, which need not be in its command
            form = recommend_engine(budget.engine, budget.model or "", gpu, replace(options, **given))
    except MemprofError:
        return budget
    if budget.kv_cache_bytes is None and not form.starts:
        return form
    return replace(budget, changes=form.changes, least_gpus=form.least_gpus, command=form.command)
