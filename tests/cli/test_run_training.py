"""`memprof run` of scripts that train: their batches, steps and parameters, fixes from outside, a ladder."""

from __future__ import annotations

import json

import pytest

from memprof.flows.ladder import scripts

VARIES = """
import json
import pathlib
import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
told = []
for rows in (300, 2500, 700, 4000, 900, 3100, 5000, 1200):
    torch.cuda.reset_peak_memory_stats()
    model(torch.randn(rows, 512, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    told.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    optimizer.zero_grad()
pathlib.Path("told.json").write_text(json.dumps(told))
"""


def test_batches_that_differ_are_told_over_the_steps(memprof, script, tmp_path):
    """As torch itself counts them for the program, which asks after each step."""
    found = json.loads(memprof("run", "--json", "--until-exit", script(VARIES)).stdout)["batches"]
    told = json.loads((tmp_path / "told.json").read_text())
    assert [[step["peak_allocated_bytes"], step["reserved_bytes"]] for step in found["steps"]] == told
    as_it_is, expandable, emptied = found["reserved"]
    assert (as_it_is["peak_bytes"], as_it_is["settled_step"]) == (told[-1][1], 7)
    assert as_it_is["mean_bytes"] == round(sum(reserved for _, reserved in told) / len(told))
    assert emptied["mean_bytes"] < expandable["mean_bytes"] < as_it_is["mean_bytes"]
    assert found["lengths"] is None and found["steps"][0]["sequence_length"] is None
    shown = memprof("run", "--full", "--until-exit", "train.py").stdout
    assert "Over 8 steps of the program, whose batches differ" in shown
    for stopped in (("--steps", "4", "train.py"), ("--until-exit", script())):
        assert json.loads(memprof("run", "--json", *stopped, "256", "32").stdout)["batches"] is None


def test_worst_batch(memprof, script):
    name = script(
        """
        import torch
        from torch.utils.data import DataLoader
        data = [torch.randn(1 + (7 * i) % 50, 64) for i in range(50)]
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        count = 0
        for batch in DataLoader(data, batch_size=None):
            if count == 0:
                print("first", tuple(batch.shape))
            count += 1
            model(batch.cuda()).sum().backward()
            optimizer.step()
        print("batches", count)
        """
    )
    ran = memprof("run", "--worst-batch", "--until-exit", "--explain", name)
    assert "first (50, 64)\nbatches 50\n" in ran.stdout
    assert "of 50 batches of a data loader number 8 is the largest (12,800 bytes)" in " ".join(ran.stdout.split())


def test_the_worst_batch_meets_the_state_of_the_optimizer(memprof, script):
    """Also where batches are fetched ahead, accumulated, or taken apart; loaders of evaluation give it once."""
    name = script(
        """
        import torch
        from torch.utils.data import DataLoader
        data = [{"x": torch.randn(1 + (7 * i) % 50, 64)} for i in range(50)]
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        trained = []
        batches = iter(DataLoader(data, batch_size=None))
        ahead = next(batches)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            x = batch.pop("x")
            trained.append(len(x))
            model(x.cuda()).square().mean().backward()
            if len(trained) % 2:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if len(trained) == 2:
                evaluated = []
                for batch in DataLoader(data, batch_size=None):
                    evaluated.append(len(batch["x"]))
                    with torch.no_grad():
                        model(batch["x"].cuda())
        print("trained", len(trained), trained[:6])
        print("evaluated", len(evaluated), evaluated[:3], sorted(evaluated) == list(range(1, 51)))
        """
    )
    ran = memprof("run", "--worst-batch", "--until-exit", name)
    assert "trained 50 [50, 50, 50, 50, 50, " in ran.stdout  # the fifth was fetched before the second step
    assert "evaluated 50 [50, 1, 8] True\n" in ran.stdout


def test_the_worst_of_batches_in_a_mapping_of_their_own_class(memprof, script):
    name = script(
        """
        import torch
        from torch.utils.data import DataLoader
        from transformers import BatchEncoding
        x = torch.ones(9, device="cuda")
        for batch in DataLoader([BatchEncoding({"x": torch.ones(i)}) for i in (1, 3, 2)], batch_size=None):
            print("length", len(batch["x"]))
        """
    )
    assert memprof("run", "--worst-batch", name).stdout.startswith("length 3\nlength 1\nlength 2\n")


