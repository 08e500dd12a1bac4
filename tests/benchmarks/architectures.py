"""How many of transformers' architectures complete a training step on the virtual GPU.

    python -m tests.benchmarks.architectures [--only NAME] [--task TASK] [--write docs/architectures.md]

For every model class of six of transformers' auto mappings: a tiny configuration is looked for with which one training
step (forward with labels, backward, AdamW) really runs on the CPU; then the same step runs on the virtual GPU. Each
architecture runs in a process of its own, so that a crash of one does not end the sweep. Exit code 1 if the rate is
below the bar. `ARCHITECTURES_PARTS` in the environment is how many run at once (2).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import importlib
import inspect
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from memprof.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.workload.inputs import _tensors

BAR = 0.98
CPU_SECONDS, VIRTUAL_SECONDS = 40, 40
MAX_PARAMETERS = 150_000_000
MAX_HOST_BYTES = 8 << 30
BATCH_SIZE = 2

TASKS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
}


@dataclass(frozen=True)
class Case:
    """One architecture of one task."""

    task: str
    model_type: str
    class_name: str


@dataclass
class Outcome:
    """What became of a case: `cpu` and `virtual` are "ok" or the reason why not; "" if it was not reached."""

    case: Case
    cpu: str = ""
    virtual: str = ""
    trace: str = ""
    mismatches: int = 0
    seconds: float = 0.0


def cases(task: str | None, only: str | None) -> list[Case]:
    """Every model class of the auto mappings."""
    found = []
    for name, mapping in TASKS.items():
        if task in (None, name):
            for model_type, classes in getattr(modeling_auto, mapping).items():
                class_names = (classes,) if isinstance(classes, str) else classes
                found += [Case(name, model_type, class_name) for class_name in class_names]
    return [case for case in found if only in (None, case.model_type, case.class_name)]


# -- tiny configurations ----------------------------------------------------------------------------------------------

_LAYERS = 2
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size", "decoder_hidden_size")
_INNER = (
    "intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size",
    "hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
    "dim_ff", "dff", "feed_forward_size", "mlp_dim", "intermediate_size_mlp", "shared_intermediate_size",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
    "attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads", "encoder_num_attention_heads",
    "decoder_num_attention_heads",
)  # fmt: skip
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "encoder_num_key_value_heads",
             "decoder_num_key_value_heads")  # fmt: skip
_DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
    "num_decoder_layers", "depth", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_blocks",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIZES: dict[str, dict[str, int]] = {
    "small": {
        **dict.fromkeys(_WIDTHS, 64), **dict.fromkeys(_INNER, 128), **dict.fromkeys(_HEADS, 4),
        **dict.fromkeys(_KV_HEADS, 2), **dict.fromkeys(_EXPERTS, 8), "head_dim": 16, "global_head_dim": 16,
        "vocab_size": 512, "attention_head_size": 16, "d_kv": 16, "kv_channels": 16,
        "rotary_dim": 16, "expand": 1, "n_groups": 1, "entity_vocab_size": 64, "entity_emb_size": 16,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 512, "d_latents": 64, "num_latents": 16, "qk_channels": 64, "v_channels": 64,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
    "width": {
        **dict.fromkeys(_WIDTHS, 64), **dict.fromkeys(_INNER, 128), **dict.fromkeys(_HEADS, 4),
        **dict.fromkeys(_KV_HEADS, 4), "vocab_size": 512,
    },
    "experts": {**dict.fromkeys(_EXPERTS, 8), "vocab_size": 512},
    "wide": {
        **dict.fromkeys(_WIDTHS, 256), **dict.fromkeys(_INNER, 256), **dict.fromkeys(_EXPERTS, 16), "vocab_size": 512,
    },
    "vocabulary": {"vocab_size": 512},
    "depth": {},
}  # fmt: skip
"""Ways to shrink, tried in this order; every one of them cuts the depth as well."""


_FILLED: dict[str, Any] = {
    "head_dim": 16, "num_experts_per_tok": 2, "n_routed_experts": 8, "num_experts": 8, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1,
    "num_local_experts": 8, "first_k_dense_replace": 1, "vocab_size": 512, "pad_token_id": 0, "rope_theta": 10000.0,
    "default_language": "en_XX", "num_key_value_heads": 4, "decoder_num_key_value_heads": 4,
    "moe_intermediate_size": 64,
}  # fmt: skip
"""Fields without which some models cannot be built, and that their default configurations leave at None."""


def _shrunk(config: Any, sizes: dict[str, int], layers: int) -> dict[str, Any]:
    """Arguments for a smaller configuration of the same class: only fields that it has, and its parts likewise."""
    changed: dict[str, Any] = {}
    parts = getattr(type(config), "sub_configs", {})
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for alias, target in getattr(config, "attribute_map", {}).items():
        if target in fields:
            fields.pop(alias, None)
    for name, value in fields.items():
        if name in parts and value is not None:
            inner = _shrunk(value, sizes, layers)
            changed[name] = type(value)(**inner)
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            if name in sizes and value > sizes[name]:
                changed[name] = sizes[name]
            elif name in _DEPTHS and value > layers:
                changed[name] = layers
            elif sizes.get("vocab_size") and value >= sizes["vocab_size"] and _is_token(name):
                changed[name] = 1 + len(changed) % 8
        elif name == "depths" and isinstance(value, (list, tuple)):
            changed[name] = type(value)(1 for _ in value)
    return changed


def _is_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index", "_token_idx"))


def _layer_lists(config: Any, layers: int) -> dict[str, Any]:
    """Per-layer lists cut to the new depth, keeping one of each kind where they fit."""
    cut: dict[str, Any] = {}
    depth = next((getattr(config, name) for name in _DEPTHS if isinstance(getattr(config, name, None), int)), None)
    for name, value in vars(config).items():
        if isinstance(value, list) and depth and len(value) == depth and depth > layers:
            kinds = list(dict.fromkeys(map(str, value)))
            chosen = [next(v for v in value if str(v) == kind) for kind in kinds][:layers]
            cut[name] = (chosen * layers)[:layers]
    return cut


def configurations(case: Case) -> Iterator[tuple[str, Any]]:
    """Tiny configurations, likeliest first; those that transformers refuses to make are left out."""
    config_class = CONFIG_MAPPING[case.model_type]
    default = config_class()
    seen: set[str] = set()
    for (name, sizes), layers in itertools.product(_SIZES.items(), (_LAYERS, 4)):
        for variant in ("plain", "lists", "filled"):
            arguments = _shrunk(default, sizes, layers)
            if variant == "filled":
                for field, value in _FILLED.items():
                    if getattr(default, field, 0) is None:
                        arguments[field] = value
                if case.task == "causal-lm" and getattr(default, "is_decoder", None) is False:
                    arguments["is_decoder"] = True
            elif variant == "lists":
                lists = _layer_lists(default, layers)
                if not lists:
                    continue
                arguments.update(lists)
            try:
                config = config_class(**copy.deepcopy(arguments))
            except Exception:
                continue
            _give_tokens(config)
            if variant == "filled" and getattr(config, "layer_types", 0) is None:
                config.layer_types = ["full_attention"] * config.num_hidden_layers
            text = config.to_json_string(use_diff=False)
            if text not in seen:
                seen.add(text)
                yield f"{name}, {layers} layers", config
    _give_tokens(default)
    yield "default", default


def _give_tokens(config: Any) -> None:
    """A tokenizer's numbers, which a decoder needs and default configurations leave out."""
    if getattr(config, "is_encoder_decoder", False):
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)


