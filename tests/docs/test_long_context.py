"""The story of 131,072 tokens: its script computes what an undivided one does, and the figures shown are current."""

from __future__ import annotations

import json
import re

import pytest

from tests.docs.test_docs import _generate, _needs_pinned
from tests.processes import ROOT, python

STORIES = ROOT / "docs" / "stories.md"
SCRIPT = ROOT / "docs" / "stories" / "long_context.py"
ATTENTION = """
import importlib.util, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.functional import scaled_dot_product_attention

def rank(number, GPUs, place, script):
    spec = importlib.util.spec_from_file_location("long_context", script)
    story = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(story)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=GPUs)
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, 12, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    seen = torch.randn(1, 12, 4, 4, dtype=torch.float64)
    wanted = scaled_dot_product_attention(*whole, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
    expected = torch.autograd.grad((wanted * seen).sum(), whole)
    part = slice(number * 12 // GPUs, (number + 1) * 12 // GPUs)
    mine = [x.detach()[:, :, part].requires_grad_() for x in whole]
    found, _ = story.attend(None, *mine, None, 0.3)
    torch.testing.assert_close(found, wanted[:, part])
    gradients = torch.autograd.grad((found * seen[:, part]).sum(), mine)
    for one, other in zip(gradients, expected):
        torch.testing.assert_close(one, other[:, :, part])
    print("equal")
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank, (2, *sys.argv[1:]), nprocs=2)
"""


@pytest.mark.nightly
def test_attention_over_divided_texts_is_attention(tmp_path):
    """Forward and gradients, in two real processes."""
    program = tmp_path / "attention.py"
    program.write_text(ATTENTION)
    done = python(program, tmp_path / "meeting", SCRIPT)
    # Two processes write: the ends of their lines may change places.
    assert done.exit_code == 0 and "".join(done.stdout.split()) == "equalequal", done.stderr


def run(gpus: int, *arguments: str) -> dict:
    """The report of a rank of the script, with two layers."""
    command = ("run", "--json", "--gpu", "h200", "torchrun", "--nproc-per-node", gpus, SCRIPT, "--layers", 2)
    done = python("-m", "memprof", *map(str, (*command, *arguments)))
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_what_is_divided_and_what_is_not():
    """fully_shard divides the model's state, and nothing else; divided texts the activations as well."""
    two, eight = run(2), run(8)
    two_split, eight_split = run(2, "--split"), run(8, "--split")
    for one, other in ((two, eight), (two_split, eight_split)):
        for name in ("parameters_bytes", "optimizer_state_bytes"):
            assert one["model_state"][name] / other["model_state"][name] == pytest.approx(4, rel=0.01)
    kept = [document["peak"]["categories"]["activations"] for document in (two, eight, two_split, eight_split)]
    assert kept[0] == kept[1]
    assert kept[0] / kept[2] == pytest.approx(2, rel=0.05) and kept[2] / kept[3] == pytest.approx(4, rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(8))
def test_slow_outputs_of_the_stories_are_current(number):
    """Those that take minutes: every run of the documentation's tests leaves them out."""
    _needs_pinned("torch", "transformers", "rich", "pandas", "peft")
    shown = re.findall(
        r"<!-- slow output of: .*?<!-- end of output -->", STORIES.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(shown) == 8
    assert shown[number] == _generate().with_outputs(shown[number], slow=True)
