"""What is right of the programs in own/: the idioms that public programs are made of."""

from __future__ import annotations

from dataclasses import dataclass

from tests.programs.program import Right

_ADAM = frozenset({"optimizer-step-temporaries"})


@dataclass(frozen=True, kw_only=True)
class Own(Right):
    """How one of them is run, and what must hold."""

    options: tuple[str, ...] = ("--gpu", "rtx-4090", "--until-exit")


OWN = {
    "curriculum": Own(),
    "ddpm": Own(),
    "detection": Own(),
    "direct_forward": Own(),
    "distillation": Own(),
    "dqn": Own(),
    "evaluation": Own(),
    "gan": Own(),
    "gnn": Own(),
    "lbfgs": Own(),
    "maml": Own(),
    "moco": Own(),
    "multi_task": Own(),
    "ppo": Own(),
    "resume": Own(findings=_ADAM),
    "rnn_lm": Own(),
    "seq2seq": Own(findings=_ADAM),
    "sparse": Own(),
    "speech_ctc": Own(),
    "super_resolution": Own(),
    "unet": Own(),
    "wgan_gp": Own(),
}
