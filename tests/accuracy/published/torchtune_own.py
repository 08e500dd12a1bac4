"""torchtune's own recipe, at the commit that published its table of techniques, on the virtual GPU.

The recipe and its configuration run as they are, with the row's flags. What is replaced: the checkpoint (weights of
the model's own shapes), the tokenizer, and the texts, of which every row is as long as it may be.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from memprof.virtual import VirtualGpu
from tests.accuracy.published.libraries import Checkout
from tests.accuracy.published.prediction import run

SOURCE = Checkout(
    "meta-pytorch/torchtune",
    "1814feb17a9038e1a8053ce93111bd26774a8db6",
    (
        ("torchao", "0.6.1"),  # the release of that month
        ("omegaconf", "2.3.0"),
        ("antlr4-python3-runtime", "4.9.3"),
        ("sentencepiece", "0.2.1"),
        ("tiktoken", "0.12.0"),
        ("blobfile", "3.1.0"),
    ),
)
CONFIGURATION = "llama3_2/3B_full_single_device"
MODEL = "torchtune.models.llama3_2.llama3_2_3b"
FLAGS = (
    "batch_size=2",
    "optimizer._component_=torch.optim.AdamW",
    "optimizer.fused=true",
    "optimizer_in_bwd=false",
    "enable_activation_checkpointing=false",
    "loss._component_=torch.nn.CrossEntropyLoss",
    "epochs=1",
    "max_steps_per_epoch=3",
)
_IMPORTED = frozenset({"torchtune", "torchao", "omegaconf", "antlr4", "sentencepiece", "tiktoken", "blobfile"})
_STUBS = "torchtune_stubs"


def full_finetuning(gpu: str, length: int, packed: bool) -> int:
    """The eager rows: the most allocated in full fine-tuning without checkpointing, with the plain loss."""
    # A process of its own: torchao's operators are registered once in one, and another release may have been before.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_allocated, gpu, length, packed).result()


def _allocated(gpu: str, length: int, packed: bool) -> int:
    with SOURCE.imported(".", names=_IMPORTED):
        return run(functools.partial(_recipe, length, packed), gpu).allocated


def _recipe(length: int, packed: bool, gpu: VirtualGpu) -> None:
    # Imported with the GPU in place: flex attention is taken where the GPU can run it.
    from omegaconf import OmegaConf  # type: ignore[import-not-found]
    from torchtune import config  # type: ignore[import-not-found]

    asked = OmegaConf.load(SOURCE.folder / "recipes" / "configs" / f"{CONFIGURATION}.yaml")
    asked = OmegaConf.merge(asked, OmegaConf.from_dotlist(list(FLAGS)))
    for name, given in (
        ("tokenizer", {}),
        ("checkpointer", {"model_type": "LLAMA3_2"}),
        ("dataset", {"length": length, "packed": packed}),
        ("metric_logger", {}),
    ):
        OmegaConf.update(asked, name, {"_component_": f"{_STUBS}.{name}", **given}, merge=False)
    with torch.device("meta"):
        shapes = {
            n: w.shape for n, w in config.instantiate(OmegaConf.create({"_component_": MODEL})).state_dict().items()
        }
    stubs = types.ModuleType(_STUBS)
    vars(stubs).update(
        tokenizer=lambda: types.SimpleNamespace(pad_id=0, max_seq_len=length),
        checkpointer=lambda **_: _Checkpoint(shapes),
        dataset=lambda tokenizer, length, packed: [_packed(length) if packed else _text(length)] * 8,
        metric_logger=lambda: types.SimpleNamespace(log_config=lambda _: None, log_dict=lambda _, step: None),
    )
    sys.modules[_STUBS] = stubs
    try:
        found = importlib.util.spec_from_file_location(
            "torchtune_recipe", SOURCE.folder / "recipes" / "full_finetune_single_device.py"
        )
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        recipe = module.FullFinetuneRecipeSingleDevice(asked)
        recipe.setup(asked)
        recipe.save_checkpoint = lambda **_: None
        recipe.train()
    finally:
        del sys.modules[_STUBS]


class _Checkpoint:
    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self.shapes = shapes

    def load_checkpoint(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"model": {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in self.shapes.items()}}


def _text(length: int) -> dict[str, Any]:
    return {"tokens": [1] * length, "labels": [1] * length}


def _packed(length: int) -> dict[str, Any]:
    whole = torch.ones(length, dtype=torch.int64)
    return {"tokens": whole, "labels": whole, "input_pos": whole, "seq_lens": torch.tensor([length])}
