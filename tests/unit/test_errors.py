"""What an error says, and which known name an unknown one is taken for."""

from __future__ import annotations

import pytest

from memprof.errors import (
    MemprofError,
    UsageError,
    error_text,
    first_line,
    nearest,
    not_installed,
    printable,
    suggest_name,
    unknown_name,
)


def test_an_error_has_a_problem_a_value_and_a_hint() -> None:
    error = MemprofError("too long", value="a\x1b[2J", hint="shorter")
    assert str(error) == "too long\n  value: a\\x1b[2J\n  hint:  shorter"
    assert error.line == "too long (a\x1b[2J)"
    assert str(MemprofError("too long")) == MemprofError("too long").line == "too long"
    assert (MemprofError.exit_code, UsageError.exit_code) == (1, 2)
    assert str(MemprofError("too long", value=0)) == "too long\n  value: 0"  # a value, and not none


def test_only_tabs_and_line_feeds_stay_of_control_characters() -> None:
    assert printable("a\tb\nc\rd\x7f\u202e\U000e0041é") == "a\tb\nc\\rd\\x7f\\u202e\\U000e0041é"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_the_text_of_any_exception() -> None:
    assert error_text(Unspeakable()) == first_line(Unspeakable()) == "<exception str() failed>"
    assert first_line(ValueError("\n one\ntwo")) == "one"
    assert first_line(ValueError()) == ""


def test_what_is_not_installed() -> None:
    error = not_installed("Parquet needs pyarrow", "a.parquet", "pyarrow", ", or write JSON Lines")
    assert (error.exit_code, error.value) == (2, "a.parquet")
    assert error.hint == "pip install 'pyarrow>=17', or write JSON Lines"


@pytest.mark.parametrize(
    ("name", "choices", "found"),
    [
        ("MODLE", ["mode", "Model"], "Model"),  # the same letters count more than a similar name
        ("Adam", ["sgd", "adamw"], "adamw"),
        ("abcd", ["abxy"], "abxy"),  # half of it is the same
        ("abcd", ["axyz"], None),
    ],
)
def test_the_nearest_name(name: str, choices: list[str], found: str | None) -> None:
    assert nearest(name, choices) == found


def test_names_that_begin_with_what_was_given_are_its_sizes() -> None:
    sizes = ["chip-8gb", "chip-16gb", "chip"]
    assert suggest_name("Chip", sizes) == "did you mean one of chip-8gb, chip-16gb?"
    assert suggest_name("chip", ["chip-8gb", "chips"]) == "did you mean 'chips'?"
    assert suggest_name("chip", [f"chip-{size}" for size in "1234567"]) == (
        "did you mean one of chip-1, chip-2, chip-3, chip-4, chip-5, chip-6 (7 in all)?"
    )
    assert suggest_name("", ["-8gb", "-16gb"]) is None


def test_an_unknown_name_has_a_suggestion_else_few_names_are_listed() -> None:
    names = [f"{number:02}" for number in range(31)]
    error = unknown_name("rule", "31", ["b", "13"], see="(help rules)")
    assert (error.problem, error.value, error.hint) == ("unknown rule", "'31'", "did you mean '13'? (help rules)")
    assert unknown_name("rule", "xyz", names[29::-1]).hint == "known: " + ", ".join(names[:30])
    assert unknown_name("rule", "xyz", names).hint == "31 are known, '00' to '30' among them"
