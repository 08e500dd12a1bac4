"""Whose allocator: the flag, the environment, what a capture says."""

from __future__ import annotations

import pytest

from memprof.allocator import CurrentSettings, Settings
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


def test_settings_as_text():
    assert str(Settings("2.13.0")) == "torch 2.13.0 with its default settings"
    assert str(Settings()).startswith("torch 2.15 (not recorded)")
    chosen = Settings.resolve("max_split_size_mb:64", "2.13.0", flag="--conf", environ={})
    assert str(chosen) == "torch 2.13.0 with the settings 'max_split_size_mb:64' (from --conf)"


def test_the_flag_is_named_in_the_error_and_facts_have_their_origin():
    with pytest.raises(UsageError) as caught:
        Settings.resolve("x:1", "2.13.0", flag="--conf", environ={})
    assert caught.value.value == "--conf=x:1"
    for origin, shown in (("--conf", "--conf=x:1"), (None, "alloc_conf=x:1")):
        with pytest.raises(UsageError) as caught:
            Settings.from_facts(AllocatorFacts("2.13.0", "x:1", origin))
        assert caught.value.value == shown
    assert Settings.from_facts(AllocatorFacts("2.6.0")).release.version == (2, 6)
    # The release's own rules: 20 is too little until 2.8.
    for conf in (lambda: Settings.resolve("max_split_size_mb:20", "2.6.0", environ={}),
                 lambda: Settings.from_facts(AllocatorFacts("2.6.0", "max_split_size_mb:20", "x")),
                 lambda: Settings.resolve(None, "2.6.0", environ={CUDA: "max_split_size_mb:20"}),
                 lambda: Settings("2.6.0").changed("max_split_size_mb:20")):  # fmt: skip
        with pytest.raises(UsageError):
            conf()


def test_a_program_changes_its_settings():
    current = CurrentSettings(Settings("2.13.0"))
    assert current.get() == ""
    current.set("max_split_size_mb:64")
    assert current.get() == "max_split_size_mb:64" and current.now.origin == "the program"
    assert current.now.torch == "2.13.0" and current.now.config.max_split_size == 64 << 20
    current.set("expandable_segments:True")  # what is not in it has its default again
    assert current.now.config.max_split_size > 64 << 20
    with pytest.raises(UsageError) as caught:
        current.set("x:1")
    assert caught.value.value == "the program=x:1" and current.get() == "expandable_segments:True"
