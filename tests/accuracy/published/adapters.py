"""The rows of can-i-finetune-this: its own runner (src/canifinetune/bench/runner.py at 053ce9e), from its own results.

Each result's file has the configuration that it was run with. What a hub would give, the model and its configuration,
are the catalog's; tests/accuracy/adapter_bench.py has the same run for where the source's code is not there.
"""

from __future__ import annotations

import functools
import json
from typing import Any
from unittest import mock

from memprof.virtual import VirtualGpu
from tests.accuracy import adapter_bench
from tests.accuracy.published.libraries import Checkout, MissingLibraryError
from tests.accuracy.published.prediction import GPUS, VERSIONS, Prediction, Run, missing, not_predicted, run
from tests.accuracy.published.rows import Row

SOURCE = Checkout("DaoyuanLi2816/can-i-finetune-this", "053ce9e115b213e0ded3634e00d564ef97561f9b")
CATALOG = {"Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b", "Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b"}
_BLOCKS = (
    "the same at every other reading of the run: the measured first forward reserves {} more (torch 2.6, and a "
    "transformers that the file does not name), while allocated memory differs by less than 2 MiB"
)
_MORE = {"3.7949": "116 MiB", "6.2812": "168 MiB"}


def benchmark(row: Row) -> Prediction:
    lacking = missing("peft", "bitsandbytes")
    if lacking:
        return not_predicted(lacking)
    try:
        done = _run(row.source.rpartition("/")[2], GPUS[row.gpu])
    except MissingLibraryError as absent:
        return not_predicted(f"needs {absent}")
    if row.metric != "peak_reserved_gb":
        return Prediction(done.allocated, code=SOURCE.title)
    more = _MORE.get(row.value, "")
    return Prediction(
        done.reserved,
        code=SOURCE.title,
        explanation=_BLOCKS.format(more) if more else "",
        differs=VERSIONS,
    )


@functools.cache
def _run(file: str, name: str) -> Run:
    asked = json.loads((SOURCE.folder / "benchmarks" / "results" / file).read_text(encoding="utf-8"))["config"]
    with SOURCE.imported("src"):
        return run(lambda gpu: _bench(asked, gpu), name)


def _bench(asked: dict[str, Any], gpu: VirtualGpu) -> None:
    import transformers
    from canifinetune.bench import runner  # type: ignore[import-not-found]

    from memprof.workload.catalog.models import find_model

    def model(name: str, **how: Any) -> Any:
        if name not in CATALOG:
            return adapter_bench.TINY.build()
        return adapter_bench.causal_lm(CATALOG[name], "nf4" if "quantization_config" in how else None)

    def config(name: str) -> Any:
        if name not in CATALOG:
            return transformers.GPT2Config(n_layer=2, n_embd=2, n_head=2)
        settings = find_model(CATALOG[name]).load_config()
        return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)

    with (
        mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", model),
        mock.patch.object(transformers.AutoConfig, "from_pretrained", config),
    ):
        result = runner.run_bench(runner.BenchConfig(**asked))
    if not result.success:
        raise RuntimeError(" ".join(result.notes))
