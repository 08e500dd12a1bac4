"""Archives have everything, and less where they would be too large to come back."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from tests.gpu.packing import MAX_BYTES, pack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of 3,000, 2,000 and 1,000 bytes that cannot be compressed."""
    made = tmp_path / "step"
    (made / "below").mkdir(parents=True)
    for name, size in (("large", 3000), ("below/middle", 2000), ("small", 1000)):
        (made / name).write_bytes(os.urandom(size))
    return made


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as tar:
        return set(tar.getnames())


def test_everything_is_packed(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "out" / "step.tgz"
    assert pack(folder, archive) == []
    assert names(archive) == {"step/large", "step/below/middle", "step/small"}
    assert list(archive.parent.iterdir()) == [archive]
    assert MAX_BYTES == 16 * 1024 * 1024


def test_the_largest_are_left_out_until_it_is_small_enough(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "step.tgz"
    assert pack(folder, archive, 4500) == ["large"]
    assert names(archive) == {"step/below/middle", "step/small"}
    assert pack(folder, archive, 2000) == ["large", "below/middle"]
    assert names(archive) == {"step/small"}
    assert archive.stat().st_size <= 2000


def test_an_archive_of_just_the_limit_is_whole(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "step.tgz"
    pack(folder, archive)
    size = archive.stat().st_size
    assert pack(folder, archive, size) == []
    assert pack(folder, archive, size - 1) == ["large"]


def test_a_later_archive_replaces_the_first(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "step.tgz"
    pack(folder, archive)
    (folder / "more").write_text("more")
    pack(folder, archive)
    assert "step/more" in names(archive)
