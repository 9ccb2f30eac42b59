from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ckpt_tool.cli.app import main
from ckpt_tool.cli.commands import COMMANDS, app
from tests.test_docs import first_help_lines

REPOSITORY = Path(__file__).parents[2]
HEAVY = ("numpy", "pyarrow", "fsspec", "torch", "rich", "ml_dtypes", "safetensors")


@pytest.mark.parametrize("argv", [["--help"], ["--version"], [], *([name, "--help"] for name in COMMANDS)])
def test_help_loads_nothing_heavy(argv: list[str]) -> None:
    """Help and version come without numpy and whatever needs it."""
    script = (
        "import sys; from ckpt_tool.cli.app import main; main(sys.argv[1:]); "
        f"sys.stdout.write('loaded: ' + ' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, *argv], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.rpartition("\n")[2] == "loaded: "


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        ("inspect SRC", ["plan.build", "storage.virtual.tar", "formats._content", "formats.joint"]),
        ("verify SRC", ["checks.content", "checks.vocabulary", "api.manifest_file", "formats._content"]),
        ("reshard SRC DST --tp 2 --default shard0 --to rank-files", ["formats.undetected", "engine.digest_pass"]),
    ],
)
def test_what_few_calls_need_is_not_loaded(words: str, unneeded: list[str], tmp_path: Path) -> None:
    """A checkpoint that is known and sound is opened, checked and converted without what says otherwise."""
    source = REPOSITORY / "fixtures/torch/dcp_fsdp2_tp_2x2/ckpt"
    argv = words.replace("SRC", str(source)).replace("DST", str(tmp_path / "out")).split()
    names = [*(f"ckpt_tool.{name}" for name in unneeded), "pickletools", "tempfile", "_hashlib"]
    script = (
        "import sys; from ckpt_tool.cli.app import main; status = main(sys.argv[1:]); "
        f"print('loaded:', *(name for name in {names!r} if name in sys.modules)); sys.exit(status)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, *argv], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.splitlines()[-1] == "loaded:"


def test_commands() -> None:
    """The commands are these."""
    assert list(first_help_lines(app)) == list(COMMANDS)


def test_a_command_alone_is_imported() -> None:
    """Calling one command loads no module of another."""
    script = (
        "import sys; from ckpt_tool.cli.app import main; main(['cat', '--help']); "
        "from ckpt_tool.cli.commands import COMMANDS; "
        "sys.stdout.write('loaded: ' + ' '.join(n for n in COMMANDS if 'ckpt_tool.cli.' + n in sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.rpartition("\n")[2] == "loaded: cat"


def test_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is answered with help, a misspelled command with the one that was meant."""
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("Usage: ckpt [OPTIONS] COMMAND")
    assert main(["inpsect", "x"]) == 2
    assert capsys.readouterr().err == "error: no such command 'inpsect'\nhint: did you mean ckpt inspect\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command explains itself, its JSON document and each of its options."""
    assert main([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--json" in printed
    assert "--quiet" in printed
    assert "With --json:" in printed
    assert "\n  Examples:\n    ckpt " in printed
    first_line = printed.split("\n\n")[1].strip()
    assert "..." not in first_line


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_what_the_command_takes(name: str) -> None:
    """Each example is a call that the parser accepts, and fits a line of help."""
    group: Any = typer.main.get_command(app)
    with group.make_context("ckpt", [], resilient_parsing=True) as context:
        command = group.get_command(context, name)
    for example in importlib.import_module(f"ckpt_tool.cli.{name}").EXAMPLES:
        program, called, *words = shlex.split(example)
        assert (program, called, len(example) <= 76) == ("ckpt", name, True)
        command.make_context(name, words)


def test_short_helps_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """The list of commands cuts none of their sentences."""
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.endswith("...")] == [
        "Usage: ckpt [OPTIONS] COMMAND [ARGS]..."
    ]


@pytest.mark.parametrize(
    ("words", "expected"), [("ckpt ins", ["inspect"]), ("ckpt reshard --dp-mode ", ["shard", "replicate"])]
)
def test_shell_completion(words: str, expected: list[str]) -> None:
    """A shell is told the commands, and the values of options that are one of several words."""
    completion = {"_CKPT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    run = subprocess.run(
        [sys.executable, "-m", "ckpt_tool"],
        cwd=REPOSITORY,
        env={**os.environ, **completion},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.split() == expected
