"""Whose allocator: the flag, the environment, what a capture says."""

from __future__ import annotations

import pytest

from memprof.allocator import Settings
from memprof.errors import UsageError
from memprof.trace.facts import AllocatorFacts

CUDA, BOTH = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


def test_the_flag_counts_more_than_the_environment():
    settings = Settings.resolve("expandable_segments:True", "2.13.0", environ={CUDA: "max_split_size_mb:64"})
    assert settings.config.expandable_segments and settings.origin == "--alloc-conf"
    assert settings.facts == AllocatorFacts("2.13.0", "expandable_segments:True", "--alloc-conf")


@pytest.mark.parametrize(
    ("torch", "environ", "origin"),
    [
        ("2.13.0", {}, None),
        ("2.13.0", {BOTH: "expandable_segments:True"}, BOTH),
        ("2.13.0", {BOTH: "max_split_size_mb:64", CUDA: "expandable_segments:True"}, CUDA),
        ("2.8.0", {BOTH: "expandable_segments:True"}, None),
    ],
)
def test_the_environment_by_the_rules_of_the_release(torch, environ, origin):
    settings = Settings.resolve(None, torch, environ=environ)
    assert settings.origin == origin and settings.config.expandable_segments == (origin is not None)
    assert settings.alloc_conf == (None if origin is None else "expandable_segments:True")


@pytest.mark.parametrize("alloc_conf", [None, "", "max_split_size_mb:64"])
def test_facts_come_back(alloc_conf):
    settings = Settings.resolve(alloc_conf, "2.9.1+cpu", environ={})
    assert Settings.from_facts(settings.facts) == settings


def test_a_capture_without_facts_has_the_newest_release_and_says_so():
    settings = Settings.from_facts(None)
    assert settings.release.version >= (2, 15) and "not recorded" in str(settings)


@pytest.mark.parametrize("text", ["no_such:True", "expandable_segments:yes", "backend:cudaMallocAsync"])
def test_what_cannot_be_replayed_is_refused_before_the_run(text):
    with pytest.raises(UsageError):
        Settings.resolve(text, "2.13.0", environ={})
    with pytest.raises(UsageError):
        Settings.resolve(None, "2.13.0", environ={CUDA: text})
