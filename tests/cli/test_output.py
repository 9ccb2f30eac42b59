from __future__ import annotations

import io
import json
from typing import Any

import pytest

from ckpt_tool.cli.output import Output, document, has_colour
from ckpt_tool.cli.text import Span, line


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.mark.parametrize(
    ("environment", "is_terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colour(
    environment: dict[str, str], is_terminal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NO_COLOR goes before FORCE_COLOR, which goes before what the stream is."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert has_colour(Terminal() if is_terminal else io.StringIO()) == expected


@pytest.mark.parametrize(
    "value", [{}, {"a": 1, "b": []}, {"rows": [{"x": [1, 2]}, {"x": []}], "t": "é"}, {"n": [[1], [2]]}]
)
def test_a_document_is_json(value: dict[str, Any]) -> None:
    """Whatever the line breaks, the text is the value."""
    assert json.loads("".join(document(value))) == value


def test_a_document_has_no_nan() -> None:
    """What JSON cannot say is text, wherever it stands."""
    value = {"a": float("nan"), "rows": [{"x": [1.5, float("-inf")]}]}
    assert json.loads("".join(document(value)), parse_constant=pytest.fail) == {
        "a": "nan",
        "rows": [{"x": [1.5, "-inf"]}],
    }


@pytest.mark.parametrize(
    ("mode", "out", "err"),
    [("human", "shown\n", "talk\n"), ("json", '{\n  "a": 1\n}\n', ""), ("quiet", "v\nw\n", "")],
)
def test_modes(mode: Any, out: str, err: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mode prints its own kind of result; talk goes to stderr, and to people only."""
    sink = Output(mode)
    sink.show([line(Span("shown", "red"))])
    sink.json({"a": 1})
    sink.values(["v", "w"])
    sink.talk([line("talk")])
    assert capsys.readouterr() == (out, err)


def test_names_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Escape codes, line breaks and lone surrogates in a name are printed as escapes."""
    Output("human").show([line("a\x1b]0;title\x07\nb\udc80")])
    assert capsys.readouterr().out == "a\\x1b]0;title\\x07\\nb\\udc80\n"
