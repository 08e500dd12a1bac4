"""Options from the fields of dataclasses: `TargetSpec`'s, and what a command asks beside.

A command is a function. Of each of its parameters that is such a dataclass it gets one that is filled in; every field
made by `memprof.spec.option` is an option. Whatever goes wrong with it becomes one message and an exit code here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from memprof.cli.streams import say
from memprof.errors import MemprofError, UsageError
from memprof.spec import Option, TargetSpec, check_options, option, options_of

OUTPUT = "Output"
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_DEBUG = typer.Option("--debug", help="Show the whole traceback of an error.", rich_help_panel=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """Which remedies a run is tried with."""

    fix: str | None = option(
        None, "Remedies", "Run with these remedies, such as chunked-loss,activation-checkpointing or "
        "chunked-loss=2048; auto: the cheapest set that fits (docs/remedies.md lists them).", metavar="NAMES",
    )  # fmt: skip
    ladder: bool = option(False, "Remedies", "Remedies one after another: what each saves, costs, and what is next.")

    @property
    def searches(self) -> bool:
        """Whether `--fix` asks for a search, not for remedies by name."""
        return self.fix is not None and self.fix.strip() == "auto"


def again(
    name: str,
    *,
    default: object = dataclasses.MISSING,
    help: str | None = None,
    unset: str | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """An option of `TargetSpec` as a field of another dataclass, but for what is given here."""
    field: dataclasses.Field[Any] = TargetSpec.__dataclass_fields__[name]
    about: Option = field.metadata["option"]
    about = dataclasses.replace(
        about, help=help or about.help, unset=unset or about.unset, choices=choices or about.choices
    )
    default = field.default if default is dataclasses.MISSING else default
    return dataclasses.field(default=default, metadata={"option": about})


def spec_of(request: object, **others: object) -> TargetSpec:
    """The target of a request that has some options of `TargetSpec`, and what is not asked."""
    known: dict[str, Any] = {name: getattr(request, name, None) for name in TargetSpec.__dataclass_fields__}
    known.update(others)
    return TargetSpec(**{name: value for name, value in known.items() if value is not None})


class Command(typer.core.TyperCommand):
    """A command whose --help has a section for each panel; typer's own needs rich, which takes as long as the rest."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        for title, parameters in panels_of(self, ctx).items():
            with formatter.section(title):
                formatter.write_dl([parameter.get_help_record(ctx) for parameter in parameters])


def panels_of(command: Any, context: Any) -> dict[str, list[Any]]:
    """A command's parameters under the headings that --help has."""
    found: dict[str, list[Any]] = {}
    for parameter in command.get_params(context):
        title = "Arguments" if parameter.param_type_name == "argument" else "Options"
        if parameter.name == "help" and OUTPUT in found:
            title = OUTPUT
        if not getattr(parameter, "hidden", False):
            found.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).append(parameter)
    if found.keys() <= {"Arguments", OUTPUT}:  # nothing but --debug, --help and their like: no heading is needed
        return {"Options" if title == OUTPUT else title: rows for title, rows in found.items()}
    return dict(sorted(found.items(), key=lambda panel: (panel[0] == OUTPUT, panel[0] == "Remedies")))


def add(app: typer.Typer, name: str, function: Callable[..., None], settings: dict[str, Any] | None = None) -> None:
    """Make `function` the command `name`; `settings` are click's for its context."""
    app.command(name, cls=Command, context_settings=settings)(_flat(function))


def _flat(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with an option in place of each field of the dataclasses that it takes, for typer to read."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters = {
        parameter.name: parameter.replace(kind=_KEYWORD, annotation=hints[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in groups
    }
    owners: dict[str, str] = {}
    for group, kind in groups.items():
        types = get_type_hints(kind)
        for name, about in options_of(kind).items():
            owners[name] = group  # of two that have the same option, the later
            parameters[name] = _parameter(name, types[name], about, kind.__dataclass_fields__[name].default)
    parameters["debug"] = inspect.Parameter("debug", _KEYWORD, default=False, annotation=Annotated[bool, _DEBUG])

    @functools.wraps(function)
    def call(*, debug: bool, **values: Any) -> None:
        given = {group: {name: values.pop(name) for name in owners if owners[name] == group} for group in groups}
        try:
            function(**values, **{group: _build(kind, given[group]) for group, kind in groups.items()})
        except MemprofError as error:
            if debug:
                raise
            say(f"memprof: {error}", err=True)
            raise typer.Exit(error.exit_code) from None

    call.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    call.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return call


def _parameter(name: str, kind: Any, about: Option, default: object) -> inspect.Parameter:
    """The parameter that typer makes an option of. What is not given is None, or False for a flag."""
    is_flag = kind is bool and about.instead_of is None
    text = about.help.format(choices=(" or " if len(about.choices) == 2 else ", ").join(about.choices))
    unset = about.unset or (None if default is None or kind is bool else str(default)) or None
    info = typer.Option(
        str(about.flag),
        help=text if unset is None else f"{text} [default: {unset}]",
        metavar=about.metavar,
        rich_help_panel=about.panel,
    )
    kind = str if about.parse or kind is bool else kind
    annotation = Annotated[bool, info] if is_flag else Annotated[kind | None, info]
    return inspect.Parameter(name, _KEYWORD, default=False if is_flag else None, annotation=annotation)


def _build(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass of the options that were given; its own defaults are those of the others.

    Raises:
        UsageError: a value is none of the option's, or two options exclude each other.
    """
    options = options_of(kind)
    given: dict[str, Any] = {}
    for name, value in values.items():
        about = options[name]
        if value is None or value is False:
            continue
        other = about.instead_of
        if other is not None and other in given:
            flags = options[other].flag, about.flag
            raise UsageError(
                "give {} or {}, not both".format(*flags),
                value=f"{flags[0]} {given[other]} {flags[1]} {value}",
                hint="leave one out",
            )
        if value is True:
            given[name] = not kind.__dataclass_fields__[name].default
        elif other is not None and about.parse is None:
            given[other], given[name] = value, True
        else:
            given[name] = about.parse(value) if about.parse else value
    made = kind(**given)
    check_options(made)
    return made
