"""`memprof recipes`: list, run and copy the case studies, which are scripts."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from memprof.cli.help import read_title
from memprof.cli.options import ErrorReportingGroup, add_command
from memprof.cli.output import ListOptions, print_json
from memprof.cli.streams import echo
from memprof.errors import MemprofError, UsageError, unknown_name

app = typer.Typer(
    cls=ErrorReportingGroup,
    help="Case studies of real reports: list them, run them, copy them.",
    no_args_is_help=True,
    add_completion=False,
)

RecipeName = Annotated[
    str, typer.Argument(help="A recipe by its folder's name, its number, or a part that no other has.")
]
_PACKAGE = resources.files("memprof")
# Folders of the recipes: in an installed wheel (or zip file), and in a checkout.
_FOLDERS = (_PACKAGE / "_recipes", Path(str(_PACKAGE)).parent / "recipes")
_SCRIPT, _README = "run.py", "README.md"  # the script imports the other files of its folder, and memprof


def list_recipes(output: ListOptions) -> None:
    """List the recipes: name, title, and the line that runs each."""
    folders = find_recipes()
    if output.as_json:
        from memprof.report.documents.command_results import Recipe, RecipeList

        recipes = (Recipe(folder.name, read_title(folder / _README), _build_run_command(folder)) for folder in folders)
        print_json(RecipeList(recipes=tuple(recipes)))
        return
    for folder in folders:
        echo(f"{folder.name}\n    {read_title(folder / _README)}\n    {_build_run_command(folder)}")


def run_recipe(context: typer.Context, name: RecipeName) -> None:
    """Run a recipe: what it is about before and after, and which figures of its report hold.

    What follows NAME goes to the recipe's script: its own --help says what it takes.
    """
    with _unpack_folder(find_recipe(name)) as folder:
        script = str(folder / _SCRIPT)
        saved_state = sys.argv, list(sys.path)
        # As in `python run.py`, so that a copy of the folder behaves the same.
        sys.argv, sys.path[:0] = [script, *context.args], [str(folder)]
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            sys.argv, sys.path[:] = saved_state


def copy_recipe(
    output: ListOptions,
    name: RecipeName,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new folder, or one that is there: then the copy is made inside it.")
    ],
) -> None:
    """Copy a recipe's folder, to change it and run it from there. Nothing is overwritten."""
    recipe = find_recipe(name)
    target = directory / recipe.name if directory.is_dir() else directory
    if target.exists() or target.is_symlink():
        raise UsageError("there is something already: nothing was copied", value=target, hint="name another folder")
    try:
        _copy_folder(recipe, target)
    except OSError as error:
        raise UsageError(
            "the folder cannot be written", value=f"{target}: {error.strerror or error}", hint="name another folder"
        ) from error
    run_command = f"python {shlex.quote(str(target / _SCRIPT))}"
    if output.as_json:
        from memprof.report.documents.command_results import Recipe, RecipeList

        copied_recipe = Recipe(recipe.name, read_title(recipe / _README), run_command)
        print_json(RecipeList(command="recipes cp", recipes=(copied_recipe,), copied_to=str(target)))
        return
    echo(f"copied to {target}; run it with\n    {run_command}")


def find_recipes() -> list[Traversable]:
    """Return the folders of all recipes, sorted by number. Raises MemprofError: this installation has none."""
    for folder in _FOLDERS:
        children = folder.iterdir() if folder.is_dir() else ()
        recipes = [child for child in children if (child / _SCRIPT).is_file() and (child / _README).is_file()]
        if recipes:
            return sorted(recipes, key=lambda child: (int(_parse_number(child) or sys.maxsize), child.name))
    raise MemprofError("this installation has no recipes", hint="install memprof from its wheel, or from a checkout")


def find_recipe(name: str) -> Traversable:
    """Return the recipe with this name, number, or unique part of a name. Raises UsageError: none or several."""
    recipes = find_recipes()
    query = name.strip().strip("/").lower()
    exact_matches = [recipe for recipe in recipes if query in (recipe.name.lower(), _parse_number(recipe))]
    matches = exact_matches[:1] or [recipe for recipe in recipes if query and query in recipe.name.lower()]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(
            "several recipes have this in their names", value=repr(name), hint=", ".join(r.name for r in matches)
        )
    raise unknown_name("recipe", name, [recipe.name for recipe in recipes])


@contextmanager
def _unpack_folder(recipe: Traversable) -> Iterator[Path]:
    """Context manager: return the path of a recipe's folder, unpacked for its duration if memprof is in a zip file."""
    if isinstance(recipe, Path):
        yield recipe
        return
    with tempfile.TemporaryDirectory(prefix="memprof-recipe-") as folder:
        _copy_folder(recipe, Path(folder) / recipe.name)
        yield Path(folder) / recipe.name


def _copy_folder(folder: Traversable, target: Path) -> None:
    target.mkdir(parents=True)
    for file in folder.iterdir():
        if file.is_dir():
            if file.name != "__pycache__":
                _copy_folder(file, target / file.name)
        else:
            (target / file.name).write_bytes(file.read_bytes())


def _build_run_command(recipe: Traversable) -> str:
    return f"memprof recipes run {recipe.name}"


def _parse_number(folder: Traversable) -> str | None:
    match = re.match(r"(\d+)-", folder.name)
    return match[1] if match else None


add_command(app, "ls", list_recipes, examples="memprof recipes ls")
add_command(
    app, "run", run_recipe, {"allow_extra_args": True, "allow_interspersed_args": False}, "memprof recipes run pythia"
)
add_command(app, "cp", copy_recipe, examples="memprof recipes cp pythia my-recipe")