def test_parameters_are_trained_without_a_module(memprof, script):
    name = script(
        """
        import torch
        weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
        optimizer = torch.optim.Adam([weight])
        for step in range(5):
            (torch.randn(8, 64, device="cuda") @ weight).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print("step", step)
        """
    )
    ran = memprof("run", "--steps", 3, name)
    assert ran.stdout.startswith("step 0\nstep 1\nFits: ") and "stopped after 3 training steps" in ran.stdout
    document = memprof("run", "--json", "--until-exit", name).json
    assert (document["program"]["steps"], len(document["steps"])) == (5, 5)
    assert {1, 2, 3, 4, 5} == {row["step"] for row in document["stages"] if row["name"] == "optimizer step"}


def test_gradients_that_the_program_makes_itself(memprof, script):
    name = script(
        """
        import torch
        weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
        optimizer = torch.optim.Adam([weight])
        for _ in range(5):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        """
    )
    assert memprof("run", "--json", "--steps", "2", name).json["program"] | {"command": [], "asked": None} == {
        "command": [],
        "asked": None,
        "ended": "steps",
        "exit_code": 0,
        "steps": 2,
        "fixes": [],
        "evaluated": False,
        "planned_steps": 5,
        "misses_evaluation": False,
        "misses_unfreezing": False,
        "idle_optimizers": 0,
        "misses_model": False,
        "evaluation_step": None,
        "misses_calls": False,
    }


def test_forwards_alone_are_no_training(memprof, script):
    name = script(
        """
        import torch
        model = torch.nn.Linear(64, 64).cuda()
        for _ in range(3):
            with torch.no_grad():
                model(torch.randn(8, 64, device="cuda"))
        """
    )
    assert "train.py: ran to its end\n" in memprof("run", name).stdout


def test_forwards_with_gradients_that_nobody_asks_for_are_no_training(memprof, script):
    name = script(
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50)).eval().cuda()
        for _ in range(3):
            print(model(torch.randint(0, 50, (8, 9), device="cuda")).argmax(-1).shape)
        """
    )
    shown = memprof("run", name).stdout
    assert "train.py: ran to its end\n" in shown
    assert "\n  train.py:5, 3 times" in shown and "\n  loss" not in shown


FIXABLE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                     num_key_value_heads=4, vocab_size=32000)
model = LlamaForCausalLM(config).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 32000, (1, 4096), device="cuda")
for _ in range(3):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_fixes_from_outside(memprof, script):
    name = script(FIXABLE)
    before = memprof("run", "--json", name).json
    after = memprof("run", "--json", "--fix", "chunked-loss,expandable-segments,fused-optimizer", name).json
    assert after["program"]["fixes"] == ["chunked-loss", "expandable-segments", "fused-optimizer"]
    assert after["peak"]["allocated_bytes"] < 0.5 * before["peak"]["allocated_bytes"]
    assert after["allocator"]["alloc_conf"] == "expandable_segments:True"


def test_what_is_on_is_not_recommended(memprof, script):
    # A chunk of all tokens: the logits stay what they were.
    name = script(FIXABLE)
    options = ("run", "--json", "--beyond", "--gpu-vram", "1.2")
    before, after = memprof(*options, name).json, memprof(*options, "--fix", "chunked-loss=4096", name).json
    for document, recommended in ((before, True), (after, False)):
        assert any("chunked-loss" in finding["fixes"] for finding in document["findings"]) is recommended


LAYERS = """
import torch
from torch import nn
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
model = Model().to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    model(torch.randn(1 << 17, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.nightly
def test_a_ladder_of_runs(memprof, script, monkeypatch):
    # Each fix is a process of its own: two are enough to see a ladder.
    monkeypatch.setattr(scripts, "script_fix_names", lambda: ["chunked-loss", "activation-checkpointing"])
    ran = memprof("run", "--json", "--ladder", "--gpu-vram", "1.3", script(LAYERS))
    first, second, *_ = ran.json["ladder"]
    assert first["fits"] is False and second["fits"] is True and ran.exit_code == 3
    assert second["fixes"] == ["activation-checkpointing"]
    assert second["device_used_bytes"] < 0.6 * first["device_used_bytes"]
    assert second["cost"]["extra_operations"] > 0
    assert "chunked-loss" in ran.json["ladder_left_out"]
