from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli.app import main


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on stdout."""
        return json.loads(self.out)

    @property
    def text(self) -> str:
        """Both streams, runs of blanks as one."""
        return " ".join(f"{self.out} {self.err}".split())


FIXTURES = Path(__file__).parents[2] / "fixtures"
Ckpt = Callable[..., Ran]


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ckpt:
    """Runs ``ckpt`` with the given arguments."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv: str | Path) -> Ran:
        capsys.readouterr()
        status = main([str(argument) for argument in argv])
        printed = capsys.readouterr()
        return Ran(status, printed.out, printed.err)

    return run
