"""`memprof recipes ls`, `cp`, and what is usage error; tests/recipes runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_ls_has_title_and_launch_line_of_each(memprof):
    result = memprof("recipes", "ls")
    assert result.exit_code == 0
    names = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/run.py"))
    assert len(names) >= 4
    lines = result.stdout.splitlines()
    assert lines[::3] == names
    for name, title, launch in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert title.startswith(f"    Case study {name[0]}: ")
        assert launch == f"    memprof recipes run {name}"


@pytest.mark.parametrize("name", ["4-npt-high-num-ranks", "4", "num-ranks", "High-Num"])
def test_cp_by_name_number_or_part(memprof, tmp_path, name):
    target = tmp_path / "mine"
    result = memprof("recipes", "cp", name, target)
    assert result.exit_code == 0, result.stderr
    assert f"python {target / 'run.py'}" in result.stdout
    original = ROOT / "recipes" / "4-npt-high-num-ranks"
    wanted = {path.name: path.read_bytes() for path in original.iterdir() if path.is_file()}
    assert {path.name: path.read_bytes() for path in target.iterdir()} == wanted


def test_cp_overwrites_nothing(memprof, tmp_path):
    assert memprof("recipes", "cp", "1", tmp_path).exit_code == 0
    changed = tmp_path / "1-npt-weight-delta" / "specs.py"
    changed.write_text("mine", encoding="utf-8")
    again = memprof("recipes", "cp", "1", tmp_path)
    assert again.exit_code == 2
    assert "there is something already" in again.stderr
    assert changed.read_text(encoding="utf-8") == "mine"
    over_a_file = memprof("recipes", "cp", "1", changed)
    assert over_a_file.exit_code == 2
    assert changed.read_text(encoding="utf-8") == "mine"
    below_a_file = memprof("recipes", "cp", "1", changed / "below")
    assert below_a_file.exit_code == 2
    assert "cannot be written" in below_a_file.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("npt-weigth-delta", "did you mean '1-npt-weight-delta'?"),
        ("npt", "several recipes have this in their names"),
        ("6", "unknown recipe"),
        ("", "unknown recipe"),
    ],
)
@pytest.mark.parametrize("command", ["run", "cp"])
def test_names_that_name_none_or_several(memprof, tmp_path, command, name, says):
    result = memprof("recipes", command, name, *([tmp_path / "copy"] if command == "cp" else []))
    assert result.exit_code == 2
    assert says in result.stderr
    assert not list(tmp_path.iterdir())


def test_what_follows_the_name_goes_to_the_script(memprof):
    result = memprof("recipes", "run", "4", "--help")
    assert result.exit_code == 0
    assert "--no-clock" in result.stdout


def test_an_installation_without_recipes_says_so(memprof, monkeypatch, tmp_path):
    monkeypatch.setattr("memprof.cli.recipes._FOLDERS", (tmp_path,))
    result = memprof("recipes", "ls")
    assert result.exit_code == 1
    assert "no recipes" in result.stderr
