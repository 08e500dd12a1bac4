"""What is right of the programs in own/: the idioms that public programs are made of."""

from __future__ import annotations

from dataclasses import dataclass

from tests.programs.program import Right

_ADAM = frozenset({"optimizer-step-temporaries"})
_MOVED = "what is moved to the card, or made there, beside the model belongs to no category"


@dataclass(frozen=True, kw_only=True)
class Own(Right):
    """How one of them is run, and what must hold."""

    options: tuple[str, ...] = ("--gpu", "rtx-4090", "--until-exit")


OWN = {
    "curriculum": Own(),
    "ddpm": Own(),
    "detection": Own(),
    "direct_forward": Own(known="a module's parameters are inputs where its forward is called directly"),
    "distillation": Own(),
    "dqn": Own(),
    "evaluation": Own(),
    "gan": Own(known="the last step's graph is taken for every step's"),
    "gnn": Own(),
    "lbfgs": Own(),
    "maml": Own(known=_MOVED),
    "moco": Own(known=_MOVED),
    "multi_task": Own(),
    "ppo": Own(),
    "resume": Own(findings=_ADAM),
    "rnn_lm": Own(),
    "seq2seq": Own(findings=_ADAM),
    "sparse": Own(known="a sparse gradient ends the run"),
    "speech_ctc": Own(),
    "super_resolution": Own(known=_MOVED),
    "unet": Own(),
    "wgan_gp": Own(),
}
