"""transformers' page "model memory anatomy" (docs/source/en/model_memory_anatomy.md at 249ef816): bert-large, by NVML.

The page reads the GPU at three moments: after a first small tensor, after the model, and after training with
`Trainer`: four sequences of 512 tokens, float32, no checkpointing. Its figures are of 2022: attention is eager, and the
optimizer loops over parameters. The page's own first reading is what CUDA and its kernels took there; the other two are
that and what is reserved.
"""

from __future__ import annotations

import torch

from memprof.units import MIB
from memprof.virtual import VirtualGpu
from tests.accuracy.published.prediction import GPUS, VERSIONS, Prediction, Run, run
from tests.accuracy.published.rows import Row

PAGE_CONTEXT = 1343 * MIB  # The page's first reading.
STEPS = 3
_EAGER = (
    "the page used torch 1 and transformers 4 of 2022, and the simulation uses today's model: 1,492 MiB are about one "
    "more matrix of attention scores in each of the 24 layers (64 MiB); NVML also counts the kernels and workspaces of "
    "cuBLAS, which were loaded after the page's first reading"
)


def page(row: Row) -> Prediction:
    if "context" in row.method:
        done = run(_first_tensor, GPUS[row.gpu])
        return Prediction(
            done.device_used,
            unit_bytes=MIB,
            differs=VERSIONS,
            explanation="the context: 426 MiB are counted, as with drivers that load a kernel when it is first called; "
            "before CUDA 11.7 all kernels of torch were loaded at once",
        )
    trains = row.method.startswith("train")
    done = run(_train if trains else _weights, GPUS[row.gpu])
    return Prediction(
        _in_use_at_the_end(done) + PAGE_CONTEXT,
        unit_bytes=MIB,
        basis="reserved, and the page's own reading of the context",
        differs=VERSIONS,
        explanation=_EAGER if trains else "",
    )


def _in_use_at_the_end(done: Run) -> int:
    return done.replay.reserved[-1]


def _first_tensor(gpu: VirtualGpu) -> None:
    torch.ones((1, 1)).to("cuda")


def _model() -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from memprof.workload.catalog.models import find_model

    torch.ones((1, 1)).to("cuda")
    settings = find_model("bert-large-uncased").load_config()
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, attn_implementation="eager")
    return AutoModelForSequenceClassification.from_config(config).to("cuda")  # type: ignore[no-any-return]


def _weights(gpu: VirtualGpu) -> None:
    _model()  # freed when this returns; its segments stay reserved, as NVML sees them


def _train(gpu: VirtualGpu) -> None:
    model = _model().train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(STEPS):
        batch = {
            "input_ids": torch.randint(100, 30_000, (4, 512)).to("cuda"),
            "labels": torch.randint(0, 2, (4,)).to("cuda"),
        }
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad(set_to_none=False)  # the default before torch 2.0
