"""The public programs: what is run of each, and what must hold."""

from __future__ import annotations

from tests.programs import data, folders
from tests.programs.libraries import LIBRARIES
from tests.programs.other_kernels import OTHER_KERNELS
from tests.programs.program import Program
from tests.programs.stand_ins import (
    ANY_CIFAR,
    EXTRACTED,
    GPT2_TOKENS,
    LIGHTNING_DATA,
    NANOGPT_CHECKPOINT,
    NO_FONT,
    NO_LOGGER,
    NO_WANDB,
    ONE_OF_HELLASWAG,
    PLANETOID,
    TIMM_WITHOUT_WEIGHTS,
    VGG_WITHOUT_WEIGHTS,
)

_EXAMPLES = {"repository": "pytorch/examples", "commit": "77f55b9"}
_BOOK = {"repository": "rasbt/LLMs-from-scratch", "commit": "28c65cd", "before": GPT2_TOKENS}
_RL = {"repository": "vwxyzjn/cleanrl", "commit": "fe8d8a03", "path": (".",)}
_TUTORIAL = {"repository": "yunjey/pytorch-tutorial", "commit": "0500d3d"}
_SERIES = {"repository": "thuml/Time-Series-Library", "commit": "4e938a1", "data": folders.series}
_FORECAST = (
    "run.py --task_name long_term_forecast --is_training 1 --model_id ETTh1_96_96 --data ETTh1 "
    "--root_path ./dataset/ --data_path ETTh1.csv --features M --num_workers 0 --model "
)
_LIGHTNING = {"repository": "Lightning-AI/pytorch-lightning", "commit": "7f0c3436cd"}
_GRAPHS = {"repository": "pyg-team/pytorch_geometric", "commit": "5c6461b23", "folder": "examples", "before": PLANETOID}

