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
DLLOGGER = """
import sys
from unittest.mock import MagicMock

sys.modules["dllogger"] = MagicMock()
"""
TIMM_WITHOUT_WEIGHTS = """
import timm

made = timm.create_model
timm.create_model = lambda name, pretrained=False, **how: made(name, **how)
"""
