"""`memprof recommend`: the models that fit a GPU, or the configuration to use for a model."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import typer

from memprof.cli import settings
from memprof.cli.exits import ExitCode
from memprof.cli.options import OUTPUT_PANEL, build_spec, reuse_option
from memprof.cli.output import ExplainOptions, PageOptions, print_cache_age, print_json
from memprof.cli.progress import Progress, show_progress
from memprof.cli.streams import echo
from memprof.errors import UsageError
from memprof.spec import BITSANDBYTES_FORMATS, HOST_BYTES, Mode, TargetSpec, option

if TYPE_CHECKING:
    from memprof.flows.cache.results import ResultCacheEntry
    from memprof.report.documents.recommendation import Recommendation

EXAMPLES = """
memprof recommend --gpu-vram 8
memprof recommend --model llama-3.1-8b --adapter lora --gpu rtx-4090
memprof recommend --model qwen3-0.6b --mode inference --context-length 4096
memprof recommend --model llama-3.1-8b --gpus 8 --gpu a100-40gb
memprof recommend --engine vllm --model qwen3-4b --gpu rtx-4090
"""

MULTI_GPU_SNIPPETS = ("fully-shard", "accelerate", "accelerate-yaml", "torchtitan", "tensor-parallel", "device-map")
ENGINE_PANEL = "Inference engine"
ENGINES = ("vllm", "sglang", "llama.cpp")
GGUF_TYPES = ("q4_k_m", "q4_k_s", "q5_k_m", "q6_k", "q8_0", "q4_0", "f16", "bf16", "mxfp4")
KV_CACHE_DTYPES = ("auto", "fp8", "nvfp4")
_ENGINE_OPTIONS = (
    "engine_release", "concurrency", "memory_utilization", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens",
    "max_loras", "gguf_type",
)  # fmt: skip
_SERVER_OPTIONS = ("engine_release", "memory_utilization", "max_num_seqs")  # Those that llama.cpp does not have.
# What other goals take, and an engine does not.
_OTHER_GOALS = (
    "adapter", "lora_targets", "dtype", "amp", "lengths", "snippet", "row", "batch_size", "effective_batch", "html",
)  # fmt: skip
# Names of the formats that engines have, by memprof's.
_WEIGHT_FORMATS = {"int8": "int8", "nf4": "bitsandbytes", "fp4": "bitsandbytes"}
_SEARCHED_DEFAULT_TEXT = "what gives up least and fits"


def parse_fraction(text: str) -> float:
    """Return a fraction above 0, at most 1; raise UsageError if `text` is none."""
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise UsageError(
            "not a fraction of the GPU", value=repr(text), hint="give a number above 0 up to 1, such as 0.9"
        )
    return fraction


@dataclass(frozen=True, kw_only=True)
class RecommendOptions(ExplainOptions, PageOptions):
    """Options of `memprof recommend`: the model and what it is used for, the GPU, the data and the output."""

    model: str | None = reuse_option("model", default=None)
    model_is_size: bool = reuse_option("model_is_size")
    trust_remote_code: bool = reuse_option("trust_remote_code")
    mode: Mode = reuse_option("mode")
    adapter: str | None = reuse_option("adapter")
    dtype: str | None = reuse_option("dtype", unset=_SEARCHED_DEFAULT_TEXT)
    amp: str | None = reuse_option("amp", unset=_SEARCHED_DEFAULT_TEXT)
    quantize: str | None = reuse_option(
        "quantize", note="With --adapter lora: QLoRA.", choices=BITSANDBYTES_FORMATS, unset=_SEARCHED_DEFAULT_TEXT
    )
    context_length: int | None = reuse_option("context_length")
    effective_batch: int | None = option(
        None, "Batch", "Sequences in an optimizer step, all its micro-batches together.", metavar="COUNT",
        is_count=True, unset="8",
    )  # fmt: skip
    batch_size: int | None = reuse_option("batch_size", default=None, unset="searched; 1 in inference")
    lora_rank: int | None = reuse_option("lora_rank")
    lora_targets: str | None = reuse_option("lora_targets")
    lengths: str | None = reuse_option(
        "lengths", note="A file may be .jsonl or .parquet. Predicts the step at which memory runs out.",
    )  # fmt: skip
    lengths_column: str | None = option(None, "Data", "Which column has the lengths, or the tokens.", metavar="NAME")
    batches: int | None = option(
        None, "Data", "Run what was found over so many batches of --lengths: whether all fit, and what they reserve.",
        metavar="COUNT", is_count=True,
    )  # fmt: skip
    gpu: str = reuse_option("gpu")
    gpu_vram_bytes: int | None = reuse_option("gpu_vram_bytes")
    gpus: int = reuse_option("gpus", note="How the model is spread over them, and the least number that does.")
    host_memory_bytes: int = reuse_option("host_memory_bytes", default=HOST_BYTES, unset="256")
    engine: str | None = option(
        None, ENGINE_PANEL, "What this inference engine does with the GPU's memory at start-up: {choices}.",
        metavar="NAME", choices=ENGINES,
    )  # fmt: skip
    engine_release: str | None = option(
        None, ENGINE_PANEL, "Release of the engine.", metavar="RELEASE", unset="the latest that is known"
    )
    concurrency: int | None = option(
        None, ENGINE_PANEL, "Requests of --context-length tokens that its KV cache has to hold at once.",
        metavar="COUNT", is_count=True, unset="as many as fit",
    )  # fmt: skip
    memory_utilization: float | None = option(
        None, ENGINE_PANEL, "Fraction of the GPU that the engine may use.", metavar="FRACTION", parse=parse_fraction,
        unset="the engine's",
    )  # fmt: skip
    kv_cache_dtype: str | None = option(
        None, ENGINE_PANEL, "Data type of its KV cache: {choices}.", metavar="NAME", choices=KV_CACHE_DTYPES,
        unset="the model's",
    )  # fmt: skip
    max_num_seqs: int | None = option(
        None, ENGINE_PANEL, "Requests that it computes together at most.", metavar="COUNT", is_count=True,
        unset="the engine's",
    )  # fmt: skip
    max_num_batched_tokens: int | None = option(
        None, ENGINE_PANEL, "Tokens that it computes together at most.", metavar="COUNT", is_count=True,
        unset="the engine's",
    )  # fmt: skip
    max_loras: int | None = option(
        None, ENGINE_PANEL, "Slots for LoRA adapters that vLLM allocates with the weights, of rank --lora-rank.",
        metavar="COUNT", is_count=True, unset="none",
    )  # fmt: skip
    gguf_type: str | None = option(
        None, ENGINE_PANEL, "Type of llama.cpp's file of weights: {choices}.", metavar="NAME", choices=GGUF_TYPES,
        unset="q4_k_m",
    )  # fmt: skip
    cache: bool = reuse_option("cache")
    full: bool = reuse_option("full", note="It has the code to paste.")
    row: int | None = option(
        None, OUTPUT_PANEL, "Run the configuration in this row of the table, and print its report.", metavar="NUMBER",
        is_count=True,
    )  # fmt: skip
    snippet: str | None = option(
        None,
        OUTPUT_PANEL,
        "Print this script alone: {choices}.",
        metavar="NAME",
        choices=("pytorch", "transformers", *MULTI_GPU_SNIPPETS),
    )

    @property
    def goal(self) -> str | None:
        """Return the goal: infer, full, lora or qlora; None without a model."""
        if self.model is None:
            return None
        if self.mode is Mode.INFERENCE:
            return "infer"
        return "full" if self.adapter is None else "lora" if self.quantize in (None, "int8") else "qlora"

    @property
    def half_dtype(self) -> str | None:
        """Return the half-precision dtype that --amp or --dtype requests; None: the default of the GPU."""
        return self.amp or (None if self.dtype == "float32" else self.dtype)

    @property
    def precision(self) -> str | None:
        """Return the requested precision as named in flows/recommend/plans.py; None: to be searched."""
        if self.quantize is not None or self.amp is not None:
            return self.quantize or "amp"
        return self.dtype if self.dtype in (None, "float32") else "half"

    def check(self) -> None:
        """Raise UsageError if options exclude each other, or a required option is missing."""
        if self.model is None:
            for name in (
                "adapter", "dtype", "amp", "quantize", "effective_batch", "batch_size", "lengths", "snippet", "gpus",
            ):  # fmt: skip
                value = getattr(self, name)
                if value not in (None, 1):
                    flag = "--" + name.replace("_", "-")
                    raise UsageError(f"{flag} needs a model", value=value, hint="add --model NAME or --model-size 4B")
        if self.lengths is not None and self.gpus > 1:
            raise UsageError(
                "the lengths of a data set are looked at on one GPU", value=f"--gpus {self.gpus} --lengths",
                hint="leave out --gpus: each GPU meets the same lengths; or give --context-length the longest",
            )  # fmt: skip
        for flag, value in (("--lengths-column", self.lengths_column), ("--batches", self.batches)):
            if value is not None and self.lengths is None:
                raise UsageError(f"{flag} needs --lengths", value=value, hint="add --lengths FILE")
        self._check_engine_options()
        if self.snippet is not None and (self.snippet in MULTI_GPU_SNIPPETS) != (self.gpus > 1):
            kind, hint = ("several GPUs", "add --gpus 8") if self.gpus == 1 else ("one GPU", "leave out --gpus")
            raise UsageError(f"this script is for {kind}", value=f"--snippet {self.snippet}", hint=hint)
        for name in ("lengths", "adapter"):
            if self.mode is Mode.INFERENCE and getattr(self, name) is not None:
                raise UsageError(f"--{name} is for training", value=getattr(self, name), hint=f"leave out --{name}")
        if self.mode is Mode.INFERENCE and self.effective_batch is not None:
            echo("memprof: in inference --effective-batch is now --batch-size; it goes with the next release", err=True)
        if self.effective_batch is not None and self.batch_size and self.effective_batch % self.batch_size:
            raise UsageError(
                "--batch-size must divide --effective-batch",
                value=f"{self.effective_batch} in micro-batches of {self.batch_size}",
                hint="leave out --batch-size, and it is searched",
            )

    def _check_engine_options(self) -> None:
        """Raise UsageError if options of an engine are given without one, or an engine without a model."""
        if self.engine is None:
            for name in _ENGINE_OPTIONS:
                if (value := getattr(self, name)) is not None:
                    flag = "--" + name.replace("_", "-")
                    raise UsageError(f"{flag} needs an engine", value=value, hint="add --engine vllm")
            return
        if self.model is None:
            raise UsageError("--engine needs a model", value=self.engine, hint="add --model NAME")
        if (self.engine == "llama.cpp") < (self.gguf_type is not None):
            hint = "leave out --gguf-type, or give --engine llama.cpp"
            raise UsageError("--gguf-type is for llama.cpp", value=self.gguf_type, hint=hint)
        if self.engine == "llama.cpp" and (self.quantize is not None or self.gpus > 1):
            raise UsageError(
                "llama.cpp is computed for one GPU and a GGUF file", hint="leave out --quantize and --gpus"
            )
        words = (word for source in settings.sources for word in source.arguments)
        from_files = {word.partition("=")[0] for word in words}  # which are for other commands too
        if self.engine != "vllm" and self.max_loras is not None:
            raise UsageError("--max-loras is for vllm", value=self.max_loras, hint="leave out --max-loras")
        if self.lora_rank is not None and self.max_loras is None and "--lora-rank" not in from_files:
            raise UsageError("--lora-rank needs slots here", value=self.lora_rank, hint="add --max-loras COUNT")
        if self.engine == "llama.cpp":
            for name in _SERVER_OPTIONS:
                if (value := getattr(self, name)) is not None:
                    flag = "--" + name.replace("_", "-")
                    hint = "give --concurrency, its --parallel" if name == "max_num_seqs" else f"leave out {flag}"
                    raise UsageError(f"{flag} is not for llama.cpp", value=value, hint=hint)
            if self.kv_cache_dtype == "nvfp4":
                raise UsageError("llama.cpp has no such cache", value=self.kv_cache_dtype, hint="give fp8, for q8_0")
        for name in _OTHER_GOALS:
            flag = "--" + name.replace("_", "-")
            if (value := getattr(self, name)) is not None and flag not in from_files:
                raise UsageError(f"{flag} is not for an inference engine", value=value, hint=f"leave out {flag}")

    def build_spec(self) -> TargetSpec:
        """Return the model and GPU as a spec, without the options that are searched. Raises UsageError if invalid."""
        from memprof.device.catalog import find_gpu

        # `lengths` is used only for the odds; in `memprof profile` it sets the batches.
        spec = build_spec(self, model=self.model or "-", lengths=None, batch_size=1, gpu=find_gpu(self.gpu).key)
        return spec.edit(dtype=None, amp=None, quantize=None)


def recommend(request: RecommendOptions) -> None:
    """What fits a GPU; with a model and a goal, the configuration to use, found by simulated runs.

    Without a model: the largest models of the catalog that fit for inference, QLoRA, LoRA and full training. With one:
    the quickest configuration that fits, what else was run, the largest batch and context, and with --full the code to
    paste. Exit code 0: something fits; 3: nothing does.
    """
    request.check()
    if request.engine is not None:
        _recommend_engine(request, request.engine)
    from memprof.platforms import require_posix

    require_posix("recommend without --engine")
    spec = request.build_spec()
    from memprof.report.documents.recommendation import Recommendation

    entry = _find_cache_entry(spec, request) if request.cache else None
    cached_result = None if entry is None else entry.find(Recommendation)
    if cached_result is not None:
        result, seconds = cached_result
        print_cache_age(seconds, quiet=request.quiet or request.snippet is not None)
    else:
        with show_progress(quiet=request.quiet) as progress:
            result = _search(spec, request, progress)
    if entry is not None and cached_result is None:
        entry.save(result)
    if request.row is not None:
        _run_row(result, request.row)
    _print_recommendation(result, request)
    request.write_page(result)
    raise typer.Exit(ExitCode.DONE if result.has_result else ExitCode.DOES_NOT_FIT)


def _recommend_engine(request: RecommendOptions, engine: str) -> NoReturn:
    """Print the memory of an engine at start-up, and exit; nothing here imports torch or the engine."""
    from memprof.device.catalog import custom_gpu, find_gpu
    from memprof.estimate.serving.options import ServingOptions
    from memprof.flows.recommend.engine import recommend_engine

    gpu = find_gpu(request.gpu) if request.gpu_vram_bytes is None else custom_gpu(request.gpu_vram_bytes)
    options = ServingOptions(
        release=request.engine_release, context_length=request.context_length, concurrency=request.concurrency,
        tensor_parallel=request.gpus, utilization=request.memory_utilization, max_num_seqs=request.max_num_seqs,
        max_num_batched_tokens=request.max_num_batched_tokens, kv_cache_dtype=request.kv_cache_dtype or "auto",
        max_loras=request.max_loras or 0, max_lora_rank=request.lora_rank,
        quantization=request.gguf_type or (None if request.quantize is None else _WEIGHT_FORMATS[request.quantize]),
    )  # fmt: skip
    budget = recommend_engine(engine, request.model or "", gpu, options, is_size=request.model_is_size)
    if request.as_json:
        from memprof.report.documents.command_results import EngineBudgetResult

        print_json(EngineBudgetResult(budget=budget))
    else:
        from memprof.report.terminal.engine_budget import render_engine_budget

        echo(render_engine_budget(budget, explain=request.explain, quiet=request.quiet), nl=False)
    raise typer.Exit(ExitCode.DONE if budget.starts else ExitCode.DOES_NOT_FIT)


_OUTPUT_FIELDS = ("as_json", "quiet", "explain", "full", "row", "snippet", "cache")


def _find_cache_entry(spec: TargetSpec, request: RecommendOptions) -> ResultCacheEntry | None:
    """Return the cache entry for the result of this call; None if such a result is never cached."""
    from memprof.flows.cache.results import find_cache_entry

    key_values = {name: value for name, value in dataclasses.asdict(request).items() if name not in _OUTPUT_FIELDS}
    if request.model is None:  # the catalog is searched
        key_values["model"], spec = "", spec.edit(model="gpt2")
    return find_cache_entry("recommend", spec, key_values, settings.command_line)


def _search(spec: TargetSpec, request: RecommendOptions, progress: Progress) -> Recommendation:
    from memprof.device.visible import hide_gpus

    hide_gpus()
    if request.model is not None:
        from memprof.flows.profile import check_inputs

        check_inputs(spec)
    if request.goal is None:
        from memprof.flows.recommend.largest_models import recommend_largest_models

        return recommend_largest_models(spec, progress)
    from memprof.flows.recommend.dataset import recommend_for_dataset
    from memprof.flows.recommend.plans import Goal
    from memprof.flows.recommend.recommendation import recommend as search
    from memprof.flows.recommend.search import SearchRequest

    criteria = SearchRequest(
        Goal(request.goal), request.effective_batch, request.precision, request.batch_size, request.half_dtype
    )
    if progress.shows_estimates and spec.gpus == 1 and request.lengths is None:
        from memprof.flows.first_estimate import estimate_search

        if (first := estimate_search(spec, criteria)) is not None:
            estimate, condition = first
            progress.show_estimate(estimate.describe(condition))
    if spec.gpus > 1 and request.goal == "infer":
        from memprof.flows.recommend.serving import recommend_serving

        return recommend_serving(spec, criteria, progress)
    if spec.gpus > 1:
        from memprof.flows.recommend.multi_gpu_search import recommend_multi_gpu

        return recommend_multi_gpu(spec, criteria, progress)
    if request.lengths is not None:
        return recommend_for_dataset(spec, criteria, progress, request.lengths, request.lengths_column, request.batches)
    return search(spec, criteria, progress)[0]


def _run_row(result: Recommendation, number: int) -> NoReturn:
    """Run the command of the row `number`, counted from 1, and exit with its exit code."""
    from memprof.cli.main import run

    commands = result.list_commands()
    if not 1 <= number <= len(commands) or not commands[number - 1]:
        raise UsageError(
            "no such row, or none that can be run", value=f"--row {number}", hint="see the table's numbers"
        )
    echo(f"memprof: running {commands[number - 1]}", err=True)
    run(shlex.split(commands[number - 1])[1:])


def _print_recommendation(result: Recommendation, request: RecommendOptions) -> None:
    if request.snippet is not None and result.has_result:
        if request.snippet not in result.snippets:
            hint = "there is " + (" and ".join(result.snippets) or "none for a model of your own")
            raise UsageError("there is no such script for this run", value=request.snippet, hint=hint)
        echo(result.snippets[request.snippet], nl=False)
        return
    if request.as_json:
        print_json(result)
        return
    from memprof.report.terminal.recommendation import print_recommendation

    print_recommendation(result, explain=request.explain, full=request.full, quiet=request.quiet)
