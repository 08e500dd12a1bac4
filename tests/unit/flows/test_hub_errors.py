"""The hint for a program that cannot reach the hub."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

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
