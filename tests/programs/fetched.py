"""The public programs: what is run of each, and what must hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy

from tests.programs import data
from tests.programs.program import Program


def _mnist(folder: str = "data") -> Callable[[Path], None]:
    return lambda home: data.idx(home / folder, "MNIST")


# torchvision knows the checksums of CIFAR-10's files; the program's progress bar asks for a terminal.
_ANY_CIFAR = """
import io, os
import torchvision.datasets.cifar as cifar

cifar.check_integrity = lambda *of, **how: True
os.popen = lambda *command: io.StringIO("24 80")
"""
_GPT2_TOKENS = """
import tiktoken

class Bytes:
    n_vocab, max_token_value, eot_token = 50257, 50256, 50256
    _special_tokens = {"<|endoftext|>": 50256}
    def encode(self, text, **how): return [50256] if text == "<|endoftext|>" else list(text.encode())
    encode_ordinary = encode
    def decode(self, tokens): return bytes(token % 128 for token in tokens).decode()

tiktoken.get_encoding = lambda name: Bytes()
"""
_VGG_WITHOUT_WEIGHTS = """
from torchvision import models

made = models.vgg16
models.vgg16 = lambda **how: made()
"""
_EXTRACTED = """
import contextlib, requests, tarfile
from unittest.mock import MagicMock

requests.get = tarfile.open = lambda *of, **how: MagicMock()
"""
_NO_WANDB = """
import sys
from unittest.mock import MagicMock

sys.modules["wandb"] = MagicMock()
"""
_NO_FONT = """
import torch

torch.hub.download_url_to_file = lambda *of, **how: None
"""
_NO_LOGGER = """
import sys
from unittest.mock import MagicMock

sys.modules["tensorboard_logger"] = MagicMock()
"""
_OLD_TIMM = """
import numpy
import timm.models.vision_transformer as timm

numpy.float = float
made = timm.Block
timm.Block = lambda *of, qk_scale=None, **how: made(*of, **how)
"""
_LIGHTNING_DATA = """
import torch
import lightning.pytorch.demos.mnist_datamodule as demos

class MNIST(torch.utils.data.TensorDataset):
    def __init__(self, *of, **how):
        super().__init__(torch.rand(60_000, 1, 28, 28), torch.arange(60_000) % 10)

demos.MNIST = demos._MNIST = MNIST
demos.MNISTDataModule.prepare_data = lambda self: None
"""
_NANOGPT_CHECKPOINT = """
import os, torch
from model import GPT, GPTConfig

os.makedirs("out", exist_ok=True)
sizes = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, bias=False, vocab_size=50304, dropout=0.0)
torch.save({"model": GPT(GPTConfig(**sizes)).state_dict(), "model_args": sizes, "config": {}}, "out/ckpt.pt")
"""
_ONE_OF_HELLASWAG = """
import hellaswag

example = {"ctx": "the man", "label": 1, "endings": ["is", "was", "had", "have"]}
hellaswag.iterate_examples = lambda split: iter([example])
"""
_PLANETOID = """
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
_EXAMPLES = {"repository": "pytorch/examples", "commit": "77f55b9"}


def _nanogpt(home: Path) -> None:
    for split in ("train", "val"):
        data.tokens(home / "data" / "openwebtext" / f"{split}.bin", 200_000, 50_257)


def _char_gpt(home: Path) -> None:
    data.write(home / "input.txt", data.words(20_000))


def _fineweb(folder: str, magic: int = 20240520, version: int = 1, count: int = 1_000_000) -> Callable[[Path], None]:
    def make(home: Path) -> None:
        head = numpy.zeros(256, dtype=numpy.int32)
        head[:3] = magic, version, count
        body = numpy.random.default_rng(0).integers(0, 50_257, count).astype(numpy.uint16)
        for split in ("train_000001", "val_000000"):
            file = home / folder / f"fineweb_{split}.bin"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(head.tobytes() + body.tobytes())

    return make


