"""An out-of-memory error that was published, met again: a 4B model at 131,072 tokens on a GPU of 94.97 GiB.

Case study 5 of the project's shared data. Its table (in GiB, although it says GB: 37.09 is 131,072 x 151,936 x 2 bytes
in GiB) and its error: 62.97 after the whole forward, then "Tried to allocate 37.09 GiB" on a GPU of 94.97 GiB, in the
cross entropy of shifted logits in bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import memprof
from memprof.flows import profile as flow
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.workload.catalog import find_model

GIB = 1 << 30
TOKENS, VOCABULARY = 131_072, 151_936
GPU = "rtx-pro-6000-blackwell"
LOGITS = TOKENS * VOCABULARY * 2


@pytest.fixture(scope="module")
def study() -> Report:
    """A model of the same shape, checkpointed as the study's is, and the study's kind of loss."""
    settings = find_model("qwen3-4b").load_config()
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with memprof.virtual_gpu(GPU, alloc_conf="") as gpu:
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        model.train()
        model.gradient_checkpointing_enable()
        logits = model(ids, use_cache=False).logits
        kept = logits[..., :-1, :].contiguous()
        loss = nn.functional.cross_entropy(kept.view(-1, VOCABULARY), ids[..., 1:].reshape(-1))
        loss.backward()
        del loss, kept, logits
    return gpu.report()


def test_the_gpu_is_the_study_s(study: Report, shared_dir: Path) -> None:
    text = (shared_dir / "case-studies" / "5-long-context-logits.md").read_text(encoding="utf-8")
    assert "Tried to allocate 37.09 GiB" in text and "GPU 0 capacity: 94.97 GiB" in text
    assert round(study.device.total_bytes / GIB, 2) == 94.97


def test_the_same_request_is_refused(study: Report) -> None:
    """37.09 GiB, as the study's error says: the log-softmax over all tokens but the last. At batch 1 the shifted
    logits are contiguous as they are, so that the `contiguous()` before it copies nothing."""
    verdict = study.verdict
    assert not verdict.fits
    assert verdict.oom_op == "aten._log_softmax" and verdict.oom_dtype == "bfloat16"
    assert verdict.oom_shape == (TOKENS - 1, VOCABULARY)
    assert verdict.oom_source is not None and "test_case_study.py" in verdict.oom_source
    tried = verdict.tried_to_allocate_bytes
    assert tried is not None and 0 <= tried - (LOGITS - 2 * VOCABULARY) < 2 << 20  # a segment: whole pages of 2 MiB
    assert verdict.oom_message is not None
    assert verdict.oom_message.startswith(
        "CUDA out of memory. Tried to allocate 37.09 GiB. GPU 0 has a total capacity of 94.97 GiB of which "
    )


def test_what_is_in_use_then(study: Report) -> None:
    """The study had 62.97 GiB: logits, and 25.88 of parameters and checkpoints of a model of 3.92B parameters with an
    attention of its own. This model has 4.02B and keeps 36 checkpoints, 36 x 0.625 GiB."""
    in_use = study.verdict.in_use_bytes
    assert in_use is not None
    assert in_use / GIB == pytest.approx(7.55 + 36 * 0.625 + 2.5 + LOGITS / GIB, abs=0.2)
    # Either way, a second copy is too much, and would fit without the first one.
    for used in (in_use, 62.97 * GIB):
        assert used + LOGITS > 94.97 * GIB > used


@pytest.mark.nightly
def test_transformers_own_loss_dies_sooner_of_a_larger_copy() -> None:
    """It copies the logits to float32 before it shifts them: 74.19 GiB at once."""
    spec = TargetSpec(
        model="4B",
        model_is_size=True,
        context_length=TOKENS,
        activation_checkpointing=True,
        steps=1,
        gpu=GPU,
        alloc_conf="",
    )
    verdict = flow.profile(spec)[1].verdict
    assert (verdict.oom_stage, verdict.oom_step, verdict.oom_dtype) == ("loss", 1, "float32")
    assert verdict.tried_to_allocate_bytes == 2 * LOGITS
    assert verdict.oom_message is not None and "Tried to allocate 74.19 GiB. " in verdict.oom_message
