"""`python("-m", "memprof", ...)`: Python programs in processes of their own, at a tenth of what a new one takes.

They are forked from one process a worker, which has imported torch and transformers: see process_server.py. What is to
be shown of a start itself (what is imported when, a wheel, another PYTHONPATH, the most memory) needs a new process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRACKIO_DISABLED": "1", "PYTHONPATH": str(ROOT)}
_SECONDS = 300


class Done(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str
    processor_seconds: float
    peak_bytes: int  # Of memory; what the process was forked from has a part in it.


class _Server(NamedTuple):
    process: subprocess.Popen[str]
    home: str  # The folder of what Hugging Face's libraries keep.


@functools.cache
def _server(*libraries: str) -> _Server:
    home = tempfile.mkdtemp(prefix="memprof-hf-")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.process_server", *libraries],
        cwd=ROOT,
        env={**os.environ, **_OFFLINE, "HF_HOME": home},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    @atexit.register
    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(home, ignore_errors=True)

    return _Server(process, home)


def python(
    *arguments: str | Path,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = _SECONDS,
    libraries: tuple[str, ...] = (),
) -> Done:
    """`python ARGUMENTS` without network and with nothing on stdin, in `folder` or here, with `env` or our environment.

    The first of the arguments is -m, -c or a file. With `libraries`, these alone are imported before.
    """
    process, home = _server(*libraries)
    assert process.stdin and process.stdout
    with tempfile.TemporaryDirectory() as written:
        files = {name: Path(written) / name for name in ("stdout", "stderr")}
        request = {
            "arguments": list(map(str, arguments)),
            "environment": {**(os.environ if env is None else env), **_OFFLINE, "HF_HOME": home},
            "folder": str(folder or Path.cwd()),
            "seconds": seconds,
            **{name: str(file) for name, file in files.items()},
        }
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        said = {name: file.read_text(encoding="utf-8", errors="surrogateescape") for name, file in files.items()}
    return Done(**answer, **said)