PROGRAMS = (
    Program(
        name="nanoGPT train",
        repository="karpathy/nanoGPT",
        commit="3adf61e1",
        command="train.py --compile=False --eval_iters=2 --gradient_accumulation_steps=2",
        data=folders.nanogpt,
        findings=frozenset({"logits-explosion", "fragmentation"}),
    ),
    Program(
        name="nanoGPT train compiled",
        repository="karpathy/nanoGPT",
        commit="3adf61e1",
        command="train.py --eval_iters=2 --gradient_accumulation_steps=2",
        data=folders.nanogpt,
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
        before=GPT2_TOKENS + NANOGPT_CHECKPOINT,
        at_most={"inputs": 0.05},
    ),
    Program(
        name="minGPT chargpt",
        repository="karpathy/minGPT",
        commit="37baab7",
        folder="projects/chargpt",
        command="chargpt.py",
        data=folders.char_gpt,
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
        data=folders.shards,
        before=GPT2_TOKENS + ONE_OF_HELLASWAG,
        options="--gpu a100-80gb",
        findings=frozenset({"fragmentation", "logits-explosion"}),
    ),
    Program(
        name="llm.c train_gpt2",
        repository="karpathy/llm.c",
        commit="f1e2ace",
        command="train_gpt2.py --input_bin tiny/fineweb_train_000001.bin --write_tensors 0 "
        "--dtype bfloat16 --num_iterations 3 --model d12",
        data=folders.fineweb("tiny"),
        before=GPT2_TOKENS,
        findings=frozenset({"fragmentation"}),
    ),
    Program(
        name="examples mnist", **_EXAMPLES, folder="mnist", command="main.py --epochs 1", data=folders.mnist("../data")
    ),
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
        data=folders.mnist("../data"),
        findings=frozenset({"optimizer-step-temporaries"}),
    ),
    Program(
        name="examples mnist_rnn",
        **_EXAMPLES,
        folder="mnist_rnn",
        command="main.py --accel --epochs 1",
        data=folders.mnist("../data"),
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
        data=folders.mnist("../data"),
        findings=frozenset({"optimizer-step-temporaries"}),
        not_stages=frozenset({"embedding"}),
    ),
    Program(
        name="examples mnist_forward_forward",
        **_EXAMPLES,
        folder="mnist_forward_forward",
        command="main.py --epochs 2 --train_size 256 --test_size 64",
        data=folders.mnist("data"),
    ),
    Program(
        name="examples gcn",
        **_EXAMPLES,
        folder="gcn",
        command="main.py --epochs 5",
        before=EXTRACTED,
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
        data=folders.bsds,
    ),
    Program(
        name="examples fast_neural_style",
        **_EXAMPLES,
        folder="fast_neural_style",
        command="neural_style/neural_style.py train --accel --dataset pictures --save-model-dir saved --epochs 1",
        before=VGG_WITHOUT_WEIGHTS,
        data=lambda home: data.images(home / "pictures"),
        findings=frozenset({"fragmentation"}),
    ),
    Program(
        name="pytorch-cifar",
        repository="kuangliu/pytorch-cifar",
        commit="49b7aa9",
        command="main.py",
        before=ANY_CIFAR,
        data=lambda home: data.cifar(home / "data"),
    ),
    Program(
        name="examples word_language_model",
        **_EXAMPLES,
        folder="word_language_model",
        command="main.py --accel --epochs 1",
        data=folders.languages,
    ),
    Program(
        name="examples word_language_model transformer",
        **_EXAMPLES,
        folder="word_language_model",
        command="main.py --accel --epochs 1 --model Transformer",
        data=folders.languages,
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
        data=folders.mnist("../../data"),
        findings=frozenset({"optimizer-step-temporaries"}),
    ),
    Program(
        name="tutorial resnet",
        **_TUTORIAL,
        folder="tutorials/02-intermediate/deep_residual_network",
        command="main.py",
        before=ANY_CIFAR,
        data=lambda home: data.cifar(home / "../../data"),
        not_stages=frozenset({"embedding"}),
    ),
    Program(
        name="tutorial birnn",
        **_TUTORIAL,
        folder="tutorials/02-intermediate/bidirectional_recurrent_neural_network",
        command="main.py",
        data=folders.mnist("../../data"),
    ),
    Program(
        name="tutorial cnn",
        **_TUTORIAL,
        folder="tutorials/02-intermediate/convolutional_neural_network",
        command="main.py",
        data=folders.mnist("../../data"),
    ),
    Program(name="pyg gcn", **_GRAPHS, command="gcn.py --epochs 3"),
    Program(name="pyg gat", **_GRAPHS, command="gat.py --epochs 3"),
    Program(name="pyg gcn2", **_GRAPHS, command="gcn2_cora.py"),
    Program(name="pyg gin", **_GRAPHS, command="mutag_gin.py --epochs 2"),
    Program(
        name="unet",
        repository="milesial/Pytorch-UNet",
        commit="21d7850",
        command="train.py --epochs 1 --batch-size 2 --amp",
        data=folders.carvana,
        before=NO_WANDB,
        findings=frozenset({"optimizer-step-temporaries"}),
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
        before=TIMM_WITHOUT_WEIGHTS,
        data=folders.pets,
    ),
    *(
        Program(
            name=f"gan {name}",
            repository="eriklindernoren/PyTorch-GAN",
            commit="36d3c77",
            folder=f"implementations/{name}",
            command=f"{name}.py --n_epochs 1",
            data=folders.mnist("../../data/mnist"),
        )
        for name in ("wgan_gp", "cgan")
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
    *(
        Program(
            name=f"pygat{kind}",
            repository="Diego999/pyGAT",
            commit="3664f2d",
            command=f"train.py --epochs 3{option}",
            data=lambda home: data.cora(home / "data" / "cora"),
            findings=frozenset({"evaluation-with-gradients"}),
        )
        for kind, option in (("", ""), (" sparse", " --sparse"))
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
        data=folders.blender,
        findings=frozenset({"fragmentation"}),
    ),
    Program(
        name="yolov5",
        repository="ultralytics/yolov5",
        commit="5081342f0",
        command="train.py --data boxes.yaml --weights= --cfg yolov5n.yaml --img 320 --batch-size 8 --epochs 1 "
        "--workers 0 --noplots --project runs",
        before=NO_FONT,
        data=folders.boxes,
    ),
    Program(
        name="airbench",
        repository="KellerJordan/cifar10-airbench",
        commit="f1c599c",
        command="airbench94_muon.py",
        before=ANY_CIFAR,
        data=lambda home: data.cifar(home / "cifar10", rows=2000),
        findings=frozenset({"fragmentation"}),
    ),
    Program(
        name="lightning gan",
        **_LIGHTNING,
        folder="examples/pytorch/domain_templates",
        command="generative_adversarial_net.py",
        before=LIGHTNING_DATA,
    ),
    Program(
        name="lightning autoencoder",
        **_LIGHTNING,
        folder="examples/pytorch/basics",
        command="autoencoder.py --trainer.max_epochs 1",
        before=LIGHTNING_DATA,
    ),
    Program(
        name="supcon",
        repository="HobbitLong/SupContrast",
        commit="66a8fe5",
        command="main_supcon.py --batch_size 128 --model resnet18 --epochs 1 --num_workers 0 --cosine",
        before=ANY_CIFAR + NO_LOGGER,
        data=lambda home: data.cifar(home / "datasets"),
    ),
    *LIBRARIES,
    *OTHER_KERNELS,
)
