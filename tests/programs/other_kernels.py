"""Public programs that begin by importing what cannot be installed without a GPU (docs/stubs.md)."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy

from tests.programs import data, folders
from tests.programs.program import Program
from tests.programs.stubs import DLLOGGER, NO_WANDB


def _ratings(home: Path) -> None:
    """Users, items and labels as the program's own converter writes them."""
    import torch

    folder = home / "data_of_ratings"
    folder.mkdir()
    parts: dict[str, list[dict[str, object]]] = {}
    for split, rows in (("train", 40_000), ("test", 1_000)):
        pairs = torch.stack((torch.randint(0, 500, (rows,)), torch.randint(0, 300, (rows,))), dim=1)
        torch.save(pairs, folder / f"{split}_pairs.pt")
        torch.save((torch.arange(rows) % 100 == 0).float().view(-1, 1), folder / f"{split}_labels.pt")
        parts[split] = [
            {"type": "torch_tensor", "features": ["user", "item"], "files": [f"{split}_pairs.pt"]},
            {"type": "torch_tensor", "features": ["label"], "files": [f"{split}_labels.pt"]},
        ]
    said = {
        "feature_spec": {"user": {"cardinality": 500}, "item": {"cardinality": 300}, "label": {}},
        "source_spec": parts,
        "channel_spec": {"user_ch": ["user"], "item_ch": ["item"], "label_ch": ["label"]},
        "metadata": {"test_samples_per_series": 100},
    }
    (folder / "feature_spec.yaml").write_text(json.dumps(said), encoding="utf-8")