# -- batches ----------------------------------------------------------------------------------------------------------


def _text_config(config: Any) -> Any:
    with contextlib.suppress(Exception):
        return config.get_text_config(decoder=True)
    return config


def _vocabulary(config: Any) -> int:
    for holder in (_text_config(config), config):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    return 128


def _find(config: Any, names: Sequence[str], default: int) -> Any:
    holders = [config, *(getattr(config, name, None) for name in getattr(type(config), "sub_configs", {}))]
    for holder, name in itertools.product(holders, names):
        value = getattr(holder, name, None)
        if isinstance(value, (int, list, tuple)):
            return value
    return default


def _ids(config: Any, length: int) -> torch.Tensor:
    vocabulary = _vocabulary(config)
    return torch.randint(min(20, vocabulary - 1), vocabulary, (BATCH_SIZE, length))


def batches(case: Case, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Batches that such a model may take, likeliest first."""
    config: Any = model.config
    names = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    if case.task in ("causal-lm", "masked-lm", "seq2seq-lm"):
        longest = getattr(config, "max_position_embeddings", None)
        lengths = [32, 128, 15, 1, math.prod(getattr(config, "axial_pos_shape", (64,)))]
        for length in lengths + [longest] * (isinstance(longest, int) and longest <= 2048):
            ids = _ids(config, length)
            key = "inputs" if "inputs" in names and "input_ids" not in names else "input_ids"
            batch = {key: ids}
            if "labels" in names:
                batch["labels"] = ids.clone()
            yield batch
            if "attention_mask" in names:
                yield {**batch, "attention_mask": torch.ones_like(ids)}
        return
    if case.task == "image-classification":
        size = _find(config, ("image_size",), 64)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = _find(config, ("num_channels", "in_channels"), 3)
        key = "inputs" if "pixel_values" not in names else "pixel_values"
        labels = {"labels": torch.zeros(BATCH_SIZE, dtype=torch.int64)} if "labels" in names else {}
        for side in ((height, width), (224, 224)):
            yield {key: torch.randn(BATCH_SIZE, channels, *side), **labels}
        patch = _find(config, ("patch_size",), 16)
        flat = torch.randn(BATCH_SIZE, 16, channels * patch * patch)
        shapes = torch.full((BATCH_SIZE, 2), 4)
        masks = torch.ones(BATCH_SIZE, 16, dtype=torch.int64)
        yield {key: flat, "spatial_shapes": shapes, "pixel_attention_mask": masks, **labels}
        yield {"input_ids" if "input_ids" in names else key: _ids(config, 64), **labels}
        return
    bins = _find(config, ("num_mel_bins", "input_feat_per_channel", "feature_size", "num_features", "input_dim",
                          "feature_projection_input_dim"), 80)  # fmt: skip
    frames = _find(config, ("max_source_positions",), 128)
    vocabulary = _vocabulary(config)
    text = torch.randint(min(20, vocabulary - 1), vocabulary, (BATCH_SIZE, 12))
    labels = {"labels": text} if "labels" in names else {}
    audio = [
        torch.randn(BATCH_SIZE, bins, 2 * frames),
        torch.randn(BATCH_SIZE, 128, bins),
        torch.randn(BATCH_SIZE, bins, 128),
    ]
    waves = [torch.randn(BATCH_SIZE, 8000), torch.randn(BATCH_SIZE, 1, 8000)]
    extra: dict[str, torch.Tensor] = {}
    if "decoder_input_ids" in names and "labels" not in names:
        extra["decoder_input_ids"] = text
    inputs = waves if main == "input_values" else audio if main == "input_features" else [*audio, *waves]
    key = main if main in names else "input_features" if "input_features" in names else "input_values"
    if key in names and main != "input_ids":
        for data in inputs:
            yield {key: data, **labels, **extra}
            length = data.shape[1] if data.dim() == 2 or data.shape[1] == 128 else data.shape[-1]
            if "attention_mask" in names:
                yield {key: data, **labels, **extra, "attention_mask": torch.ones(BATCH_SIZE, length).long()}
    elif "input_ids" in names:
        ids = _ids(config, 32)
        yield {"input_ids": ids, **({"labels": ids.clone()} if "labels" in names else {})}


# -- one step ---------------------------------------------------------------------------------------------------------


def _model(case: Case, config: Any) -> nn.Module:
    model_class = getattr(transformers, case.class_name)
    if model_class.config_class is not type(config):
        # As the auto classes do: a text model takes the text part of a larger model's configuration.
        for name, part in getattr(type(config), "sub_configs", {}).items():
            if part is model_class.config_class:
                config = getattr(config, name)
    model = model_class._from_config(copy.deepcopy(config), dtype=torch.float32)
    if getattr(model.config, "use_cache", False):
        model.config.use_cache = False
    return model.train()  # type: ignore[no-any-return]


def _loss(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, or a mean of what it returns (the auto mappings name models that return none)."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else None
    if isinstance(loss, torch.Tensor):
        return loss.sum()
    return next(t for t in _tensors(outputs) if t.is_floating_point() and t.requires_grad).mean()


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """One training step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    _loss(model(**batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def on_cpu(case: Case) -> tuple[str, Any, dict[str, torch.Tensor] | None]:
    """The first tiny configuration and batch with which the step really runs: "ok", or why there is none."""
    reason = ""
    deadline = time.perf_counter() + CPU_SECONDS * 0.8
    try:
        found = configurations(case)
        for _, config in found:
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in _model(case, config).parameters())
            except Exception:
                size = 0
            if size > MAX_PARAMETERS:
                reason = reason or f"no tiny configuration: {size:,} parameters"
                continue
            try:
                model = _model(case, config)
                for batch in batches(case, model):
                    try:
                        step(model, batch)
                        return "ok", config, batch
                    except Exception as error:
                        reason = reason or _reason(error)
                        model.zero_grad()
                    if time.perf_counter() > deadline:
                        break
            except Exception as error:
                reason = reason or _reason(error)
            if time.perf_counter() > deadline:
                break
    except Exception as error:
        return f"no configuration: {_reason(error)}", None, None
    return reason or "no configuration", None, None


def on_virtual_gpu(case: Case, config: Any, batch: dict[str, torch.Tensor]) -> int:
    """The same step on the virtual GPU. Returns the number of device mismatches that it reports."""
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        with torch.device("cuda"):
            model = _model(case, config)
        gpu.adopt(model)
        step(model, {name: tensor.to("cuda") for name, tensor in batch.items()})
    if gpu.trace.mismatches and os.environ.get("ARCHITECTURES_VERBOSE"):
        for mismatch in gpu.trace.mismatches[:4]:
            print(case, gpu.trace.ops[mismatch.op], mismatch.operands, file=sys.stderr)
    return len(gpu.trace.mismatches)


def _child(case: Case, pipe: Any) -> None:
    """What runs in a case's own process: tells its state as it goes."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_HOST_BYTES, MAX_HOST_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not os.environ.get("ARCHITECTURES_VERBOSE"):
        os.dup2(1, 2)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    reason, config, batch = on_cpu(case)
    pipe.send(("cpu", reason))
    if batch is None:
        return
    try:
        pipe.send(("virtual", "ok", "", on_virtual_gpu(case, config, batch)))
    except BaseException as error:
        pipe.send(("virtual", _reason(error), traceback.format_exc(), 0))


# -- the sweep --------------------------------------------------------------------------------------------------------


class _Running:
    """A case in its process."""

    def __init__(self, case: Case) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.outcome = Outcome(case)
        self.begin = time.perf_counter()
        self.limit = self.begin + CPU_SECONDS
        self.process = context.Process(target=_child, args=(case, theirs))
        self.process.start()
        theirs.close()

    def finished(self) -> bool:
        """Take what it has told; whether it is over (ended, crashed or out of time)."""
        try:
            while self.pipe.poll():
                kind, reason, *rest = self.pipe.recv()
                if kind == "cpu":
                    self.outcome.cpu = reason
                    self.limit = time.perf_counter() + VIRTUAL_SECONDS
                else:
                    self.outcome.virtual, self.outcome.trace, self.outcome.mismatches = reason, *rest
        except EOFError:
            self.process.join()
            self._end(f"the process ended with {self.process.exitcode}")
            return True
        if time.perf_counter() > self.limit:
            self.process.kill()
            self.process.join()
            self._end("took too long")
            return True
        return False

    def _end(self, reason: str) -> None:
        self.outcome.seconds = time.perf_counter() - self.begin
        self.pipe.close()
        if not self.outcome.cpu:
            self.outcome.cpu = reason
        elif self.outcome.cpu == "ok" and not self.outcome.virtual:
            self.outcome.virtual = reason


def sweep(todo: list[Case]) -> Iterator[Outcome]:
    """Run every case, a few at a time."""
    at_once = int(os.environ.get("ARCHITECTURES_PARTS", "2"))
    waiting = collections.deque(todo)
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            case = waiting.popleft()
            # Imported here, so that the processes share it.
            with contextlib.suppress(Exception):
                getattr(transformers, case.class_name)
                importlib.import_module(CONFIG_MAPPING[case.model_type].__module__)
            running.append(_Running(case))
        multiprocessing.connection.wait([each.pipe for each in running], timeout=0.5)
        for each in list(running):
            if each.finished():
                running.remove(each)
                yield each.outcome


# -- the report -------------------------------------------------------------------------------------------------------


def report(outcomes: list[Outcome]) -> str:
    """The table, as Markdown."""
    lines = [
        "# Architectures",
        "",
        "Generated by `python -m tests.benchmarks.architectures --write docs/architectures.md` with "
        f"torch {torch.__version__.split('+')[0]} and transformers {transformers.__version__}. Do not edit.",
        "",
        "Every model class of six of transformers' auto mappings, in a tiny configuration: one training step (forward",
        "with labels, backward, AdamW) is run for real on the CPU, and then on the virtual GPU. An architecture counts",
        "if the real step runs; it has completed if the same step runs to its end on the virtual GPU.",
        "",
        "| task | tried | trained on the CPU | completed on the virtual GPU | rate |",
        "|---|---:|---:|---:|---:|",
    ]
    for task in [*TASKS, None]:
        mine = [each for each in outcomes if task in (None, each.case.task)]
        trained = [each for each in mine if each.cpu == "ok"]
        if mine:
            done = sum(each.virtual == "ok" for each in trained)
            rate = f"{done / len(trained):.1%}" if trained else "-"
            name = task or "**all**"
            lines.append(f"| {name} | {len(mine)} | {len(trained)} | {done} | {rate} |")
    failed = [each for each in outcomes if each.cpu == "ok" and each.virtual != "ok"]
    lines += ["", "## Failures on the virtual GPU", ""]
    if failed:
        lines += ["| task | model | reason |", "|---|---|---|"]
        lines += [f"| {e.case.task} | {e.case.class_name} | {_cell(e.virtual)} |" for e in failed]
    else:
        lines.append("None.")
    reported = [each for each in outcomes if each.virtual == "ok" and each.mismatches]
    lines += [
        "",
        "## Completed, with device mismatches reported",
        "",
        'On a real GPU these raise when they are only built under `torch.device("cuda")`: constructors such as',
        "`torch.Tensor(size)` ignore it and leave a parameter on the host. memprof reports it and goes on.",
        "",
    ]
    if reported:
        lines += ["| task | model | mismatches |", "|---|---|---:|"]
        lines += [f"| {e.case.task} | {e.case.class_name} | {e.mismatches} |" for e in reported]
    else:
        lines.append("None.")
    skipped = [each for each in outcomes if each.cpu != "ok"]
    lines += ["", "## Not counted: no tiny configuration trains on the CPU", ""]
    if skipped:
        lines += ["| task | model | reason |", "|---|---|---|"]
        lines += [f"| {e.case.task} | {e.case.class_name} | {_cell(e.cpu)} |" for e in skipped]
    else:
        lines.append("None.")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="transformers' architectures on the virtual GPU.")
    parser.add_argument("--only", help="just this model type or class")
    parser.add_argument("--task", choices=TASKS, help="just this task")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table to FILE")
    parser.add_argument("--traces", action="store_true", help="print the traceback of every failure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    todo = cases(options.task, options.only)
    if not todo:
        parser.error("no such architecture")
    begin = time.perf_counter()
    outcomes: list[Outcome] = []
    for outcome in sweep(todo):
        outcomes.append(outcome)
        state = f"cpu: {outcome.cpu}" if outcome.cpu != "ok" else outcome.virtual
        if outcome.mismatches:
            state += f" ({outcome.mismatches} device mismatches)"
        case = outcome.case
        print(f"{len(outcomes):3}/{len(todo)} {case.task:20} {case.class_name:45} {outcome.seconds:5.1f}s {state}",
              flush=True)  # fmt: skip
        if options.traces and outcome.trace:
            print(outcome.trace, flush=True)
    outcomes.sort(key=lambda each: todo.index(each.case))
    text = report(outcomes)
    print()
    print("\n".join(line for line in text.splitlines()[8:17]))
    groups: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.cpu == "ok" and outcome.virtual != "ok":
            groups.setdefault(outcome.virtual, []).append(outcome.case.class_name)
    for reason, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):3} {reason}: {', '.join(names)}")
    print(f"{time.perf_counter() - begin:.0f} s")
    if options.write is not None:
        options.write.write_text(text)
    trained = [each for each in outcomes if each.cpu == "ok"]
    return 0 if trained and sum(each.virtual == "ok" for each in trained) >= BAR * len(trained) else 1


if __name__ == "__main__":
    sys.exit(main())
