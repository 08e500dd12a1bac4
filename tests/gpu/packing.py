"""Results in few files of limited size, which is what comes back from a machine that is lent."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path

# Of one file. There may be eight: summary.txt, log.txt, and an archive for each of six folders at most.
MAX_BYTES = 16 << 20


def pack(folder: Path, archive: Path, max_bytes: int = MAX_BYTES) -> list[str]:
    """Replace `archive` by a .tar.gz of everything below `folder`.

    Where it would be larger than `max_bytes`, the largest file is left out, then the next, until it is not.

    Returns:
        The files that were left out, by their paths below `folder`.
    """
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    left_out: list[str] = []
    # Not beside the archive: if the day is killed meanwhile, half an archive is no result.
    with tempfile.TemporaryDirectory() as other:
        made = Path(other) / archive.name
        while _write(folder, files, made) > max_bytes:
            left_out.append(str(files.pop().relative_to(folder)))
        archive.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, archive)
    return left_out


def _write(folder: Path, files: list[Path], archive: Path) -> int:
    """Write the archive, and return its size in bytes."""
    with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
        for path in sorted(files):
            tar.add(path, arcname=f"{folder.name}/{path.relative_to(folder)}")
    return archive.stat().st_size
