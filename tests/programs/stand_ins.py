"""Python that runs before a program, in place of what it would download."""

from __future__ import annotations

# torchvision knows the checksums of CIFAR-10's files; the program's progress bar asks for a terminal.
ANY_CIFAR = """
import io, os
import torchvision.datasets.cifar as cifar

cifar.check_integrity = lambda *of, **how: True
os.popen = lambda *command: io.StringIO("24 80")
"""
GPT2_TOKENS = """
import tiktoken

class Bytes:
    n_vocab, max_token_value, eot_token = 50257, 50256, 50256
    _special_tokens = {"<|endoftext|>": 50256}
    def encode(self, text, **how): return [50256] if text == "<|endoftext|>" else list(text.encode())
    encode_ordinary = encode
    def decode(self, tokens): return bytes(token % 128 for token in tokens).decode()

tiktoken.get_encoding = lambda name: Bytes()
"""
VGG_WITHOUT_WEIGHTS = """
from torchvision import models

made = models.vgg16
models.vgg16 = lambda **how: made()
"""
EXTRACTED = """
import contextlib, requests, tarfile
from unittest.mock import MagicMock

requests.get = tarfile.open = lambda *of, **how: MagicMock()
"""
NO_WANDB = """
import sys
from unittest.mock import MagicMock

sys.modules["wandb"] = MagicMock()
"""
NO_FONT = """
import torch

torch.hub.download_url_to_file = lambda *of, **how: None
"""
NO_LOGGER = """
import sys
from unittest.mock import MagicMock

sys.modules["tensorboard_logger"] = MagicMock()
"""
OLD_TIMM = """
import numpy
import timm.models.vision_transformer as timm

numpy.float = float
made = timm.Block
timm.Block = lambda *of, qk_scale=None, **how: made(*of, **how)
"""
LIGHTNING_DATA = """
import torch
import lightning.pytorch.demos.mnist_datamodule as demos

class MNIST(torch.utils.data.TensorDataset):
    def __init__(self, *of, **how):
        super().__init__(torch.rand(60_000, 1, 28, 28), torch.arange(60_000) % 10)

demos.MNIST = demos._MNIST = MNIST
demos.MNISTDataModule.prepare_data = lambda self: None
"""
NANOCHAT_TOKENIZER = """
import os, sys, types
from pathlib import Path
import torch

os.environ["NANOCHAT_BASE_DIR"] = str(Path("nanochat-base").resolve())
for name in ("requests", "rustbpe", "tiktoken", "wandb"):
    sys.modules.setdefault(name, types.ModuleType(name))
import nanochat.tokenizer as tokenizer

class Words:
    get_vocab_size = lambda self: 32_768
    get_bos_token_id = lambda self: 0
    decode = lambda self, ids: ""
    def encode(self, text, prepend=None, append=None, num_threads=1):
        if isinstance(text, list):
            return [self.encode(one, prepend) for one in text]
        return ([] if prepend is None else [prepend]) + [1 + hash(word) % 32_000 for word in text.split()]
    __call__ = encode

tokenizer.get_tokenizer = Words
tokenizer.get_token_bytes = lambda device="cpu": torch.ones(32_768, dtype=torch.int32, device=device)
"""
NANOGPT_CHECKPOINT = """
import os, torch
from model import GPT, GPTConfig

os.makedirs("out", exist_ok=True)
sizes = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, bias=False, vocab_size=50304, dropout=0.0)
torch.save({"model": GPT(GPTConfig(**sizes)).state_dict(), "model_args": sizes, "config": {}}, "out/ckpt.pt")
"""
ONE_OF_HELLASWAG = """
import hellaswag

example = {"ctx": "the man", "label": 1, "endings": ["is", "was", "had", "have"]}
hellaswag.iterate_examples = lambda split: iter([example])
"""
PLANETOID = """
import torch
import torch_geometric.datasets as datasets
from torch_geometric.datasets import FakeDataset

def planetoid(root, name, transform=None, **how):
    sizes = dict(avg_num_nodes=2708, avg_degree=4, num_channels=1433, num_classes=7)
    found = FakeDataset(num_graphs=1, transform=transform, **sizes)
    data = found._data
    for split in ("train_mask", "val_mask", "test_mask"):
        data[split] = torch.arange(data.num_nodes) % 3 == 0
    return found

datasets.Planetoid = planetoid
sizes = dict(num_graphs=188, avg_num_nodes=18, num_channels=7, num_classes=2)
datasets.TUDataset = lambda root, name, **how: FakeDataset(task="graph", **sizes).shuffle()
"""
NANOCHAT_FILES = """
import os, pickle, random
import pyarrow, pyarrow.parquet, tiktoken, torch

base = os.environ["NANOCHAT_BASE_DIR"] = os.path.abspath("base")
for name in ("tokenizer", "base_data_climbmix"):
    os.makedirs(os.path.join(base, name), exist_ok=True)
special = ("bos", "user_start", "user_end", "assistant_start", "assistant_end", "python_start", "python_end",
           "output_start", "output_end")
encoding = tiktoken.Encoding(
    "bytes", pat_str=".", mergeable_ranks={bytes([byte]): byte for byte in range(256)},
    special_tokens={f"<|{name}|>": 256 + at for at, name in enumerate(special)},
)
with open(os.path.join(base, "tokenizer", "tokenizer.pkl"), "wb") as file:
    pickle.dump(encoding, file)
torch.save(torch.ones(256 + len(special), dtype=torch.int32), os.path.join(base, "tokenizer", "token_bytes.pt"))
words = random.Random(0)
texts = [" ".join(words.choices(("one", "two", "three"), k=words.randint(20, 200))) for _ in range(2000)]
for number in range(2):
    file = os.path.join(base, "base_data_climbmix", f"shard_{number:05d}.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=200)
"""
DLLOGGER = """
import sys
from unittest.mock import MagicMock

sys.modules["dllogger"] = MagicMock()
"""
# torchvision for CUDA beside torch for the CPU: its Python is there, its compiled operators are not.
TORCHVISION_OPERATORS = """
import torch

try:
    import torchvision
except RuntimeError:
    library = torch.library.Library("torchvision", "FRAGMENT")
    of_rois = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        f"roi_align({of_rois}, int sampling_ratio, bool aligned) -> Tensor",
        "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
        f"roi_pool({of_rois}) -> (Tensor, Tensor)",
        "_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, SymInt pooled_height, "
        "SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor",
        f"ps_roi_align({of_rois}, int sampling_ratio) -> (Tensor, Tensor)",
        "_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, "
        "SymInt pooled_height, SymInt pooled_width, int sampling_ratio, SymInt batch_size, SymInt channels, "
        "SymInt height, SymInt width) -> Tensor",
        f"ps_roi_pool({of_rois}) -> (Tensor, Tensor)",
        "_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, "
        "SymInt pooled_height, SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) "
        "-> Tensor",
        "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
        "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
        "SymInt offset_groups, bool use_mask) -> Tensor",
        "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
        "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
        "SymInt groups, SymInt offset_groups, bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    ):
        library.define(schema)
    import torchvision
"""
TIMM_WITHOUT_WEIGHTS = """
import timm

made = timm.create_model
timm.create_model = lambda name, pretrained=False, **how: made(name, **how)
"""
