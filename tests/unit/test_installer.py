"""What adds a library, for each tool that makes environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.installer import format_install_command


@pytest.mark.parametrize(
    ("prefix", "command"),
    [
        ("/", "pip install 'plotly>=6' triton"),
        ("/usr", "pip install 'plotly>=6' triton"),
        ("/home/me/.local/share/pipx/venvs/torch-memprof", "pipx inject torch-memprof 'plotly>=6' triton"),
        ("/home/me/pipx/venvs", "pip install 'plotly>=6' triton"),
        (
            "/home/me/uv/tools/torch-memprof",
            "uv pip install --python /home/me/uv/tools/torch-memprof 'plotly>=6' triton",
        ),
        ("/home/uv/my/tools", "pip install 'plotly>=6' triton"),
    ],
)
def test_the_tool_is_known_by_its_folder(prefix: str, command: str) -> None:
    assert format_install_command("plotly>=6", "triton", prefix=prefix) == command


@pytest.mark.parametrize(("line", "tool"), [("uv = 0.9.1", "uv pip"), ("version_info = 3.11.7", "pip")])
def test_an_environment_of_uv_has_no_pip(tmp_path: Path, line: str, tool: str) -> None:
    (tmp_path / "pyvenv.cfg").write_text(f"home = /usr/bin\n{line}\n")
    assert format_install_command("pyarrow", prefix=str(tmp_path)) == f"{tool} install pyarrow"
