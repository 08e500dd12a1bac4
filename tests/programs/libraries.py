"""Public libraries without a program of their own: a loop of ours in drivers/ is run with each."""

from __future__ import annotations

from tests.programs import data
from tests.programs.program import Program
from tests.programs.stubs import OLD_TIMM

LIBRARIES = (
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
    Program(name="maml", repository="dragen1860/MAML-Pytorch", commit="98a00d4", driver=True, command="maml.py"),
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
    *(
        Program(
            name=f"vit-pytorch {kind}",
            repository="lucidrains/vit-pytorch",
            commit="69d24fe",
            driver=True,
            command=f"vit.py {kind}",
            layers=kind != "distill",
        )
        for kind in ("vit", "simple", "distill")
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
    Program(name="whisper", repository="openai/whisper", commit="c0d2f62", driver=True, command="whisper_train.py"),
    Program(
        name="segment-anything",
        repository="facebookresearch/segment-anything",
        commit="dca509f",
        driver=True,
        command="sam.py",
        findings=frozenset({"attention-scores", "fragmentation"}),
    ),
    Program(name="dit", repository="facebookresearch/DiT", commit="ed81ce2", driver=True, command="dit.py"),
    Program(
        name="mae", repository="facebookresearch/mae", commit="efb2a80", driver=True, command="mae.py", before=OLD_TIMM
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
)
