"""What is right of the programs in own/: the idioms that public programs are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Own:
    """How one of them is run, and what must hold."""

    options: tuple[str, ...] = ("--gpu", "rtx-4090", "--until-exit")
    findings: frozenset[str] = frozenset()
    """Those that are right, by id; no other may be there."""
    known: str = ""
    """What is known to be wrong; see `Program.known`."""


OWN = {
    name: Own()
    for name in """gan wgan_gp dqn seq2seq unet ddpm moco distillation speech_ctc detection rnn_lm gnn lbfgs curriculum evaluation
    maml resume sparse multi_task ppo direct_forward super_resolution""".split()
}
