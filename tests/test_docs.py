"""The README tells the truth: it names every command, and what it shows is what one gets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from ckpt_tool.cli.commands import app
from tests.console import Example, console_examples, install_program, matches, run_example

REPOSITORY = Path(__file__).parent.parent
README = REPOSITORY / "README.md"


def command_helps(application: typer.Typer) -> dict[str, str]:
    """First help line of every command that ``--help`` lists, by name; a command of a group is ``group command``."""
    helps: dict[str, str] = {}
    groups: list[tuple[str, Any]] = [("", typer.main.get_command(application))]
    while groups:
        prefix, group = groups.pop()
        with group.make_context("ckpt", [], resilient_parsing=True) as context:
            names = group.list_commands(context) if hasattr(group, "list_commands") else []
            commands = [(name, group.get_command(context, name)) for name in names]
        for name, command in commands:
            if not command.hidden:
                helps[prefix + name] = (command.help or "").strip().partition("\n")[0]
                groups.append((f"{prefix}{name} ", command))
    return helps


def unnamed_commands(names: list[str], page: str) -> list[str]:
    """Those of ``names`` that ``page`` never writes as ``ckpt name``."""
    words = " ".join(page.replace("`", " ").split()) + " "
    return [name for name in names if f"ckpt {name} " not in words]


@pytest.fixture
def workplace(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with ``fixtures`` in it, and a folder of programs with ``ckpt`` in it."""
    folder, programs = tmp_path / "folder", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    (folder / "fixtures").symlink_to(REPOSITORY / "fixtures")
    install_program(programs, "ckpt", "ckpt_tool", REPOSITORY)
    return folder, programs


def test_every_command_has_help() -> None:
    """``ckpt --help`` has a line for every command."""
    helps = command_helps(app)
    assert helps != {}
    assert [name for name, text in helps.items() if not text] == []


def test_readme_python_runs(workplace: tuple[Path, Path]) -> None:
    """The Python blocks of the README run in a folder that contains ``fixtures``."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=workplace[0], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_readme_names_every_command() -> None:
    """Every command that is not hidden is in the README, as one types it."""
    assert unnamed_commands(list(command_helps(app)), README.read_text("utf-8")) == []


def test_readme_examples_run(workplace: tuple[Path, Path]) -> None:
    """Every ``$ ckpt`` line in a console block of the README prints what the block shows."""
    examples = console_examples(README.read_text("utf-8"), "ckpt")
    reports = [run_example(example, *workplace) for example in examples]
    assert "\n".join(filter(None, reports)) == ""


def test_readme_console_blocks_are_found() -> None:
    """Every prompt line with ``ckpt`` in the README belongs to an example that is run."""
    page = README.read_text("utf-8")
    prompts = [number for number, line in enumerate(page.splitlines(), 1) if line.lstrip().startswith("$ ckpt")]
    assert [example.line for example in console_examples(page, "ckpt")] == prompts


def test_command_helps_sees_all() -> None:
    """Groups are entered, hidden commands are left out, a missing help is seen."""
    application, group = typer.Typer(), typer.Typer()
    application.add_typer(group, name="cache", help="Caches.")

    @application.command()
    def silent() -> None: ...

    @application.command(hidden=True)
    def secret() -> None: ...

    @group.command()
    def clear() -> None:
        """Empties it."""

    assert command_helps(application) == {"silent": "", "cache": "Caches.", "cache clear": "Empties it."}


def test_unnamed_command_is_seen() -> None:
    """A command counts as named only as a whole word after ``ckpt``."""
    assert unnamed_commands(["ls", "diff", "cat"], "Use `ckpt ls`, or\nckpt diffs; cat.") == ["diff", "cat"]


PAGE = """
```sh
$ ckpt not-this
```

```console
$ ckpt inspect a \\
    --json
{
...
}
$ make test
$ ckpt ls
```

````console exit=3
$ ckpt inspect b
$ ckpt verify b
error: broken
````
"""


def test_console_examples_are_parsed() -> None:
    """Only console blocks and only the program's commands count; continuation, status and lines are kept."""
    assert console_examples(PAGE, "ckpt") == [
        Example("ckpt inspect a \\\n    --json", ("{", "...", "}"), 0, 7),
        Example("ckpt ls", (), 0, 13),
        Example("ckpt inspect b", (), 0, 17),
        Example("ckpt verify b", ("error: broken",), 3, 18),
    ]


@pytest.mark.parametrize(
    ("expected", "printed", "is_match"),
    [
        ([], "", True),
        ([], "\n\n", True),
        ([], "talk\n", False),
        (["a"], "a", True),
        (["a", ""], "a  \n", True),
        (["a"], "a\nb\n", False),
        (["a", "..."], "a\n", True),
        (["a", "...", "d"], "a\nb\nc\nd\n", True),
        (["a", "...", "d"], "a\nb\nc\n", False),
        (["..."], "", True),
        (["3 of ... bytes"], "3 of 1,024 bytes", True),
        (["3 of ... bytes"], "3 of\nbytes", False),
        (["a.c"], "abc", False),
        (["  indented"], "indented", False),
    ],
)
def test_matching(expected: list[str], printed: str, *, is_match: bool) -> None:
    """Wildcards stand for lines or for text within one; everything else is literal."""
    assert matches(expected, printed) == is_match


@pytest.mark.parametrize(
    ("example", "is_good"),
    [
        (Example("greet you", ("hello you",), 0, 1), True),
        (Example("greet you 1>&2", ("hello you",), 0, 1), True),
        (Example("greet me", ("hello you",), 0, 1), False),
        (Example("greet you; exit 3", ("hello you",), 0, 1), False),
        (Example("greet you; exit 3", ("hello you",), 3, 1), True),
        (Example("absent-program", ("...",), 0, 1), False),
    ],
)
def test_running(tmp_path: Path, example: Example, *, is_good: bool) -> None:
    """An example fails by what it prints, by its status, and by not being there."""
    program = tmp_path / "greet"
    program.write_text('#!/bin/sh\necho "hello $1"\n', "utf-8")
    program.chmod(0o755)
    assert (run_example(example, tmp_path, tmp_path) == "") == is_good
