"""A console block: a fenced part of a Markdown page that shows commands and what they print.

Knows shells and text; knows nothing of checkpoints. The rules for a writer of such a page:

- a block opened by ```` ```console ```` is run, in page order, all blocks of a page in one folder; what cannot be run
  everywhere goes into a ```` ```sh ```` block, without ``$``;
- a line ``$ ...`` is a command, and is run (a line ending in a backslash goes on in the next);
- what follows, up to the next ``$`` line, is what it prints, both streams, as on a terminal that is not one;
- ``...`` alone on a line stands for any number of lines, within a line for any text;
- a command ends with status 0, or the block says otherwise of its last one: ```` ```console exit=3 ````.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = "$ "
TIMEOUT_SECONDS = 120
_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
_EXIT = re.compile(r"\bexit=(\d+)\b")


@dataclass(frozen=True, slots=True)
class Example:
    """One shown command: its shell text, the lines it should print, its exit status, its line in the page."""

    command: str
    expected: tuple[str, ...]
    status: int
    line: int


def console_examples(page: str) -> list[Example]:
    """The examples of ``page`` in order: all commands of its console blocks."""
    examples: list[Example] = []
    for block in _FENCE.finditer(page):
        info = block["info"].split()
        if info[:1] != ["console"]:
            continue
        stated = _EXIT.search(block["info"])
        first_line = page.count("\n", 0, block.start("body")) + 1
        shown = _split_block(block["body"].splitlines(), first_line)
        for index, (command, expected, line) in enumerate(shown):
            status = int(stated[1]) if stated and index == len(shown) - 1 else 0
            examples.append(Example(command, expected, status, line))
    return examples


def _split_block(lines: list[str], first_line: int) -> list[tuple[str, tuple[str, ...], int]]:
    """(command, printed lines, line in the page) for each prompt of a block."""
    shown: list[tuple[str, list[str], int]] = []
    is_continued = False
    for number, text in enumerate(lines, first_line):
        if is_continued:
            command, printed, line = shown.pop()
            shown.append((f"{command}\n{text}", printed, line))
        elif text.startswith(PROMPT):
            shown.append((text.removeprefix(PROMPT), [], number))
        elif shown:
            shown[-1][1].append(text)
        is_continued = (is_continued or text.startswith(PROMPT)) and text.endswith("\\")
    return [(command, tuple(printed), line) for command, printed, line in shown]


def matches(expected: tuple[str, ...] | list[str], printed: str) -> bool:
    """Whether ``printed`` is what ``expected`` shows; spaces at line ends and empty lines at both ends don't count."""
    pattern = "".join(
        r"(?:[^\n]*\n)*?" if line.strip() == "..." else _line_pattern(line) + r"\n" for line in _trimmed(list(expected))
    )
    text = "".join(f"{line}\n" for line in _trimmed(printed.splitlines()))
    return re.fullmatch(pattern, text) is not None


def _line_pattern(line: str) -> str:
    return r"[^\n]*".join(re.escape(part) for part in line.rstrip().split("..."))


def _trimmed(lines: list[str]) -> list[str]:
    return "\n".join(line.rstrip() for line in lines).strip("\n").split("\n") if any(map(str.strip, lines)) else []


def run_example(example: Example, folder: Path, programs: Path) -> str:
    """A report of how ``example``, run in ``folder``, differs from what the page shows; empty when it does not.

    ``programs`` is a folder of executables that go before all others.
    """
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }
    run = subprocess.run(
        ["bash", "-c", example.command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if run.returncode == example.status and matches(example.expected, run.stdout):
        return ""
    shown = "\n".join(example.expected)
    return (
        f"line {example.line}: $ {example.command}\n"
        f"--- shown (status {example.status})\n{shown}\n"
        f"--- printed (status {run.returncode})\n{run.stdout}"
    )


def install_program(folder: Path, name: str, module: str, repository: Path) -> None:
    """Puts an executable ``name`` into ``folder`` that runs ``python -m module`` of ``repository``."""
    program = folder / name
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{repository}" exec "{sys.executable}" -m {module} "$@"\n', "utf-8")
    program.chmod(0o755)