_TIMM_WITHOUT_WEIGHTS = """
import timm

made = timm.create_model
timm.create_model = lambda name, pretrained=False, **how: made(name, **how)
"""


def _pets(home: Path) -> None:
    data.images(home / "pictures")
    for label in (0, 1):
        for number in range(16):
            (home / "pictures" / f"class{label}" / f"{number}.png").rename(
                home / "pictures" / f"class{label}_{number}.jpg"
            )
        (home / "pictures" / f"class{label}").rmdir()


def _shards(home: Path) -> None:
    folder = home / "edu_fineweb10B"
    folder.mkdir()
    for split in ("train", "val"):
        numpy.save(
            folder / f"{split}_000000.npy",
            numpy.random.default_rng(0).integers(0, 50_257, 1_500_000).astype(numpy.uint16),
        )


def _bsds(home: Path) -> None:
    for split in ("train", "test"):
        folder = home / "dataset" / "BSDS300" / "images" / split
        data.images(folder, classes=1, each=16, size=300)
        for file in (folder / "class0").iterdir():
            file.rename(folder / file.name)


def _carvana(home: Path) -> None:
    from PIL import Image

    data.images(home / "made", classes=1, each=20, size=256)
    for number in range(20):
        (home / "made" / "class0" / f"{number}.png").rename(home / "data" / "imgs" / f"{number}.png")
        Image.new("L", (256, 256), 0 if number % 2 else 1).save(home / "data" / "masks" / f"{number}_mask.png")


def _languages(home: Path) -> None:
    for split in ("train", "valid", "test"):
        data.write(home / "data" / "wikitext-2" / f"{split}.txt", data.words(20_000))


def _series(home: Path) -> None:
    numbers = numpy.random.default_rng(0).standard_normal((20_000, 7)).round(3)
    hours = numpy.datetime_as_string(
        numpy.datetime64("2016-07-01T00:00:00") + numpy.arange(20_000).astype("timedelta64[h]")
    )
    rows = (
        f"{str(hour).replace('T', ' ')},{','.join(map(str, row))}" for hour, row in zip(hours, numbers, strict=True)
    )
    data.write(home / "dataset" / "ETTh1.csv", "date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n" + "\n".join(rows) + "\n")


def _blender(home: Path) -> None:
    from PIL import Image

    scene = home / "data" / "nerf_synthetic" / "lego"
    for split in ("train", "val", "test"):
        (scene / split).mkdir(parents=True)
        frames = []
        for number in range(3):
            pixels = numpy.random.default_rng(number).integers(0, 256, (200, 200, 4), dtype=numpy.uint8)
            Image.fromarray(pixels).save(scene / split / f"r_{number}.png")
            frames.append({"file_path": f"./{split}/r_{number}", "transform_matrix": numpy.eye(4).tolist()})
        data.write_json(scene / f"transforms_{split}.json", {"camera_angle_x": 0.69, "frames": frames})


def _boxes(home: Path) -> None:
    data.images(home / "images", classes=1, each=16, size=320)
    for number in range(16):
        boxes = "".join(f"{label} 0.5 0.5 0.{2 + label} 0.{3 + label}\n" for label in range(3))
        data.write(home / "labels" / "class0" / f"{number}.txt", boxes)
    data.write(home / "boxes.yaml", "path: .\ntrain: images\nval: images\nnames:\n  0: a\n  1: b\n  2: c\n")


