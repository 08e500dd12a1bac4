"""Formats of quantized weights: from `quantization_config` in a config.json, or from --quantize.

An entry that affects memory is either supported or an error. This file does not import torch; stored_weights.py builds
models with these formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memprof.errors import UsageError
from memprof.spec import BITSANDBYTES_FORMATS, GGUF_FORMATS, STORED_FORMATS, TargetSpec, check_quantized

GROUP_SIZE = 128  # default number of rows that share a scale; also the default side of a float8 block

# Entries on how the weights were computed, or on kernels of older releases; they do not affect memory.
_IGNORED_ENTRIES = {
    "quant_method", "damp_percent", "dataset", "tokenizer", "true_sequential", "static_groups", "model_seqlen",
    "model_name_or_path", "model_file_base_name", "meta", "quantizer", "pad_token_id", "batch_size",
    "cache_block_outputs", "module_name_preceding_first_block", "use_exllama", "disable_exllama", "exllama_config",
    "max_input_length", "use_cuda_fp16", "act_group_aware", "is_marlin_format", "mse", "fuse_max_seq_len", "fmt",
    "_load_in_4bit", "_load_in_8bit", "damp_auto_increment", "hyb_act",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage format of a model's quantized weights, with its `quantization_config`."""

    name: str  # as --quantize spells it
    config: Mapping[str, Any]  # entries of `quantization_config`; only the method for GGUF, which has none
    from_checkpoint: bool = False

    @property
    def is_bitsandbytes(self) -> bool:
        """Return whether bitsandbytes quantizes the weights as they are loaded."""
        return self.name in BITSANDBYTES_FORMATS


def requested_format(spec: TargetSpec) -> WeightFormat | None:
    """Return the format of `spec.quantize`, with the settings of published checkpoints; None without --quantize."""
    name = spec.quantize
    if name is None:
        return None
    if name == "int8":
        return WeightFormat(name, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    if name in BITSANDBYTES_FORMATS:
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": name}
        return WeightFormat(name, {**config, "bnb_4bit_use_double_quant": spec.double_quant})
    if name in GGUF_FORMATS:
        return WeightFormat(name, {"quant_method": "gguf"})
    if name == "mxfp4":
        return WeightFormat(name, {"quant_method": name})
    if name == "fp8":
        return WeightFormat(name, {"quant_method": name, "weight_block_size": [GROUP_SIZE, GROUP_SIZE]})
    method, _, bits = name.partition("-int")
    return WeightFormat(name, {"quant_method": method, "bits": int(bits), "group_size": GROUP_SIZE, "desc_act": False})


def checkpoint_format(config: Mapping[str, Any], source: str) -> WeightFormat | None:
    """Return the format in `quantization_config` of a config.json, or None without one.
    Raises UsageError, which names `source` and the entries, if entries are not supported."""
    entries = config.get("quantization_config")
    if not entries:
        return None
    method = entries.get("quant_method") or ("bitsandbytes" if _BITS.intersection(entries) else None)
    reader = _READERS.get(str(method))
    if reader is None:
        raise _make_unsupported_error(f"{method or 'no quant_method'} ({source})")
    problems: list[str] = []
    name = reader(entries, config, problems)
    unknown = [key for key in entries if key not in _IGNORED_ENTRIES | _SUPPORTED_ENTRIES[str(method)]]
    problems += [f"{key} {entries[key]!r}" for key in unknown if entries[key] not in (None, False, [], {}, "")]
    if problems:
        raise _make_unsupported_error(f"{method} with {', '.join(problems)} ({source})")
    return WeightFormat(name, {**entries, "quant_method": method}, from_checkpoint=True)


def check_use(stored: WeightFormat, spec: TargetSpec) -> None:
    """Raise UsageError if `spec` is incompatible with the format of a checkpoint that is quantized already."""
    if not stored.from_checkpoint:
        return
    if spec.quantize is not None:
        raise UsageError(
            "the checkpoint's weights are quantized already",
            value=f"{stored.name}, and --quantize {spec.quantize}",
            hint="leave out --quantize, or take quantization_config out of the config.json",
        )
    if spec.npt is not None:
        raise UsageError("--npt does not go with quantized weights", value=stored.name)
    check_quantized(stored.name, spec)


def _make_unsupported_error(value: str) -> UsageError:
    return UsageError(
        "the checkpoint's weights are stored in a way that is not simulated",
        value=value,
        hint=f"simulated are bitsandbytes, {', '.join(STORED_FORMATS)}; for the memory of plain weights take "
        "quantization_config out of the config.json",
    )


_BITS = frozenset({"load_in_4bit", "load_in_8bit"})


def _read_bitsandbytes(entries: Mapping[str, Any], config: Mapping[str, Any], problems: list[str]) -> str:
    if entries.get("load_in_4bit"):
        kind = str(entries.get("bnb_4bit_quant_type", "fp4"))
        if kind not in BITSANDBYTES_FORMATS:
            problems.append(f"bnb_4bit_quant_type {kind!r}")
        return kind
    if not entries.get("load_in_8bit"):
        problems.append("neither load_in_4bit nor load_in_8bit")
    return "int8"


_LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}  # layouts in a file
_SUPPORTED_BITS = {"gptq": (4, 8), "awq": (4,)}
_KERNELS = {"gptq": ("marlin", "triton"), "awq": ("marlin", "gemm")}  # supported kernels of GPTQModel


