"""vLLM's builds of FlashAttention 2 and 3, which vllm.vllm_flash_attn calls.

Sources: csrc/flash_attn/flash_api.cpp (mha_varlen_fwd) and hopper/flash_api.cpp (mha_fwd,
mha_fwd_get_scheduler_metadata) of vllm-project/flash-attention, which differ from Dao-AILab's (stubs/flash_attn,
stubs/flash_attn_interface.py) in that the caller gives the output.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.stubs import flash_attn_interface as hopper
from memprof.stubs.flash_attn.attention import allocate_splits
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels import registry

_MAX_PACKED_BATCH = 992  # largest batch whose numbers of splits are in the metadata (use_dynamic_split)


@registry.kernel("_vllm_fa2_C.varlen_fwd")
def run_varlen_forward(launch: KernelContext) -> Any:
    """Return output and log-sum-exp [heads, tokens]; decoding with grouped heads copies the queries and splits keys."""
    query, key, value, out, bounds, *_ = launch.args[:5]
    max_queries, max_keys, window = launch.args[10], launch.args[11], launch.args[16:18]
    (tokens, heads, size), key_heads, batch = query.shape, key.shape[-2], bounds.numel() - 1
    groups = heads // key_heads
    swaps_groups = (
        max_queries == 1 and groups > 1 and max(window) < 0 and not size % 8 and launch.args[9] is None
    )  # alibi_slopes
    with launch.inside():
        if size % 8:
            query, key, value = (torch.nn.functional.pad(tensor, (0, 8 - size % 8)) for tensor in (query, key, value))
        elif swaps_groups:
            query = query.reshape(batch, key_heads, groups, size).transpose(1, 2).reshape(-1, key_heads, size)
            tokens, heads, max_queries = batch * groups, key_heads, groups
        result = torch.empty_like(query) if out is None or swaps_groups or size % 8 else out
        log_sum_exp = query.new_empty((heads, tokens), dtype=torch.float32)
        splits = allocate_splits(query, batch, heads, size, max_queries, max_keys, 0) if swaps_groups else ()
        del splits
        if swaps_groups:
            log_sum_exp = log_sum_exp.reshape(heads * groups, batch)
            result = result.reshape(batch, groups, key_heads, size).transpose(1, 2).reshape(batch, -1, size)
        elif size % 8:
            result = result[..., :size]
    launch.values.store.drop((result if out is None else out).untyped_storage()._cdata)
    return [result if out is None else out, log_sum_exp]


@registry.kernel("_vllm_fa3_C.fwd")
def run_hopper_forward(launch: KernelContext) -> Any:
    """Return output, log-sum-exp, and both in float32 for each part if the keys are split."""
    names = [argument.name for argument in launch.func._schema.arguments]
    given = dict(zip(names, launch.args, strict=False)) | launch.kwargs
    options = hopper.HopperOptions(
        causal=given["is_causal"],
        window_size=(given["window_size_left"], given["window_size_right"]),
        softcap=given["softcap"],
        num_splits=given["num_splits"],
        cu_seqlens_q=given["cu_seqlens_q"],
        cu_seqlens_k=given["cu_seqlens_k"],
        max_seqlen_q=given["max_seqlen_q"],
        max_seqlen_k=given["max_seqlen_k"],
        page_table=given["page_table"],
        used_lengths=(given["seqused_q"], given["seqused_k"], given["leftpad_k"]),
        scheduler_metadata=given["scheduler_metadata"],
    )
    with launch.inside():
        query, key, value, out = given["q"], given["k"], given["v"], given["out"]
        result, *others = hopper.run_forward(query, key, value, options, out=out)
        log_sum_exp, *splits = others
        return [result, log_sum_exp, *(splits or [query.new_empty(0, dtype=torch.float32) for _ in range(2)])]


@registry.kernel("_vllm_fa3_C.get_scheduler_metadata")
def make_scheduler_metadata(launch: KernelContext) -> Any:
    """Return the kernel's schedule: a counter, and the number of splits of each sequence (int32)."""
    batch = launch.args[0]
    size = 1 + (batch if batch <= _MAX_PACKED_BATCH else 0)
    with launch.inside():
        return launch.args[8].new_empty(size, dtype=torch.int32)
