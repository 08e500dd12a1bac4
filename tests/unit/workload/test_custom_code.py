"""Code that a model comes with runs where it was requested, and nowhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from memprof.errors import UsageError
from memprof.spec import TargetSpec
from memprof.workload.models import find_source

CONFIGURATION = """
from pathlib import Path
from transformers import PretrainedConfig
Path({mark!r}).write_text("configuration")
class OwnConfig(PretrainedConfig):
    model_type = "own"
    def __init__(self, width=8, **others):
        self.width = width
        super().__init__(**others)
"""
MODELING = """
import torch
from transformers import PreTrainedModel
from .configuration_own import OwnConfig
class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.head = torch.nn.Linear(config.width, config.width)
        self.post_init()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with code, which leaves a file `ran` behind."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # of another test, with that one's folder
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if not (Path(entry) / "transformers_modules").is_dir()]
    )
    made = tmp_path / "own-model"
    made.mkdir()
    (made / "configuration_own.py").write_text(CONFIGURATION.format(mark=str(tmp_path / "ran")))
    (made / "modeling_own.py").write_text(MODELING)
    config = {
        "model_type": "own", "architectures": ["OwnForCausalLM"], "width": 12, "vocab_size": 12, "dtype": "float32",
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"
        },
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize("hub", [False, True])
def test_it_does_not_run_unasked(folder: Path, monkeypatch: pytest.MonkeyPatch, hub: bool) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question at the terminal"))
    monkeypatch.chdir(folder.parent)
    if hub:  # a name with a slash, whose file the hub's client finds
        monkeypatch.setattr("memprof.workload.models._is_hub_reachable", lambda: False)
        config = json.loads((folder / "config.json").read_text())
        monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", lambda name, **_: (config, {}))
    with pytest.raises(UsageError, match="not run unasked") as caught:
        find_source(TargetSpec(model="someone/own-model" if hub else str(folder)))
    assert "modeling_own.OwnForCausalLM" in str(caught.value)
    assert "--trust-remote-code" in str(caught.value)
    assert not (folder.parent / "ran").exists()


def test_it_runs_where_asked_and_says_so(folder: Path) -> None:
    source = find_source(TargetSpec(model=str(folder), trust_remote_code=True))
    model = source.build()
    assert model.head.weight.shape == (12, 12)
    assert source.task == "causal-lm"
    assert (folder.parent / "ran").read_text() == "configuration"
    assert any("modeling_own.OwnForCausalLM" in note and str(folder) in note for note in source.notes)


def test_the_class_of_transformers_is_taken_unasked(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 12, "n_head": 2}
    (folder / "config.json").write_text(json.dumps(config))
    model = find_source(TargetSpec(model=str(folder))).build()
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert not (folder.parent / "ran").exists()


def test_code_that_fails(folder: Path) -> None:
    (folder / "modeling_own.py").write_text("import no_such_package_at_all")
    source = find_source(TargetSpec(model=str(folder), trust_remote_code=True))
    with pytest.raises(UsageError, match="own code cannot be loaded") as caught:
        source.build()
    assert "no_such_package_at_all" in str(caught.value)
