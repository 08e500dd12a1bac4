"""Every command that a report prints is run on that report's own case: its verdict, exit code and bytes are those that
the report says of it, and what is printed next leads on from there.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.claims import CHECKS, Claim, Run, claims_of, follow, hold
from tests.golden.test_totals import COMMANDS, PROGRAM
from tests.lanes import at_night, by_day
from tests.processes import python

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch

kept, count, rows = [], int(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(count):
    out = model(torch.randn(rows, 1024, device="cuda"))
    out.pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if "leak" in sys.argv:
        kept.append(out)
"""
PROFILES = {
    "fits": "--model-size 1M --context-length 64 --gpu-vram 0.5",
    "does not fit": "--model-size 1M --context-length 512 --batch-size 8 --gpu-vram 0.6",
    "without room": "--model pythia-70m --context-length 64 --gpu-vram 0.5",
    "ladder": "--model-size 1M --context-length 512 --batch-size 8 --gpu-vram 0.6 --ladder",
    "adapter": "--model-size 1M --context-length 512 --batch-size 8 --gpu-vram 0.55 --adapter lora --lora-rank 4",
    "inference": "--model-size 1M --context-length 2048 --batch-size 16 --gpu-vram 0.6 --mode inference",
    "limit of the context": "--model-size 1M --gpu-vram 0.7 --largest context-length",
    "fragments": "--model gpt2 --context-length 512 --gpu-vram 4 --fix chunked-loss,expandable-segments",
}
SCRIPTS = {
    "fits": ("--gpu-vram 1", "9 8"),
    "later steps": ("--gpu-vram 1 --steps 3 --worst-batch", "9 8"),
    "does not fit": ("--gpu-vram 0.6", "9 20000"),
    "leaks": ("--gpu-vram 1", "30 8192 leak"),
    "a limit": ("--gpu-vram 0.61 --worst-batch --largest batch-size", "3 {}"),
    "a ladder": ("--gpu-vram 0.6 --steps 3 --ladder", "9 20000"),
}


# Of this module's commands, but for scripts: one answer leads to what another has led to.
_answered: dict[tuple[str, ...], tuple[int, dict[str, Any]]] = {}


@pytest.fixture
def run(memprof, tmp_path, monkeypatch) -> Run:
    """A profile here, a script in a process of its own; in one folder. What was answered before is not asked again."""
    monkeypatch.chdir(tmp_path)
    answered = dict(_answered)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "program.py").write_bytes(PROGRAM.read_bytes())

    def ask(words: list[str]) -> tuple[int, dict[str, Any]]:
        if words[0] != "run":
            done = memprof(*words, *([] if words[0] == "help" else ["--json"]))
            return done.exit_code, {} if words[0] == "help" else done.json
        found = python("-m", "memprof", "run", "--json", *words[1:], folder=tmp_path)
        assert found.exit_code in (0, 3), found.stderr
        return found.exit_code, json.loads(found.stdout)

    def call(words: list[str]) -> tuple[int, dict[str, Any]]:
        asked = tuple(words)
        if asked not in answered:
            answered[asked] = ask(words)
            if words[0] != "run":
                _answered[asked] = answered[asked]
        return answered[asked]

    return call


def _held(answer: dict[str, Any], run: Run) -> None:
    claims = [*dict.fromkeys(claims_of(answer))]
    # The first and the last: what was said of the run itself, and what was found; at night two in between.
    for claim in claims[:: max(1, (len(claims) - 1) // (3 if at_night() else 1))]:
        hold(claim, run)


@pytest.mark.parametrize("name", by_day(PROFILES))
def test_a_report_of_profile_is_kept_to(run, name, tmp_path):
    _, answer = run(["profile", *PROFILES[name].split()])
    _held(answer, run)
    said = follow(answer, run, tmp_path)
    assert said and set(said) <= CHECKS.keys() | {"read what each fix does and costs", "read what each finding means"}


@pytest.mark.parametrize("name", by_day(SCRIPTS, "later steps"))
def test_a_report_of_run_is_kept_to(run, name, tmp_path):
    options, arguments = SCRIPTS[name]
    _, answer = run(["run", *options.split(), "train.py", *arguments.split()])
    _held(answer, run)
    follow(answer, run, tmp_path)


@pytest.mark.parametrize(
    "asked",
    by_day(
        [
            "--model-size 1M --gpu-vram 0.7 --context-length 256",
            "--model-size 1M --gpu-vram 0.7 --mode inference --context-length 512",
            "--model-size 1M --gpu-vram 0.7 --adapter lora --context-length 256",
            "--gpu-vram 0.6 --context-length 64",
        ],
    ),
)
def test_a_recommendation_is_kept_to(run, asked):
    code, answer = run(["recommend", *asked.split()])
    assert code == 0
    claims = [*dict.fromkeys(claims_of(answer))]
    assert claims
    for claim in claims if at_night() else claims[:3]:
        hold(claim, run)


GOLDEN = [name for name, commands in COMMANDS.items() if commands[-1].startswith(("profile", "run"))]


@pytest.mark.parametrize("name", by_day(GOLDEN, "run"))
def test_a_golden_report_is_kept_to(run, name, tmp_path):
    _, answer = run(COMMANDS[name][-1].split())
    for claim in dict.fromkeys(claims_of(answer)):
        hold(claim, run)
    follow(answer, run, tmp_path, most=5 if at_night() else 1)


@pytest.mark.parametrize(("fits", "needed"), [(True, 5), (False, 4), (False, None)])
def test_a_claim_that_is_not_kept_is_seen(fits, needed):
    claim = Claim("memprof profile --model gpt2", fits, needed, "row")
    hold(claim, lambda words: ((0 if fits else 3), {"verdict": {"fits": fits, "required_bytes": needed}}))
    for code, told, size in ((3 if fits else 0, fits, needed), (0 if fits else 3, not fits, needed), (0, fits, 7)):
        if (code, told, size) == (0, fits, needed):
            continue
        with pytest.raises(AssertionError):
            hold(claim, lambda words: (code, {"verdict": {"fits": told, "required_bytes": size}}))  # noqa: B023
