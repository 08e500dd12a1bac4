"""Settings are read as torch reads them, and refused as torch refuses them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memprof.allocator import AllocatorConfig, CachingAllocator, config_from_environment, parse_config, parse_release
from memprof.allocator.config import UNLIMITED, config_from_settings
from memprof.errors import UsageError

MIB = 1 << 20

# Settings that every accelerator shares: the CPU build of torch parses these, and ignores keys of CUDA's own.
SHARED = [
    "",
    "max_split_size_mb:20",
    "max_split_size_mb:19",
    "max_split_size_mb:128,",
    "max_split_size_mb: 128 ",
    "max_split_size_mb:128,expandable_segments:True",
    "max_split_size_mb:1.5",
    "max_split_size_mb:-1",
    "max_split_size_mb:+32",
    "max_split_size_mb:32abc",
    "max_split_size_mb:abc",
    "max_split_size_mb:",
    "max_split_size_mb",
    "max_split_size_mb:[128]",
    "max_split_size_mb:18446744073709551615",
    "max_split_size_mb:99999999999999999999999",
    "max_non_split_rounding_mb:20",
    "max_non_split_rounding_mb:19",
    "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:0.5x",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1",
    "garbage_collection_threshold:nan",
    "garbage_collection_threshold:x",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[64:8,256:4,1024:4,>:1]",
    "roundup_power2_divisions:[64 : 8, 256:4],expandable_segments:True",
    "roundup_power2_divisions:[]",
    "roundup_power2_divisions:[>:2]",
    "roundup_power2_divisions:[64:8,]",
    "roundup_power2_divisions:[64:8",
    "roundup_power2_divisions:[48:8]",
    "roundup_power2_divisions:[0:8]",
    "roundup_power2_divisions:[64:3]",
    "roundup_power2_divisions:[64:8 256:4]",
    "expandable_segments:True,expandable_segments:False",
    "expandable_segments:true",
    "expandable_segments:1",
    "expandable_segments:True max_split_size_mb:128",
    "large_segment_size_mb:10",
    "large_segment_size_mb:11",
    "large_segment_size_mb:30,max_split_size_mb:25",
    "max_split_size_mb:25,large_segment_size_mb:30",
    "large_segment_size_mb:12,max_split_size_mb:15",
    "large_segment_size_mb:12,max_non_split_rounding_mb:15",
    "pinned_use_background_threads:True",
]

ASK_TORCH = """
import sys, torch
for text in sys.stdin.read().split("\\n"):
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except Exception:
        print("refused")
    else:
        print("taken")
