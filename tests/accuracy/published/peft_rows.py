"""PEFT's method comparison on MetaMathQA: its own loop, models and adapters (method_comparison/MetaMathQA at 5d602fdb).

`run.train` and what it calls run as they are, with PEFT of the same commit. What a hub would give is replaced: the
model is built from its configuration, texts are numbers of tokens, and the perplexity of Wikipedia before and after,
the generation between and the score are left out; the run's maximum, which has them, is not predicted.

Lengths: the results' own files have the tokens of each 250 steps: 208.9 a text on average, and their standard deviation
over the twenty sums, times the square root of a thousand, is 95 a text. A lognormal with both is drawn from; the loop's
own buckets pad the batches. What a step allocates hardly depends on more than the mean; what is reserved depends on the
longest texts, of which the source says that they have at most 1,300 characters and 768 tokens.
"""

from __future__ import annotations

import functools
import math
import types
from typing import Any

from tests.accuracy.published.libraries import Checkout, MissingLibraryError
from tests.accuracy.published.prediction import DRAWN, GPUS, Prediction, missing, not_predicted, run
from tests.accuracy.published.rows import Row

SOURCE = Checkout("huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40")
FOLDER = "method_comparison/MetaMathQA"
EXPERIMENTS = {"lora": "lora/llama-3.2-3B-rank32", "full-finetuning": "full-finetuning/llama-3.2-3B-lr_0.00001"}
MEAN_TOKENS, DEVIATION, LONGEST = 208.9, 94.7, 768
STEPS = 160  # Of 5,000: the cache is emptied every 10, and nothing else carries over.
_PADDING = "lengths are sampled: five tokens more or less in the longest text of a batch are 0.1%"
_TAIL = (
    f"own code over {STEPS} of 5,000 steps; the longest texts decide, and those of a lognormal distribution of the "
    "same mean and spread are longer than texts of at most 1,300 characters"
)
_EVALUATION = (
    "the run's maximum is that of an evaluation, which generates up to 300 tokens for 50 texts of GSM8K at once: no "
    "file of the source has their lengths, because its code reads the texts from the hub"
)


def meta_math_qa(row: Row) -> Prediction:
    if "whole run" in row.metric:
        return not_predicted(_EVALUATION)
    lacking = missing("bitsandbytes", "datasets", "peft")
    if lacking:
        return not_predicted(lacking)
    try:
        allocated, reserved = logs(row.method)
    except MissingLibraryError as absent:
        return not_predicted(f"needs {absent}")
    if "memory_allocated" in row.metric:
        return Prediction(round(sum(allocated) / len(allocated)), code=SOURCE.title, explanation=_PADDING)
    p99 = sorted(reserved)[math.ceil(0.99 * len(reserved)) - 1]
    num_bytes = p99 if "p99" in row.metric else round(sum(reserved) / len(reserved))
    return Prediction(num_bytes, code=SOURCE.title, differs=DRAWN, explanation=_TAIL)


@functools.cache
def logs(method: str, steps: int = STEPS) -> tuple[list[int], list[int]]:
    """What is allocated and reserved after each step, as the source's loop notes it."""
    with SOURCE.imported(FOLDER, "src"):
        found: dict[str, list[int]] = {}
        run(lambda gpu: _train(method, steps, found), GPUS["NVIDIA L40S"])
        return found["allocated"], found["reserved"]


def lengths(steps: int) -> list[int]:
    """Of as many texts as `steps` batches take."""
    import numpy

    sigma = math.sqrt(math.log(1 + (DEVIATION / MEAN_TOKENS) ** 2))
    drawn = numpy.random.default_rng(0).lognormal(math.log(MEAN_TOKENS) - sigma**2 / 2, sigma, 4 * steps)
    # Of this draw as of any, so that a short run has the mean of the long one.
    return [min(LONGEST, round(float(value * MEAN_TOKENS / drawn.mean()))) for value in drawn]


def _train(method: str, steps: int, found: dict[str, list[int]]) -> None:
    import datasets
    import run as own  # type: ignore[import-not-found]
    import torch
    import utils  # type: ignore[import-not-found]
    from peft import PeftConfig

    folder = f"{SOURCE.folder}/{FOLDER}/experiments/{EXPERIMENTS[method]}"
    asked = utils.get_train_config(f"{folder}/training_params.json")
    utils.AutoModelForCausalLM = types.SimpleNamespace(from_pretrained=_model)
    texts = lengths(steps)
    columns = {"input_ids": [[5] * n for n in texts], "attention_mask": [[1] * n for n in texts]}
    train = datasets.Dataset.from_dict(columns | {"response": ["" for _ in texts]})
    own.get_train_valid_test_datasets = lambda **_: (train, train, train)
    own.print_verbose = lambda *_, **__: None
    own.tqdm = lambda steps, **_: _Silent(steps)
    own.get_wiki_small = list
    own.calculate_mean_per_token_loss = lambda **_: 1.5
    own.evaluate = lambda **_: ([""], [""])
    own.get_accuracy = lambda **_: 0.0
    initial = utils.init_accelerator()
    model = utils.get_model(
        peft_config=PeftConfig.from_pretrained(folder) if method == "lora" else None,
        **{
            name: getattr(asked, name)
            for name in ("model_id", "dtype", "compile", "use_gc", "attn_implementation", "autocast_adapter_dtype")
        },
    )
    taken = {
        name: getattr(asked, name)
        for name in ("batch_size", "batch_size_eval", "generation_kwargs", "grad_norm_clip", "optimizer_type")
    }
    taken |= {name: getattr(asked, name) for name in ("optimizer_kwargs", "query_template", "use_amp")}
    read = torch.cuda.memory_allocated
    allocated: list[int] = []

    def reading(*given: Any) -> int:
        allocated.append(read(*given))
        return allocated[-1]

    torch.cuda.memory_allocated = reading
    try:
        result = own.train(
            model=model, max_steps=steps, eval_steps=steps, tokenizer=_Tokenizer(), accelerator_memory_init=initial,
            lr_scheduler_arg=asked.lr_scheduler, is_adalora=False, is_adamss=False, init_kv_cache_prefix=None, **taken,
        )  # fmt: skip
    finally:
        torch.cuda.memory_allocated = read
    if result.error_msg:
        raise RuntimeError(result.error_msg)
    found |= {"allocated": [size - initial for size in allocated], "reserved": result.accelerator_memory_reserved_log}


def _model(pretrained_model_name_or_path: str, device_map: str, attn_implementation: str | None, dtype: Any) -> Any:
    """In place of the hub's: the weights' values decide nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from memprof.workload.catalog.models import find_model

    settings = find_model(pretrained_model_name_or_path.rpartition("/")[2].lower()).load_config()
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device_map)


class _Tokenizer:
    """Pads, which is all that the loop asks of one."""

    pad_token_id = eos_token_id = 128_001

    def pad(self, batch: dict[str, list[list[int]]], return_tensors: str) -> Any:
        import torch
        from transformers import BatchEncoding

        longest = max(len(text) for text in batch["input_ids"])
        padded = {
            name: [text + [self.pad_token_id * (name == "input_ids")] * (longest - len(text)) for text in texts]
            for name, texts in batch.items()
        }
        return BatchEncoding({name: torch.tensor(texts) for name, texts in padded.items()})

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"attention_mask": [[1] for _ in texts]}


class _Silent(list[int]):
    """A bar of progress that shows none."""

    def set_postfix(self, shown: dict[str, float]) -> None: ...
