"""Targets that would change their own source are refused, however they are spelt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt_tool.cli.app import main
from ckpt_tool.errors import UsageError
from ckpt_tool.storage.apart import check_apart
from tests.reports.made import put

HF = Path(__file__).parents[2] / "fixtures/torch/hf_sharded/ckpt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder ``run/step`` with a link to it beside ``run``."""
    (tmp_path / "run/step").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "run", target_is_directory=True)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("run/step", "source and target at once"),
        ("run/step/", "source and target at once"),
        ("link/step", "source and target at once"),
        ("run/step/out", "lies inside the source"),
        ("run/other/../step/a/b", "lies inside the source"),
        ("link/step/out.pt", "lies inside the source"),
        ("run", "holds the source"),
        ("link", "holds the source"),
        (".", "holds the source"),
    ],
)
def test_places_that_meet(run: Path, target: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through links, ``..`` and relative paths."""
    monkeypatch.chdir(run)
    for source in ("run/step", run / "link/step", f"file://{run}/run/step"):
        with pytest.raises(UsageError, match=said):
            check_apart(source, target)


@pytest.mark.parametrize("target", ["run/step-out", "run/other", "run/step.pt", "elsewhere", "memory://run/step/out"])
def test_places_apart(run: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that begins like the source's is no place inside it."""
    monkeypatch.chdir(run)
    check_apart("run/step", target)


@pytest.mark.parametrize(
    ("source", "target", "is_refused"),
    [
        ("s3://b/run/step", "s3://b/run/step/out", True),
        ("s3://b/run/step/", "s3a://b/run/step", True),
        ("s3://b/run/step", "s3://b/run", True),
        ("s3://b/run/step", "s3://b/run/step-out", False),
        ("s3://b/run/step", "gs://b/run/step", False),
    ],
)
def test_urls(source: str, target: str, is_refused: bool) -> None:
    """URLs are compared by their text."""
    if is_refused:
        with pytest.raises(UsageError):
            check_apart(source, target)
    else:
        check_apart(source, target)


@pytest.mark.parametrize(
    "words",
    [
        ["export", "S", "T", "--overwrite"],
        ["reshard", "S", "T", "--overwrite", "--default", "replicate"],
        ["edit", "S", "T", "--overwrite", "--drop", "*bias*"],
        ["verify", "S", "--salvage", "T", "--overwrite"],
    ],
)
@pytest.mark.parametrize("target", ["run/step/sub", "run", "run/step"])
def test_commands(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    target: str,
) -> None:
    """Every command that writes refuses with the status of a usage error, and nothing is changed."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HF, "run/step")
    put(tmp_path / "run", {"notes.txt": b"mine"})
    before = sorted(tmp_path.rglob("*"))
    status = main([{"S": "run/step", "T": target}.get(word, word) for word in words])
    talk = capsys.readouterr().err
    assert (status, sorted(tmp_path.rglob("*"))) == (2, before)
    assert talk.startswith(f"error: {target}: ")
    assert "hint: " in talk
