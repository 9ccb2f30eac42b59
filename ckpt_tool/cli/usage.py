"""What typer's parser says of a command line, in this program's words: which option, what it takes, what it got.

Knows the parser's sentences, of typer 0.26 on and of click before; one that is not known is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["said_of_usage"]

_VALUE = r"invalid value for '(?P<option>[^']+)': "


def _choices(found: re.Match[str]) -> str:
    words = re.findall(r"'([^']*)'", found["choices"])
    return f"{found['option']}: expected {', '.join(words[:-1])} or {words[-1]}, got {found['got']}"


def _bounds(found: re.Match[str]) -> str:
    allowed = f"{found['low']} or more" if found["low"] else f"{found['first']} to {found['last']}"
    return f"{found['option']}: expected {allowed}, got {found['got']}"


def _too_many(found: re.Match[str]) -> str:
    return f"expected nothing behind the last argument, got {found['got']}"


_SENTENCES: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (_VALUE + r"(?P<got>'.*') is not one of (?P<choices>'.*')", _choices),
    (_VALUE + r"(?P<got>\S+) is not in the range (?:x>=(?P<low>\d+)|(?P<first>\d+)<=x<=(?P<last>\d+))", _bounds),
    (
        _VALUE + r"(?P<got>'.*') is not a valid int(?:eger)?(?: range)?",
        lambda found: f"{found['option']}: expected a whole number, got {found['got']}",
    ),
    (
        r"option '(?P<option>[^']+)' requires an argument",
        lambda found: f"{found['option']}: expected a value, got none",
    ),
    (r"got unexpected extra arguments?(?:\(s\))? \((?P<got>.*)\)", _too_many),
)
_NEAR = re.compile(
    r"(?P<said>no such option: \S+)(?: \(possible options: (?P<near>.*)\)| did you mean (?P<one>\S+)\?)", re.IGNORECASE
)


def said_of_usage(message: str, command: str) -> tuple[str, str]:
    """The message of an error, and what to type.

    >>> said_of_usage("Invalid value for '--limit': -1 is not in the range x>=0.", "ckpt inspect")
    ('--limit: expected 0 or more, got -1', 'ckpt inspect --help')
    >>> said_of_usage("No such option: --verion (Possible options: --section)", "ckpt inspect")
    ('no such option: --verion', 'did you mean --section? All are in ckpt inspect --help')

    Args:
        message: the parser's sentence.
        command: what was being parsed, as it is typed.
    """
    said = message.rstrip(".")
    said = said[:1].lower() + said[1:]
    help_of = f"{command} --help"
    near = _NEAR.fullmatch(said)
    if near is not None:
        return near["said"], f"did you mean {near['near'] or near['one']}? All are in {help_of}"
    for pattern, sentence in _SENTENCES:
        found = re.fullmatch(pattern, said, re.DOTALL)
        if found is not None:
            return sentence(found), help_of
    return said, help_of