def _read_packed(entries: Mapping[str, Any], config: Mapping[str, Any], problems: list[str]) -> str:
    method = entries["quant_method"]
    formats, bits = _LAYOUTS[method], entries.get("bits", 4 if method == "awq" else None)
    if method == "gptq" and not entries.get("sym", True):
        problems.append("sym False")
    if bits not in _SUPPORTED_BITS[method]:
        problems.append(f"bits {bits!r}")
    group = entries.get("group_size", GROUP_SIZE)
    if not isinstance(group, int) or (group != -1 and group not in (32, 64, 128)):
        problems.append(f"group_size {group!r}")
    layout = entries.get("checkpoint_format") or entries.get("format") or entries.get("version") or formats[0]
    if str(layout).lower() not in formats:
        problems.append(f"format {layout!r}")
    kernel = entries.get("backend") or "auto"
    if kernel not in ("auto", "auto_trainable", "autoawq", *_KERNELS[method]):
        problems.append(f"backend {kernel!r}")
    if any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        problems.append("a mixture of experts")
    return f"{method}-int{bits}"


def _read_fp8(entries: Mapping[str, Any], config: Mapping[str, Any], problems: list[str]) -> str:
    if entries.get("fmt", "e4m3") != "e4m3":
        problems.append(f"fmt {entries['fmt']!r}")
    if entries.get("expert_dtype", "fp8") != "fp8":
        problems.append(f"expert_dtype {entries['expert_dtype']!r}")
    block = entries.get("weight_block_size", [GROUP_SIZE, GROUP_SIZE])
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(isinstance(side, int) and side > 0 for side in block)
    ):
        problems.append(f"weight_block_size {block!r}")
    return "fp8"


def _read_mxfp4(entries: Mapping[str, Any], config: Mapping[str, Any], problems: list[str]) -> str:
    if config.get("model_type") != "gpt_oss":
        problems.append(f"model_type {config.get('model_type')!r} (transformers has MXFP4 for gpt_oss)")
    return "mxfp4"


_READERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], list[str]], str]] = {
    "bitsandbytes": _read_bitsandbytes, "gptq": _read_packed, "awq": _read_packed, "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
}  # fmt: skip
# Method -> supported entries of `quantization_config`.
_SUPPORTED_ENTRIES: dict[str, set[str]] = {
    "bitsandbytes": {
        *_BITS, "llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_has_fp16_weight", "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage",
    },
    "gptq": {
        "bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "backend", "block_name_to_quantize",
        "modules_in_block_to_quantize",
    },
    "awq": {
        "bits", "group_size", "zero_point", "version", "format", "checkpoint_format", "backend", "desc_act", "sym",
        "modules_to_not_convert",
    },
    "fp8": {
        "activation_scheme", "weight_block_size", "dequantize", "modules_to_not_convert", "ignored_layers",
        "modules_to_convert", "scale_fmt", "expert_dtype",
    },
    "mxfp4": {"modules_to_not_convert", "dequantize"},
}  # fmt: skip