_BOOK = {"repository": "rasbt/LLMs-from-scratch", "commit": "28c65cd", "before": _GPT2_TOKENS}
_RL = {"repository": "vwxyzjn/cleanrl", "commit": "fe8d8a03", "path": (".",)}
_GAN = {"repository": "eriklindernoren/PyTorch-GAN", "commit": "36d3c77"}
_TUTORIAL = {"repository": "yunjey/pytorch-tutorial", "commit": "0500d3d"}
_SERIES = {"repository": "thuml/Time-Series-Library", "commit": "4e938a1", "data": _series}
_FORECAST = (
    "run.py --task_name long_term_forecast --is_training 1 --model_id ETTh1_96_96 --data ETTh1 "
    "--root_path ./dataset/ --data_path ETTh1.csv --features M --num_workers 0 --model "
)
_LIGHTNING = {"repository": "Lightning-AI/pytorch-lightning", "commit": "7f0c3436cd"}
_GRAPHS = {
    "repository": "pyg-team/pytorch_geometric",
    "commit": "5c6461b23",
    "folder": "examples",
    "before": _PLANETOID,
}

PROGRAMS = (
    Program(
        name="nanoGPT train",
        repository="karpathy/nanoGPT",
        commit="3adf61e1",
        command="train.py --compile=False --eval_iters=2 --gradient_accumulation_steps=2",
        data=_nanogpt,
        findings=frozenset({"logits-explosion", "fragmentation"}),
    ),
    Program(
        name="nanoGPT bench",
        repository="karpathy/nanoGPT",
        commit="3adf61e1",
        command="bench.py --real_data=False --compile=False",
        options="--gpu a100-80gb",
        findings=frozenset({"logits-explosion", "fragmentation"}),
    ),
    Program(
        name="nanoGPT sample",
        repository="karpathy/nanoGPT",
        commit="3adf61e1",
        command="sample.py --num_samples=2 --max_new_tokens=20",
        before=_GPT2_TOKENS + _NANOGPT_CHECKPOINT,
        at_most={"inputs": 0.05},
    ),
    Program(
        name="minGPT chargpt",
        repository="karpathy/minGPT",
        commit="37baab7",
        folder="projects/chargpt",
        command="chargpt.py",
        data=_char_gpt,
        path=("../..",),
    ),
    Program(
        name="minGPT adder",
        repository="karpathy/minGPT",
        commit="37baab7",
        folder="projects/adder",
        command="adder.py",
        path=("../..",),
    ),
    Program(
        name="build-nanogpt",
        repository="karpathy/build-nanogpt",
        commit="6104ab1",
        command="train_gpt2.py",
        data=_shards,
        before=_GPT2_TOKENS + _ONE_OF_HELLASWAG,
        options="--gpu a100-80gb",
        findings=frozenset({"fragmentation", "logits-explosion"}),
    ),
    Program(
        name="llm.c train_gpt2",
        repository="karpathy/llm.c",
        commit="f1e2ace",
        command="train_gpt2.py --input_bin tiny/fineweb_train_000001.bin --write_tensors 0 "
        "--dtype bfloat16 --num_iterations 3 --model d12",
        data=_fineweb("tiny"),
        before=_GPT2_TOKENS,
        findings=frozenset({"fragmentation"}),
    ),
    Program(name="examples mnist", **_EXAMPLES, folder="mnist", command="main.py --epochs 1", data=_mnist("../data")),
    Program(
        name="examples dcgan",
        **_EXAMPLES,
        folder="dcgan",
        command="main.py --dataset fake --accel --niter 1 --workers 0",
    ),
    Program(
        name="examples vae",
        **_EXAMPLES,
        folder="vae",
        command="main.py --epochs 1",
        data=_mnist("../data"),
        findings=frozenset({"optimizer-step-temporaries"}),
    ),
    Program(
        name="examples mnist_rnn",
        **_EXAMPLES,
        folder="mnist_rnn",
        command="main.py --accel --epochs 1",
        data=_mnist("../data"),
    ),
    Program(
        name="examples imagenet",
        **_EXAMPLES,
        folder="imagenet",
        command="main.py --dummy -a resnet50 -b 64 --workers 0",
        findings=frozenset({"fragmentation"}),
    ),
    Program(
        name="examples siamese",
        **_EXAMPLES,
        folder="siamese_network",
        command="main.py --epochs 1",
        data=_mnist("../data"),
        findings=frozenset({"optimizer-step-temporaries"}),
        not_stages=frozenset({"embedding"}),
    ),
    Program(
        name="examples mnist_forward_forward",
        **_EXAMPLES,
        folder="mnist_forward_forward",
        command="main.py --epochs 2 --train_size 256 --test_size 64",
        data=_mnist("data"),
    ),
    Program(
        name="examples gcn",
        **_EXAMPLES,
        folder="gcn",
        command="main.py --epochs 5",
        before=_EXTRACTED,
        data=lambda home: data.cora(home / "cora"),
    ),
    Program(
        name="examples gat",
        **_EXAMPLES,
        folder="gat",
        command="main.py --epochs 5",
        data=lambda home: data.cora(home / "cora"),
        findings=frozenset({"attention-scores"}),
    ),
    Program(
        name="examples super_resolution",
        **_EXAMPLES,
        folder="super_resolution",
        command="main.py --accel --upscale_factor 3 --batchSize 4 --nEpochs 1 --threads 0",
        data=_bsds,
    ),
    Program(
        name="examples fast_neural_style",
        **_EXAMPLES,
        folder="fast_neural_style",
        command="neural_style/neural_style.py train --accel --dataset pictures --save-model-dir saved --epochs 1",
        before=_VGG_WITHOUT_WEIGHTS,
        data=lambda home: data.images(home / "pictures"),
        findings=frozenset({"fragmentation"}),
    ),
    Program(
        name="pytorch-cifar",
        repository="kuangliu/pytorch-cifar",
        commit="49b7aa9",
        command="main.py",
        before=_ANY_CIFAR,
        data=lambda home: data.cifar(home / "data"),
    ),
    Program(
        name="examples word_language_model",
        **_EXAMPLES,
        folder="word_language_model",
        command="main.py --accel --epochs 1",
        data=_languages,
    ),
    Program(
        name="examples word_language_model transformer",
        **_EXAMPLES,
        folder="word_language_model",
        command="main.py --accel --epochs 1 --model Transformer",
        data=_languages,
    ),
    Program(
        name="examples ddp single_gpu",
        **_EXAMPLES,
        folder="distributed/ddp-tutorial-series",
        command="single_gpu.py 2 1",
    ),
    Program(
        name="book gpt_train",
        **_BOOK,
        folder="ch05/01_main-chapter-code",
        command="gpt_train.py",
        data=lambda home: data.write(home / "the-verdict.txt", data.words(4000)),
        findings=frozenset({"attention-scores", "optimizer-step-temporaries"}),
    ),
    Program(
        name="book training speed",
        **_BOOK,
        folder="ch05/10_llm-training-speed",
        command="01_opt_single_gpu.py",
        data=lambda home: data.write(home / "middlemarch.txt", data.words(30_000)),
        findings=frozenset({"logits-explosion", "fragmentation"}),
    ),
    Program(name="book kv cache", **_BOOK, folder="ch04/03_kv-cache", command="gpt_with_kv_cache.py"),
    Program(name="book gqa", **_BOOK, folder="ch04/04_gqa", command="gpt_with_kv_gqa.py --max_new_tokens 20"),
    Program(name="book mla", **_BOOK, folder="ch04/05_mla", command="gpt_with_kv_mla.py --max_new_tokens 20"),
    Program(name="book swa", **_BOOK, folder="ch04/06_swa", command="gpt_with_kv_swa.py --max_new_tokens 20"),
    Program(
        name="book moe",
        **_BOOK,
        folder="ch04/07_moe",
        command="gpt_with_kv_moe.py --max_new_tokens 20 --num_experts 8 --num_experts_per_tok 2",
    ),
    Program(
        name="book hparam search",
        **_BOOK,
        folder="ch05/05_bonus_hparam_tuning",
        command="hparam_search.py",
        path=("../../pkg",),
        findings=frozenset({"fragmentation", "optimizer-step-temporaries"}),
    ),
    Program(
        name="cleanrl dqn",
        **_RL,
        command="cleanrl/dqn.py --total-timesteps 400 --learning-starts 200 --buffer-size 1000",
    ),
    Program(
        name="cleanrl c51",
        **_RL,
        command="cleanrl/c51.py --total-timesteps 400 --learning-starts 200 --buffer-size 1000",
    ),
    Program(name="cleanrl ppo", **_RL, command="cleanrl/ppo.py --total-timesteps 2000"),
    Program(
        name="cleanrl ppo continuous",
        **_RL,
        command="cleanrl/ppo_continuous_action.py --env-id Pendulum-v1 --num-steps 128 --total-timesteps 400",
    ),
    Program(
        name="cleanrl sac",
        **_RL,
        command="cleanrl/sac_continuous_action.py --env-id Pendulum-v1 --learning-starts "
        "300 --buffer-size 1000 --total-timesteps 400",
    ),
    Program(
        name="cleanrl td3",
        **_RL,
        command="cleanrl/td3_continuous_action.py --env-id Pendulum-v1 --learning-starts "
        "300 --buffer-size 1000 --total-timesteps 400",
    ),
    Program(name="cleanrl pqn", **_RL, command="cleanrl/pqn.py --total-timesteps 2000"),
    Program(
        name="tutorial feedforward",
        **_TUTORIAL,
        folder="tutorials/01-basics/feedforward_neural_network",
        command="main.py",
        data=_mnist("../../data"),
        findings=frozenset({"optimizer-step-temporaries"}),
    ),
    Program(
        name="tutorial resnet",
        **_TUTORIAL,
        folder="tutorials/02-intermediate/deep_residual_network",
        command="main.py",
        before=_ANY_CIFAR,
        data=lambda home: data.cifar(home / "../../data"),
        not_stages=frozenset({"embedding"}),
    ),
    Program(
        name="tutorial birnn",
        **_TUTORIAL,
        folder="tutorials/02-intermediate/bidirectional_recurrent_neural_network",
        command="main.py",
        data=_mnist("../../data"),
    ),
    Program(
        name="tutorial cnn",
        **_TUTORIAL,
        folder="tutorials/02-intermediate/convolutional_neural_network",
        command="main.py",
        data=_mnist("../../data"),
    ),
    Program(name="pyg gcn", **_GRAPHS, command="gcn.py --epochs 3"),
    Program(name="pyg gat", **_GRAPHS, command="gat.py --epochs 3"),
    Program(
        name="pyg gcn2",
        **_GRAPHS,
        command="gcn2_cora.py",
    ),
    Program(name="pyg gin", **_GRAPHS, command="mutag_gin.py --epochs 2"),
    Program(
        name="unet",
        repository="milesial/Pytorch-UNet",
        commit="21d7850",
        command="train.py --epochs 1 --batch-size 2 --amp",
        data=_carvana,
        before=_NO_WANDB,
        findings=frozenset({"optimizer-step-temporaries"}),
    ),
    Program(
        name="pytorch-vae vanilla",
        repository="AntixK/PyTorch-VAE",
        commit="a6896b9",
        driver=True,
        command="vae.py VanillaVAE",
        at_most={"logits and loss": 0.05},
    ),
    Program(
        name="pytorch-vae vq", repository="AntixK/PyTorch-VAE", commit="a6896b9", driver=True, command="vae.py VQVAE"
    ),
    Program(
        name="maml",
        repository="dragen1860/MAML-Pytorch",
        commit="98a00d4",
        driver=True,
        command="maml.py",
    ),
    Program(
        name="guided-diffusion",
        repository="openai/guided-diffusion",
        commit="22e0df8",
        driver=True,
        command="guided.py",
        findings=frozenset({"attention-scores"}),
        at_most={"logits and loss": 0.05},
    ),
    Program(
        name="nanochat",
        repository="karpathy/nanochat",
        commit="92d63d4",
        driver=True,
        command="nanochat_train.py",
        findings=frozenset({"logits-explosion", "fragmentation"}),
    ),
    Program(
        name="vit-pytorch vit",
        repository="lucidrains/vit-pytorch",
        commit="69d24fe",
        driver=True,
        command="vit.py vit",
        layers=True,
    ),
    Program(
        name="vit-pytorch simple",
        repository="lucidrains/vit-pytorch",
        commit="69d24fe",
        driver=True,
        command="vit.py simple",
        layers=True,
    ),
    Program(
        name="vit-pytorch distill",
        repository="lucidrains/vit-pytorch",
        commit="69d24fe",
        driver=True,
        command="vit.py distill",
    ),
    Program(
        name="x-transformers",
        repository="lucidrains/x-transformers",
        commit="9252ed7",
        driver=True,
        command="x_transformer.py",
        findings=frozenset({"fragmentation"}),
        layers=True,
    ),
    Program(
        name="denoising-diffusion",
        repository="lucidrains/denoising-diffusion-pytorch",
        commit="faed4db",
        driver=True,
        command="diffusion.py",
        not_stages=frozenset({"embedding", "logits"}),
    ),
    Program(
        name="denoising-diffusion trainer",
        repository="lucidrains/denoising-diffusion-pytorch",
        commit="faed4db",
        driver=True,
        command="diffusion_trainer.py",
        data=lambda home: data.images(home / "pictures", classes=1, each=120),
        not_stages=frozenset({"embedding", "logits"}),
    ),
    Program(
        name="mamba-minimal", repository="johnma2006/mamba-minimal", commit="03de542", driver=True, command="mamba.py"
    ),
    Program(
        name="whisper",
        repository="openai/whisper",
        commit="c0d2f62",
        driver=True,
        command="whisper_train.py",
    ),
    Program(
        name="segment-anything",
        repository="facebookresearch/segment-anything",
        commit="dca509f",
        driver=True,
        command="sam.py",
        findings=frozenset({"attention-scores", "fragmentation"}),
    ),
    Program(
        name="diffusers unconditional",
        repository="huggingface/diffusers",
        commit="58eb52c080",
        folder="examples/unconditional_image_generation",
        path=("../../src",),
        command="train_unconditional.py --train_data_dir pictures --resolution 64 "
        "--train_batch_size 4 --num_epochs 1 --use_ema",
        data=lambda home: data.images(home / "pictures"),
        findings=frozenset({"optimizer-step-temporaries"}),
        at_most={"inputs": 0.05},
    ),
    Program(
        name="accelerate cv",
        repository="huggingface/accelerate",
        commit="16cb6eb8",
        folder="examples",
        command="cv_example.py --data_dir pictures",
        before=_TIMM_WITHOUT_WEIGHTS,
        data=_pets,
    ),
    Program(
        name="gan wgan_gp",
        **_GAN,
        folder="implementations/wgan_gp",
        command="wgan_gp.py --n_epochs 1",
        data=_mnist("../../data/mnist"),
    ),
    Program(
        name="gan cgan",
        **_GAN,
        folder="implementations/cgan",
        command="cgan.py --n_epochs 1",
        data=_mnist("../../data/mnist"),
    ),
    Program(
        name="pygcn",
        repository="tkipf/pygcn",
        commit="1600b5b",
        folder="pygcn",
        path=("..",),
        data=lambda home: data.cora(home / "../data/cora"),
        command="train.py --epochs 3",
        findings=frozenset({"evaluation-with-gradients"}),
    ),
    Program(
        name="moe",
        repository="davidmrau/mixture-of-experts",
        commit="f662999",
        command="example.py",
        findings=frozenset({"evaluation-with-gradients"}),
    ),
    Program(
        name="pygat",
        repository="Diego999/pyGAT",
        commit="3664f2d",
        command="train.py --epochs 3",
        data=lambda home: data.cora(home / "data" / "cora"),
        findings=frozenset({"evaluation-with-gradients"}),
    ),
    Program(
        name="pygat sparse",
        repository="Diego999/pyGAT",
        commit="3664f2d",
        command="train.py --epochs 3 --sparse",
        data=lambda home: data.cora(home / "data" / "cora"),
        findings=frozenset({"evaluation-with-gradients"}),
    ),
    Program(
        name="dlrm",
        repository="facebookresearch/dlrm",
        commit="090956e",
        command="dlrm_s_pytorch.py --use-gpu --data-size=1024 --mini-batch-size=128 --arch-sparse-feature-size=64 "
        "--arch-embedding-size=100000-50000-10000 --arch-mlp-bot=13-512-64 --arch-mlp-top=256-1",
    ),
    Program(name="series autoformer", **_SERIES, command=_FORECAST + "Autoformer"),
    Program(name="series patchtst", **_SERIES, command=_FORECAST + "PatchTST"),
    Program(name="series timesnet", **_SERIES, command=_FORECAST + "TimesNet --d_model 32 --d_ff 32"),
    Program(
        name="nerf",
        repository="yenchenlin/nerf-pytorch",
        commit="63a5a63",
        command="run_nerf.py --config configs/lego.txt --no_reload --testskip 1",
        data=_blender,
        findings=frozenset({"fragmentation"}),
    ),
    Program(
        name="yolov5",
        repository="ultralytics/yolov5",
        commit="5081342f0",
        command="train.py --data boxes.yaml --weights= --cfg yolov5n.yaml --img 320 --batch-size 8 --epochs 1 "
        "--workers 0 --noplots --project runs",
        before=_NO_FONT,
        data=_boxes,
    ),
    Program(
        name="airbench",
        repository="KellerJordan/cifar10-airbench",
        commit="f1c599c",
        command="airbench94_muon.py",
        before=_ANY_CIFAR,
        data=lambda home: data.cifar(home / "cifar10", rows=2000),
        findings=frozenset({"fragmentation"}),
    ),
    Program(name="dit", repository="facebookresearch/DiT", commit="ed81ce2", driver=True, command="dit.py"),
    Program(
        name="mae", repository="facebookresearch/mae", commit="efb2a80", driver=True, command="mae.py", before=_OLD_TIMM
    ),
    Program(name="mamba.py", repository="alxndrTL/mamba.py", commit="2cc168c", driver=True, command="mamba_lm.py"),
    Program(name="vits", repository="jaywalnut310/vits", commit="2e561ba", driver=True, command="vits.py"),
    Program(
        name="litgpt",
        repository="Lightning-AI/litgpt",
        commit="26857050",
        driver=True,
        command="fabric_gpt.py",
        findings=frozenset({"logits-explosion"}),
    ),
    Program(
        name="torchtune lora", repository="pytorch/torchtune", commit="bd2a0fc7c", driver=True, command="tune_lora.py"
    ),
    Program(
        name="lightning gan",
        **_LIGHTNING,
        folder="examples/pytorch/domain_templates",
        command="generative_adversarial_net.py",
        before=_LIGHTNING_DATA,
    ),
    Program(
        name="lightning autoencoder",
        **_LIGHTNING,
        folder="examples/pytorch/basics",
        command="autoencoder.py --trainer.max_epochs 1",
        before=_LIGHTNING_DATA,
    ),
    Program(
        name="supcon",
        repository="HobbitLong/SupContrast",
        commit="66a8fe5",
        command="main_supcon.py --batch_size 128 --model resnet18 --epochs 1 --num_workers 0 --cosine",
        before=_ANY_CIFAR + _NO_LOGGER,
        data=lambda home: data.cifar(home / "datasets"),
    ),
)
