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
    ],
)
def test_errors_name_the_setting_its_value_and_what_is_allowed(text, names):
    with pytest.raises(UsageError) as caught:
        parse_config(text)
    said = str(caught.value)
    assert f"PYTORCH_CUDA_ALLOC_CONF={text}" in said
    for name in names:
        assert name in said


def test_releases_differ():
    assert not _accepts("max_split_size_mb:20", "2.6.0")  # more than 20 until 2.8
    assert _accepts("max_split_size_mb:21", "2.6.0")
    assert not _accepts("large_segment_size_mb:32", "2.10.0")
    assert not _accepts("per_process_memory_fraction:0.5", "2.9.1")
    assert not _accepts("throw_on_cudamalloc_oom:True", "2.10.0")
    assert not _accepts("expandable_segments_reserve:0.5", "2.14.1")
    # `>` began at the last key, not above it
    old = parse_config("roundup_power2_divisions:[1:8,4:4,>:2]", parse_release("2.6")).roundup_power2_divisions
    new = parse_config("roundup_power2_divisions:[1:8,4:4,>:2]", parse_release("2.13")).roundup_power2_divisions
    assert old == (8, 0, 2) + (2,) * 13
    assert new == (8, 0, 4) + (2,) * 13


def test_reserve_of_expandable_segments():
    release = parse_release("2.15")
    assert parse_config("expandable_segments_reserve:0.5", release).expandable_segments_reserve == 0.5
    assert parse_config("expandable_segments_reserve:40G", release).expandable_segments_reserve_bytes == 40 << 30
    assert parse_config("expandable_segments_reserve:none", release).expandable_segments_reserve == 9 / 8
    assert (
        parse_config("expandable_segments_reserve_by_class:[a:0.5,b:2G]", release).expandable_segments_reserve == 9 / 8
    )


def test_environment():
    assert config_from_environment({}) == (AllocatorConfig(), None)
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}
    config, name = config_from_environment(both)
    assert (config.max_split_size, name) == (32 * MIB, "PYTORCH_CUDA_ALLOC_CONF")
    config, name = config_from_environment({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    assert (config.max_split_size, name) == (64 * MIB, "PYTORCH_ALLOC_CONF")
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