"""


def _accepts(text: str, release: str) -> bool:
    try:
        parse_config(text, parse_release(release))
    except UsageError:
        return False
    return True


def test_agrees_with_torch_about_what_is_allowed():
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("this torch has no settings that accelerators share")
    version = torch.__version__
    if not parse_release(version).has_setting("large_segment_size_mb"):
        pytest.skip(f"torch {version} has no large_segment_size_mb")
    done = subprocess.run(
        [sys.executable, "-c", ASK_TORCH], input="\n".join(SHARED), capture_output=True, text=True, check=True
    )
    torch_says = dict(zip(SHARED, done.stdout.split(), strict=True))
    ours = {text: "taken" if _accepts(text, version) else "refused" for text in SHARED}
    assert ours == torch_says
    assert {"taken", "refused"} == set(torch_says.values())


def test_values():
    config = parse_config(
        "max_split_size_mb:128, max_non_split_rounding_mb:64,garbage_collection_threshold:0.6,"
        "expandable_segments:True,large_segment_size_mb:32,per_process_memory_fraction:0.75,"
        "throw_on_cudamalloc_oom:True,backend:native"
    )
    assert config.max_split_size == config.reported_max_split_size == 128 * MIB
    assert config.max_non_split_rounding == 64 * MIB
    assert config.garbage_collection_threshold == 0.6
    assert config.expandable_segments and config.throw_on_cudamalloc_oom
    assert config.large_segment_size == 32 * MIB
    assert config.per_process_memory_fraction == 0.75


def test_defaults():
    assert parse_config("") == AllocatorConfig()
    assert AllocatorConfig().reported_max_split_size == -1
    assert parse_config("max_split_size_mb:-1").max_split_size == UNLIMITED // MIB * MIB


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("max_split_size:128", ("max_split_size", "did you mean 'max_split_size_mb'")),
        ("max_split_size_mb:10", ("max_split_size_mb is 10", "at least 20")),
        ("expandable_segments:yes", ("expandable_segments is 'yes'", "True or False")),
        ("garbage_collection_threshold:80", ("garbage_collection_threshold is 80", "more than 0 and less than 1")),
        ("per_process_memory_fraction:1.5", ("per_process_memory_fraction is 1.5", "between 0 and 1")),
        ("backend:jemalloc", ("backend is 'jemalloc'", "native or cudaMallocAsync")),
        ("pinned_num_register_threads:3", ("pinned_num_register_threads is 3", "power of 2 up to 128")),
        ("expandable_segments=True", ("expandable_segments=True", "did you mean 'expandable_segments'")),
        ("expandable_segments:True;max_split_size_mb:64", ("expandable_segments is 'True;max_split_size_mb'",)),
        ("[", ("unknown allocator setting '['",)),
        ("roundup_power2_divisions:[1:2,:4]", ("roundup_power2_divisions has no value", "a power of 2 from 2")),
        ("roundup_power2_divisions:[1:]", ("roundup_power2_divisions has no value",)),
        ("roundup_power2_divisions:[12:4]", ("roundup_power2_divisions has the key '12'", "a power of 2")),
        ("roundup_power2_divisions:[1 4]", ("':' expected after '14', found ']'",)),
    ],
)
def test_errors_name_the_setting_its_value_and_what_is_allowed(text, names):
    with pytest.raises(UsageError) as caught:
        parse_config(text)
    said = str(caught.value)
    assert f"PYTORCH_CUDA_ALLOC_CONF={text}" in said
    for name in names:
        assert name in said


def test_the_rest_of_the_divisions_began_at_the_last_key_and_not_above_it():
    old = parse_config("roundup_power2_divisions:[1:8,4:4,>:2]", parse_release("2.6")).roundup_power2_divisions
    new = parse_config("roundup_power2_divisions:[1:8,4:4,>:2]", parse_release("2.13")).roundup_power2_divisions
    assert old == (8, 0, 2) + (2,) * 13
    assert new == (8, 0, 4) + (2,) * 13


def test_environment():
    assert config_from_environment({}) == (AllocatorConfig(), None)
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}
    config, name = config_from_environment(both)
    assert (config.max_split_size, name) == (32 * MIB, "PYTORCH_CUDA_ALLOC_CONF")
    config, name = config_from_environment({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    assert (config.max_split_size, name) == (64 * MIB, "PYTORCH_ALLOC_CONF")
    hip = {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:32", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert config_from_environment(hip, backend="hip")[1] == "PYTORCH_HIP_ALLOC_CONF"
    assert config_from_environment(hip)[1] == "PYTORCH_ALLOC_CONF"
    assert config_from_environment({"PYTORCH_ALLOC_CONF": "x:1"}, parse_release("2.8"))[1] is None
    with pytest.raises(UsageError, match="unknown allocator setting 'x'") as caught:
        config_from_environment({"PYTORCH_ALLOC_CONF": "x:1"})
    assert caught.value.value == "PYTORCH_ALLOC_CONF=x:1"


def test_settings_of_a_snapshot():
    config = config_from_settings(
        {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": 64 * MIB,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": True,
            "roundup_power2_divisions": {"1": 2, "4": 8, "8": 0},
        }
    )
    assert config.max_split_size == 64 * MIB
    assert config.expandable_segments
    assert config.roundup_power2_divisions == (2, 0, 8) + (0,) * 13
    assert config_from_settings({"max_split_size": -1}).max_split_size == UNLIMITED
    assert config_from_settings({}) == AllocatorConfig()


def test_another_allocator_is_refused():
    with pytest.raises(UsageError, match="native allocator"):
        CachingAllocator(1 << 30, parse_config("backend:cudaMallocAsync"))


# -- each rule at its edge, where torch's CPU build cannot be asked ----------------------------------------------------


@pytest.mark.parametrize(
    "flag",
    ["expandable_segments", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
     "pinned_use_hip_host_register", "pinned_use_background_threads", "pinned_free_catch_all",
     "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom"],
)  # fmt: skip
def test_flags(flag):
    on, off = (parse_config(f"{flag}:{value},max_split_size_mb:64") for value in ("True", "False"))
    assert on.max_split_size == off.max_split_size == 64 * MIB
    assert not getattr(off, flag, False) and getattr(on, flag, True)
    assert not _accepts(f"{flag}:1", "2.15")


ALLOWED = [
    ("pinned_num_register_threads:1", True),
    ("pinned_num_register_threads:128", True),
    ("pinned_num_register_threads:256", False),
    ("pinned_num_register_threads:0", False),
    ("pinned_num_register_threads:6", False),
    ("pinned_reserve_segment_size_mb:0", False),
    ("pinned_reserve_segment_size_mb:1", True),
    ("per_process_memory_fraction:0", True),
    ("per_process_memory_fraction:1", True),
    ("per_process_memory_fraction:1.01", False),
    ("per_process_memory_fraction:-0.01", False),
    ("garbage_collection_threshold:0", False),
    ("garbage_collection_threshold:1", False),
    ("garbage_collection_threshold:1e-3", True),
    ("garbage_collection_threshold:.5", True),
    ("garbage_collection_threshold:.5e-1", True),
    ("garbage_collection_threshold:+0.5", True),
    ("garbage_collection_threshold:-0.5", False),
    ("garbage_collection_threshold:inf", False),
    ("garbage_collection_threshold:e5", False),
    ("backend:native", True),
    ("backend:cudaMallocAsync", True),
    ("max_split_size_mb:18446744073709551616", False),
    ("max_split_size_mb:64:128", False),
    (",", False),
    ("max_split_size_mb:64,,expandable_segments:True", False),
    ("expandable_segments_reserve_by_class:[]", True),
    ("expandable_segments_reserve_by_class:[a:0.5", False),
    ("expandable_segments_reserve_by_class:a", False),
    ("expandable_segments_reserve:", False),
    ("roundup_power2_divisions:[1:0]", True),
    ("roundup_power2_divisions:[9223372036854775808:2]", True),  # 19 digits
    ("roundup_power2_divisions:[00000000000000000001:2]", False),  # 20
    ("roundup_power2_divisions:[x:2]", False),
    ("roundup_power2_divisions:[1:2,:4]", False),
]


def test_what_is_allowed():
    for text, is_allowed in ALLOWED:
        assert _accepts(text, "2.15") == is_allowed


@pytest.mark.parametrize(
    ("setting", "before", "first"),
    [
        ("per_process_memory_fraction:0.5", "2.9", "2.10"),
        ("large_segment_size_mb:32", "2.10", "2.11"),
        ("throw_on_cudamalloc_oom:True", "2.11", "2.12"),
        ("expandable_segments_reserve:0.5", "2.14", "2.15"),
        ("expandable_segments_reserve_by_class:[a:0.5]", "2.14", "2.15"),
        ("max_split_size_mb:20", "2.8", "2.9"),
        ("max_non_split_rounding_mb:20", "2.8", "2.9"),
    ],
)
def test_the_first_release_with_a_setting(setting, before, first):
    assert not _accepts(setting, before) and _accepts(setting, first)
    assert _accepts(setting.replace(":20", ":21") if ":20" in setting else "expandable_segments:True", "2.0")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("max_split_size_mb:29,large_segment_size_mb:30", "MiB, at least 30 (large_segment_size_mb)"),
        ("max_non_split_rounding_mb:19", "MiB, at least 20 (large_segment_size_mb)"),
        ("max_split_size_mb:0", "MiB, at least 20 (large_segment_size_mb)"),
        ("large_segment_size_mb:10", "MiB, more than 10"),
        ("roundup_power2_divisions:[64:3]", "0 or a power of 2"),
        ("max_split_size_mb", "key:value,key:value"),
    ],
)
def test_what_would_be_allowed(text, hint):
    with pytest.raises(UsageError) as caught:
        parse_config(text)
    assert caught.value.hint == hint
    for release in ("2.8", "2.9"):
        with pytest.raises(UsageError) as caught:
            parse_config("max_split_size_mb:19", parse_release(release))
        assert caught.value.hint == ("MiB, more than 20" if release == "2.8" else "MiB, at minimum 20")


def test_limits_of_a_split_are_those_of_the_large_segment():
    config = parse_config("max_split_size_mb:30,max_non_split_rounding_mb:31,large_segment_size_mb:30")
    assert (config.max_split_size, config.max_non_split_rounding) == (30 * MIB, 31 * MIB)
    assert AllocatorConfig().max_non_split_rounding == AllocatorConfig().large_segment_size == 20 * MIB
    assert AllocatorConfig().per_process_memory_fraction == 1 and AllocatorConfig().garbage_collection_threshold == 0
    assert parse_config("max_split_size_mb:18446744073709551615").max_split_size == UNLIMITED // MIB * MIB
    assert parse_config("max_split_size_mb:-18446744073709551594").max_split_size == 22 * MIB  # it wraps around
    assert parse_config(" max_split_size_mb : 64 ").text == " max_split_size_mb : 64 "


@pytest.mark.parametrize(
    ("value", "share", "num_bytes"),
    [
        (".5", 0.5, None), ("+2", 2, None), ("1e-1", 0.1, None), ("2.5", 2.5, None), ("2.", 2, None),
        ("1.5g", 9 / 8, 3 << 29), ("1e1G", 9 / 8, 10 << 30), (".5G", 9 / 8, 1 << 29),
        ("0", 9 / 8, None), ("0G", 9 / 8, None), ("-1", 9 / 8, None), ("1e999", 9 / 8, None), ("1T", 9 / 8, None),
    ],
)  # fmt: skip
def test_reserve_as_a_share_or_in_gib(value, share, num_bytes):
    config = parse_config(f"expandable_segments_reserve:{value},expandable_segments:True")
    assert config.expandable_segments
    assert (config.expandable_segments_reserve, config.expandable_segments_reserve_bytes) == (share, num_bytes)


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("8", (8,) * 16),
        ("[4:2]", (2, 2, 2) + (0,) * 13),  # the first counts for all below it
        ("[4:2,16:8]", (2, 2, 2, 0, 8) + (0,) * 11),
        ("[1:2,>:4]", (2,) + (4,) * 15),
        ("[>:4]", (0,) + (4,) * 15),
        ("[32768:2]", (2,) * 16),
        ("[65536:2]", (2,) * 16),
        ("[1:4,65536:2]", (4,) + (0,) * 14 + (2,)),
        ("[1:4,2:0]", (4,) + (0,) * 15),
    ],
)
def test_divisions_of_each_octave(text, divisions):
    assert parse_config(f"roundup_power2_divisions:{text}").roundup_power2_divisions == divisions


SNAPSHOT_SETTINGS = [
    ({"max_split_size": 0}, {"max_split_size": 0}),
    ({"max_split_size": -1}, {}),
    ({"max_split_size": UNLIMITED >> 1}, {}),
    ({"max_split_size": (UNLIMITED >> 1) - 1}, {"max_split_size": (UNLIMITED >> 1) - 1}),
    ({"max_split_size": "64"}, {}),
    ({"garbage_collection_threshold": 1}, {"garbage_collection_threshold": 1.0}),
    ({"garbage_collection_threshold": "0.5"}, {}),
    ({"expandable_segments": 1}, {}),
    ({"expandable_segments": True}, {"expandable_segments": True}),
    ({"roundup_power2_divisions": {"1": 2}}, {"roundup_power2_divisions": (2,) + (0,) * 15}),
    ({"roundup_power2_divisions": {1: 2}}, {"roundup_power2_divisions": (2,) + (0,) * 15}),
    ({"roundup_power2_divisions": {"32768": 2}}, {"roundup_power2_divisions": (0,) * 15 + (2,)}),
    ({"roundup_power2_divisions": {"65536": 4}}, {"roundup_power2_divisions": (0,) * 15 + (4,)}),
    ({"roundup_power2_divisions": {str(1 << 63): 4}}, {"roundup_power2_divisions": (0,) * 15 + (4,)}),  # 19 digits
    ({"roundup_power2_divisions": {str(1 << 64): 4}}, {}),  # 20 digits
    ({"roundup_power2_divisions": {"3": 2, "x": 2, "-1": 2, "0": 2, "4": "2"}}, {}),
    ({"roundup_power2_divisions": {"1": 1}}, {}),  # no division
    ({"roundup_power2_divisions": 2}, {}),
    ({"PYTORCH_CUDA_ALLOC_CONF": 7}, {}),
]


def test_settings_of_a_snapshot_one_by_one():
    for settings, expected in SNAPSHOT_SETTINGS:
        assert config_from_settings(settings) == AllocatorConfig(**expected)


def test_the_settings_of_a_snapshot_count_more_than_its_environment():
    text = "max_split_size_mb:64,roundup_power2_divisions:8,garbage_collection_threshold:0.5,expandable_segments:True"
    config = config_from_settings({"PYTORCH_CUDA_ALLOC_CONF": text})
    assert config == parse_config(text) and config.text == text
    now = {"max_split_size": -1, "roundup_power2_divisions": {}, "expandable_segments": False}
    changed = config_from_settings({"PYTORCH_CUDA_ALLOC_CONF": text, **now})
    assert (changed.max_split_size, changed.roundup_power2_divisions) == (UNLIMITED, ())
    assert not changed.expandable_segments and changed.garbage_collection_threshold == 0.5


def test_the_environment_of_this_process(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    config, name = config_from_environment()
    assert (config.max_split_size, name) == (64 * MIB, "PYTORCH_CUDA_ALLOC_CONF")
    old = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:20", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:21"}
    assert config_from_environment(old, parse_release("2.8"))[0].max_split_size == 21 * MIB
    with pytest.raises(UsageError):
        config_from_environment({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:20"}, parse_release("2.8"))
