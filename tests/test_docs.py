"""The pages tell the truth: the README names every command, and what a page shows is what one gets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from ckpt_tool import errors
from ckpt_tool.cli.commands import app
from ckpt_tool.cli.failures import failure
from tests.console import Example, console_examples, install_program, matches, run_example

REPOSITORY = Path(__file__).parent.parent
README = REPOSITORY / "README.md"
PAGES = sorted([README, *(REPOSITORY / "docs").glob("*.md")])
JOB_SCRIPTS = REPOSITORY / "docs/job-scripts.md"
SCHEMA = re.compile(r"ckpt-tool/[a-z]+/\d+")


def all_commands(application: typer.Typer) -> dict[str, Any]:
    """Every command that ``--help`` lists, by name; a command of a group is ``group command``."""
    found: dict[str, Any] = {}
    groups: list[tuple[str, Any]] = [("", typer.main.get_command(application))]
    while groups:
        prefix, group = groups.pop()
        with group.make_context("ckpt", [], resilient_parsing=True) as context:
            names = group.list_commands(context) if hasattr(group, "list_commands") else []
            commands = [(name, group.get_command(context, name)) for name in names]
        for name, command in commands:
            if not command.hidden:
                found[prefix + name] = command
                groups.append((f"{prefix}{name} ", command))
    return found


def first_help_lines(application: typer.Typer) -> dict[str, str]:
    """First help line of every command, by name."""
    return {name: (each.help or "").strip().partition("\n")[0] for name, each in all_commands(application).items()}


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
    helps = first_help_lines(app)
    assert helps != {}
    assert [name for name, text in helps.items() if not text] == []


def test_readme_python_runs(workplace: tuple[Path, Path]) -> None:
    """The Python blocks of the README run in a folder that contains ``fixtures``; ``tests/job`` runs those for jobs."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=workplace[0], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_readme_names_every_command() -> None:
    """Every command that is not hidden is in the README, as one types it."""
    assert unnamed_commands(list(first_help_lines(app)), README.read_text("utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, workplace: tuple[Path, Path]) -> None:
    """Every command in a console block of a page prints what the block shows."""
    reports = [run_example(example, *workplace) for example in console_examples(page.read_text("utf-8"))]
    assert "\n".join(filter(None, reports)) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_prompts_are_found(page: Path) -> None:
    """Every line of a page that begins with a prompt belongs to an example that is run."""
    text = page.read_text("utf-8")
    prompts = [number for number, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("$ ")]
    assert [example.line for example in console_examples(text)] == prompts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """What a page links to within the repository is there."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_exist(page: Path) -> None:
    """Every option that a page writes beside ``ckpt``, or alone in backquotes, is one of some command's."""
    parameters = [each for command in all_commands(app).values() for each in command.params]
    known = {name for each in parameters for name in [*each.opts, *each.secondary_opts]}
    text = page.read_text("utf-8")
    parts = re.findall(r"^(?:\$ )?ckpt .*|`ckpt [^`]*`|`--[^`]*`", text, re.MULTILINE)
    named = {option for part in parts for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", part)}
    assert sorted(named - known - {"--help", "--install-completion"}) == []


def test_schemas_are_listed() -> None:
    """The page for scripts lists each schema that the help of a command names, and no other."""
    helps = "".join("".join(each.help.split()) for each in all_commands(app).values())
    others = {"ckpt-tool/error/1", "ckpt-tool/digests/1"}
    assert set(SCHEMA.findall(JOB_SCRIPTS.read_text("utf-8"))) == {*SCHEMA.findall(helps), *others}


def test_named_modules_are_there() -> None:
    """Every module, folder or file that ARCHITECTURE.md names by its path is in the repository."""
    named = set(
        re.findall(r"`([\w*]+(?:/[\w*]+)+(?:\.\w+)?)(?:::\w+)?`", (REPOSITORY / "ARCHITECTURE.md").read_text("utf-8"))
    )
    places = [("", ""), ("ckpt_tool/", ""), ("ckpt_tool/", ".py")]
    absent = [
        name for name in named if not any([*REPOSITORY.glob(f"{before}{name}{behind}")] for before, behind in places)
    ]
    assert len(named) > 10
    assert absent == []


def test_kinds_of_errors_are_listed() -> None:
    """The page for scripts lists each kind of error with its exit status, and no other."""
    kinds = [getattr(errors, name) for name in errors.__all__ if name != "CkptError"]
    told = [failure(kind("wrong"))["error"] for kind in kinds]
    rows = re.findall(r"^\| (`[^|]*) \| (\d) \|", JOB_SCRIPTS.read_text("utf-8"), re.MULTILINE)
    listed = {(kind, int(status)) for names, status in rows for kind in re.findall(r"`([a-z-]+)`", names)}
    assert listed == {(error["kind"], error["exit_code"]) for error in told}


def test_all_commands_are_seen() -> None:
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

    assert first_help_lines(application) == {"silent": "", "cache": "Caches.", "cache clear": "Empties it."}


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
$ cp a b
$ ckpt ls
```

````console exit=3
$ ckpt inspect b
$ ckpt verify b
error: broken
````
"""


def test_console_examples_are_parsed() -> None:
    """Only console blocks count; continuation, status and lines are kept."""
    assert console_examples(PAGE) == [
        Example("ckpt inspect a \\\n    --json", ("{", "...", "}"), 0, 7),
        Example("cp a b", (), 0, 12),
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
