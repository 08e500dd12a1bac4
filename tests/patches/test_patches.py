"""Patches of programs with one cause each: the diff applies, and the patched program fits, or needs less.

The programs are those of this folder, of `tests/planted/` and of `tests/reports/`; their headers say what is wrong.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.headers import read_header
from tests.lanes import by_day
from tests.processes import python

TESTS = Path(__file__).resolve().parent.parent

# Program -> a line that its patch adds.
PATCHES = {
    "patches/programs/error_in_a_list": "failures.append((rows, str(error)))",
    "patches/programs/evaluate_function": "@torch.no_grad()",
    "patches/programs/loaded_to_the_gpu": 'state = torch.load(file, map_location="cpu")',
    "patches/programs/logits_of_the_last_batch": "    del logits",
    "patches/programs/losses_in_a_list": 'self.history["other"].append(self.helper(x).square().mean().item())',
    "patches/programs/output_on_ctx": "ctx.save_for_backward(result)",
    "patches/programs/retry_in_the_handler": "    if ran_out_of_memory:",
    "planted/programs/containers/dict_by_step": "features_of[step] = features.detach().cpu()",
    "planted/programs/containers/list_of_outputs": "outputs.append(logits.detach().cpu())",
    "planted/programs/containers/nested_history": 'self.logs["train"]["out"].append(out.detach().cpu())',
    "planted/programs/evaluation/keeps_logits": 'device="cuda")).cpu())',
    "planted/programs/gradients/clones_in_a_list": "history.append(parameter.grad.clone().detach().cpu())",
    "planted/programs/graphs/create_graph_cycle": "x_grad.norm(2).backward()",
    "planted/programs/graphs/hidden_state": "state = cell(x, state.detach())",
    "planted/programs/graphs/smoothed_auxiliary_loss": "else 0.9 * average.detach() + 0.1 * auxiliary",
    "planted/programs/held_by_code/metric_clones_its_list": "metric.update(y.detach().cpu())",
    "planted/programs/held_by_code/module_attribute": "self.maps.append(weights.detach().cpu())",
    "planted/programs/held_by_code/global_of_a_function": "SEEN += [values.detach().cpu()]",
    "planted/programs/models_pile_up/snapshot_each_step": ".detach().cpu()",
    "planted/programs/subclasses/kept_in_a_list": "kept.append(y.detach().cpu())",
    "reports/programs/diffusers_10350": "with torch.no_grad():",
    "reports/programs/fms_fsdp_152": "        del output",
    "reports/programs/lightning_7335": "errors.append(str(error))",
    "reports/programs/nemo_rl_1147": "    optimizer.zero_grad(set_to_none=True)",
    "reports/programs/pinot_23": "{name: value.cpu() for name, value in copy.deepcopy(self.net.state_dict()).items()}",
    "reports/programs/pytorch_2198": "hidden = tuple(part.detach() for part in hidden)",
    "reports/programs/pytorch_27600": "    ran_out_of_memory = True",
    "reports/programs/pytorch_4661": "x_grad = torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0]",
    "reports/programs/pytracking_313": "self.sum = self.sum + (value * count).item()",
    "reports/programs/ray_7238": "with torch.no_grad():",
    "reports/programs/torchmetrics_1160": "with torch.no_grad():",
}

# Programs for which there is no patch -> why.
NOT_PATCHED = {
    "planted/programs/containers/cat_accumulator": "the patched program",
    "planted/programs/held_by_code/closure": "the patched program fails: AttributeError: 'function' object",
    "planted/programs/graphs/running_loss_sum": "a backward pass begins at `total`",
}


# Programs that come further with their patch, and do not fit yet -> a line that it adds, where memory runs out then.
COMES_FURTHER = {
    "reports/programs/nanogpt_236": (
        'checkpoint = torch.load(out_dir / "ckpt.pt", map_location="cpu")',
        ("logits", 2),
        ("backward", 2),
    ),
}


def run(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """Return what `memprof run --json` says of the program in `folder`, with the options in its header."""
    path = folder / f"{name.rpartition('/')[2]}.py"
    if not path.exists():
        shutil.copy(TESTS / f"{name}.py", path)
    given = read_header(path.read_text(encoding="utf-8").splitlines()).get("run", "").split()
    done = python("-m", "memprof", "run", "--json", *given, *options, path.name, folder=folder)
    assert done.stdout, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("name", by_day(PATCHES))
def test_patch(name, tmp_path):
    patch = run(name, tmp_path, "--suggest-patch")["patch"]
    assert PATCHES[name] in patch["diff"], patch
    assert patch["after"]["fits"]
    assert not patch["before"]["fits"] or patch["after"]["required_bytes"] < patch["before"]["required_bytes"]
    subprocess.run(["git", "apply"], input=patch["diff"], cwd=tmp_path, text=True, check=True)
    peak = run(name, tmp_path)["peak"]
    assert peak["allocated_bytes"] == patch["after"]["allocated_bytes"]


@pytest.mark.parametrize("name", by_day(COMES_FURTHER))
def test_a_patch_that_is_not_enough(name, tmp_path):
    line, *places = COMES_FURTHER[name]
    patch = run(name, tmp_path, "--suggest-patch")["patch"]
    assert line in patch["diff"], patch
    needs = patch["before"], patch["after"]
    assert [(need["oom_stage"], need["oom_step"]) for need in needs] == places


@pytest.mark.parametrize("name", by_day(NOT_PATCHED))
def test_no_patch(name, tmp_path):
    report = run(name, tmp_path, "--suggest-patch")
    patch = report["patch"]
    assert (patch["diff"], patch["changes"], patch["after"]) == ("", [], None)
    assert any(NOT_PATCHED[name] in reason for reason in patch["tried"]), patch


# With tabs, and a line that is longer than a terminal is wide: the diff is printed as it is.
METER = f"""
class Meter:
\tdef __init__(self):
\t\tself.outputs = []

\tdef update(self, output):
\t\tself.outputs.append(output.detach())  # {"a long line " * 20}
"""
TRAIN = """
import sys

import torch

from meters import Meter

meter = Meter()
model = torch.nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    output = model(torch.randn(4096, 4096, device="cuda"))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    meter.update(output)
"""


@pytest.mark.nightly
def test_an_imported_module(tmp_path):
    (tmp_path / "meters.py").write_text(METER)
    (tmp_path / "train.py").write_text(TRAIN)
    options = ("--gpu-vram", "2", "--suggest-patch", "train.py", "60")
    done = python("-m", "memprof", "run", *options, folder=tmp_path)
    assert done.exit_code == 3
    section = done.stdout.partition("Suggested patch (not applied)\n")[2]
    assert "/meters.py:7: keep less on the GPU in `Meter.outputs`\n  peak 1." in section
    assert " -> fits\n" in section.replace("\n  ", " ")
    assert (tmp_path / "meters.py").read_text() == METER
    _, begin, diff = section.partition("--- a/meters.py\n")
    subprocess.run(["git", "apply"], input=begin + diff, cwd=tmp_path, text=True, check=True)
    assert (tmp_path / "meters.py").read_text() == METER.replace("detach())", "detach().cpu())")


@pytest.mark.parametrize("option", [("--ladder",), ("--fix", "auto"), ("--ranks", "all"), ("--device", "cpu")])
def test_what_a_patch_is_not_for(option, tmp_path):
    done = python("-m", "memprof", "run", "--suggest-patch", *option, "train.py", folder=tmp_path)
    assert done.exit_code == 2
    assert "value: --suggest-patch" in done.stderr