def tiny_llama(home: Path) -> None:
    """A model's folder with a tokenizer of words, and a few conversations."""
    folder = home / "model"
    data.word_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
        "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = [{"text": data.words(200, seed)} for seed in range(256)]
    (home / "texts").mkdir()
    (home / "texts" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _documents(home: Path) -> None:
    """Shards of texts of some hundred tokens each, which begin with the token that ends the one before."""
    numbers = numpy.random.default_rng(0)
    for split, count in (("train_000001", 6_000_000), ("train_000002", 6_000_000), ("val_000000", 3_000_000)):
        head = numpy.array([20240520, 1, count, *[0] * 253], dtype=numpy.int32)
        tokens = numbers.integers(0, 50_256, count).astype(numpy.uint16)
        tokens[numpy.cumsum(numbers.integers(400, 1200, count // 1200))] = 50_256
        tokens[0] = 50_256
        file = home / "data" / "fineweb10B" / f"fineweb_{split}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(head.tobytes() + tokens.tobytes())


def _coco(home: Path) -> None:
    """Eight pictures with five outlined rectangles each, in COCO's own folders."""
    numbers = numpy.random.default_rng(0)
    for split in ("train2017", "val2017"):
        data.images(home / "coco" / split, classes=1, each=8, size=640)
        pictures, outlines = [], []
        for number in range(8):
            name = f"class0/{number}.png"
            pictures.append({"id": number, "file_name": name, "width": 640, "height": 640})
            for x, y, width, height in numbers.integers(100, 250, (5, 4)).tolist():
                corners = [x, y, x + width, y, x + width, y + height, x, y + height]
                outlines.append(
                    {
                        "id": len(outlines) + 1,
                        "image_id": number,
                        "category_id": 1 + len(outlines) % 90,
                        "bbox": [x, y, width, height],
                        "area": width * height,
                        "iscrowd": 0,
                        "segmentation": [corners],
                    }
                )
        categories = [{"id": number, "name": str(number)} for number in range(1, 91)]
        said = {"images": pictures, "annotations": outlines, "categories": categories}
        data.write_json(home / "coco" / "annotations" / f"instances_{split}.json", said)


def _packed(home: Path) -> None:
    """Texts of tokens in 64 files of each part, as the program's own builder packs them."""
    numbers = numpy.random.default_rng(0)
    tokens = 4 * 2049
    for part in ("train_slim", "train_star"):
        for number in range(64):
            head = struct.pack("<7sQBQ", b"LITPKDS", 1, 8, tokens)
            file = home / "data" / f"{part}_{number:010d}.bin"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(head + numbers.integers(1, 32_000, tokens).astype(numpy.uint16).tobytes())


# Its logger asks for an account, by Lightning's name of 2023; its launcher, `lightning run model`, sets a variable.
NO_LIGHTNING_LOGGER = """
import os, sys
from unittest.mock import MagicMock

os.environ["LT_CLI_USED"] = "1"
sys.modules["pytorch_lightning"] = sys.modules["pytorch_lightning.loggers"] = MagicMock()
"""

_TINY = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LlamaForCausalLM(LlamaConfig.from_pretrained("model")).to(torch.bfloat16).save_pretrained("model")
"""


def _nanotron(home: Path) -> None:
    """The repository's own example of a configuration, on texts and a tokenizer that are here, without pipelines."""
    import yaml

    tiny_llama(home)
    said = yaml.safe_load((home / "examples" / "config_tiny_llama.yaml").read_text(encoding="utf-8"))
    said["data_stages"] = said["data_stages"][:1]
    said["data_stages"][0]["data"]["dataset"]["hf_dataset_or_datasets"] = "texts"
    said["data_stages"][0]["data"]["num_loading_workers"] = 0
    said["tokenizer"]["tokenizer_name_or_path"] = "model"
    said["parallelism"].update(dp=4, tp=2, pp=1)
    (home / "tiny.yaml").write_text(yaml.safe_dump(said), encoding="utf-8")


# Of 2024: transformers 5 calls a tokenizer for batches otherwise; numba is of a kind of data set that is not read.
OLD_TRANSFORMERS = """
import os, sys
from unittest.mock import MagicMock

import transformers

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # as the program's own first lines say
sys.modules["numba"] = MagicMock()
tokenizer = transformers.PreTrainedTokenizerFast
tokenizer.batch_encode_plus = tokenizer.__call__
"""
# Which import kernels of others; each is run as its authors say, with less data.
OTHER_KERNELS = (
    Program(
        name="modded-nanogpt FlashAttention 3",
        repository="KellerJordan/modded-nanogpt",
        checkout="modded-nanogpt-2025",
        commit="9350f4d3",
        command="torchrun --standalone --nproc_per_node=8 train_gpt.py",
        data=_documents,
        options="--gpu h100-80gb",
        seconds=600,
        findings=frozenset({"logits-explosion", "fragmentation"}),
    ),
    Program(
        name="torchvision mask rcnn",
        repository="pytorch/vision",
        commit="acccf864",
        folder="references/detection",
        command="train.py --data-path coco --model maskrcnn_resnet50_fpn --batch-size 2 --workers 0 --epochs 1",
        data=_coco,
        seconds=300,
        findings=frozenset({"fragmentation"}),
    ),
    Program(
        name="nanotron llama",
        repository="huggingface/nanotron",
        commit="9dde940",
        command="torchrun --nproc-per-node 8 run_train.py --config-file tiny.yaml",
        before=OLD_TRANSFORMERS,
        data=_nanotron,
        options="--gpu h100-80gb",
        path=("src",),
        seconds=300,
    ),
    Program(
        name="series mamba",
        repository="thuml/Time-Series-Library",
        commit="4e938a1",
        command=(
            "run.py --task_name long_term_forecast --is_training 1 --model_id ETTh1_96_96 --data ETTh1 --root_path "
            "./dataset/ --data_path ETTh1.csv --features M --num_workers 0 --model Mamba --expand 2 --d_ff 16 "
            "--d_conv 4 --enc_in 7 --c_out 7"
        ),
        data=folders.series,
    ),
    Program(
        name="apex NCF",
        repository="NVIDIA/DeepLearningExamples",
        commit="729963d",
        folder="PyTorch/Recommendation/NCF",
        command="ncf.py --data data_of_ratings --epochs 1 --batch_size 32768 --valid_batch_size 1000 --amp",
        before=DLLOGGER,
        data=_ratings,
    ),
    Program(
        name="transformer engine mnist",
        repository="NVIDIA/TransformerEngine",
        commit="27486e0",
        folder="examples/pytorch/mnist",
        command="main.py --use-fp8 --epochs 1",
        data=lambda home: data.idx(home.parent / "data", "MNIST"),
        options="--gpu h100-80gb",
    ),
    Program(
        name="RWKV-7",
        repository="BlinkDL/RWKV-LM",
        commit="524481d",
        folder="RWKV-v7/train_temp",
        command="rwkv7_train_simplified.py",
        before=NO_WANDB,
    ),
    Program(
        name="TinyLlama",
        repository="jzhang38/TinyLlama",
        commit="bf12224",
        command="torchrun --nproc-per-node 8 pretrain/tinyllama.py --devices 8 --train_data_dir data",
        before=NO_LIGHTNING_LOGGER,
        data=_packed,
        options="--gpu a100-40gb",
        path=(".",),
        seconds=300,
        findings=frozenset({"fragmentation", "unreduced-gradients"}),
        layers=True,
    ),
    Program(
        name="trl sft flash attention",
        repository="huggingface/trl",
        commit="f2cd577",
        command=(
            "trl/scripts/sft.py --model_name_or_path model --dataset_name texts --attn_implementation "
            "flash_attention_2 --dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 4 --max_length 256 "
            "--output_dir out --report_to none --save_strategy no --bf16 True"
        ),
        before=_TINY,
        data=tiny_llama,
        path=(".",),
    ),
)
