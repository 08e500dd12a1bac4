"""The hint for a program that cannot reach the hub."""

from __future__ import annotations

import sys
from types import ModuleType
from urllib.error import URLError

import pytest
import torch

from memprof.flows.hub_errors import suggest_folder

errors = pytest.importorskip("huggingface_hub.errors")


def raise_from(cause: BaseException) -> OSError:
    try:
        raise OSError("We couldn't connect to 'https://huggingface.co'") from cause
    except OSError as error:
        return error


def test_an_error_that_the_hub_has_caused(monkeypatch):
    for name in ("vllm", "sglang"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hint = suggest_folder(raise_from(errors.LocalEntryNotFoundError("not here")))
    assert "give its folder" in hint and "HF_HUB_OFFLINE=1" in hint and "config.json" not in hint
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = suggest_folder(raise_from(errors.OfflineModeIsEnabled("offline")))
    assert "config.json is enough" in offline and "HF_HUB_OFFLINE" not in offline


def test_other_errors_have_none():
    assert suggest_folder(None) == suggest_folder(raise_from(ConnectionError("a database"))) == ""


def test_weights_that_torch_hub_cannot_download_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def refuse(*args, **kwargs):
        raise URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    with pytest.raises(URLError) as raised:
        torch.hub.load_state_dict_from_url("https://download.pytorch.org/models/resnet50.pth")
    hint = suggest_folder(raised.value)
    assert "weights=None" in hint and hint.endswith(str(tmp_path / "hub" / "checkpoints"))
    with pytest.raises(URLError) as raised:
        torch.hub.download_url_to_file("https://github.com/Arial.ttf", str(tmp_path / "Arial.ttf"))
    assert suggest_folder(raised.value) == f"the file cannot be downloaded here: copy it to {tmp_path / 'Arial.ttf'}"
    with pytest.raises(URLError) as raised:
        refuse()
    assert suggest_folder(raised.value) == ""
    database = URLError("of a database")  # which the program raised from that of a download
    with pytest.raises(URLError) as raised:
        torch.hub.download_url_to_file("https://github.com/Arial.ttf", "Arial.ttf")
    database.__cause__ = raised.value
    assert suggest_folder(database).endswith("Arial.ttf")
