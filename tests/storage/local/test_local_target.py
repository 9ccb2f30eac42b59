"""A folder appears whole, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from ckpt_tool.errors import FormatError, StorageError, TargetExists, UsageError
from ckpt_tool.storage.local import locked_file, renaming
from ckpt_tool.storage.local.target import LocalTarget
from ckpt_tool.storage.side_file import unwritable
from ckpt_tool.storage.target import open_target
from ckpt_tool.storage.unfinished import JOURNAL_NAME, MARKER_NAME

OPTIONS: dict[str, Any] = {"overwrite": False, "resume": False, "durable": True, "single_file": False}
ROOT = Path(__file__).parents[3]


def start(path: Path, **options: bool) -> LocalTarget:
    """A target with all options off but those named, and fsync on."""
    return LocalTarget(str(path), **{**OPTIONS, **options})


def tree(root: Path) -> dict[str, bytes]:
    """All files below ``root``."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_nothing_has_the_final_name_before_commit(tmp_path: Path) -> None:
    """Until commit the files are in a partial folder that says what it is; after it only they are there."""
    target = start(tmp_path / "out")
    target.create("a.bin", 10)
    target.create("sub/b.bin", 4, is_last=True)
    target.write("a.bin", 6, b"6789")
    target.write("a.bin", 0, b"012345")
    target.write("sub/b.bin", 0, memoryview(b"abcd"))
    Path(target.journal_path).write_text("so far")
    assert sorted(os.listdir(tmp_path)) == ["out.partial"]
    assert "not a checkpoint" in (tmp_path / "out.partial" / MARKER_NAME).read_text()
    target.commit("sub/b.bin")
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert tree(tmp_path / "out") == {"a.bin": b"0123456789", "sub/b.bin": b"abcd"}


@pytest.mark.parametrize("swap", ["exchange", "rename"])
@pytest.mark.parametrize("old", ["fresh", "overwrite"])
def test_killed_anywhere(tmp_path: Path, old: str, swap: str) -> None:
    """Killed before any system call: the final name is whole, old or new, or nothing; going on ends with the new."""
    command = [sys.executable, str(Path(__file__).parent / "crash.py"), str(tmp_path / "x/out"), old, swap]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd=ROOT)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    *killed, survived = outcomes
    assert survived["left"] == {"": "new", ".partial": "none", ".replaced": "none"}
    assert len(killed) >= 30
    for outcome in killed:
        left, went_on = outcome["left"], outcome["went_on"]
        if left[""] == "new":
            continue
        if left[""] == "none" and old == "overwrite":
            # Two renames instead of one exchange: the old one waits beside.
            assert (swap, left[".replaced"], left[".partial"]) == ("rename", "old", "new")
            assert went_on == "an interrupted run has moved the former target there"
            continue
        assert left[""] == ("old" if old == "overwrite" else "none")
        if left[".partial"] == "new":  # without marker and journal: killed between the last two steps
            assert went_on.startswith(f"has no {MARKER_NAME} file in it")
        else:
            assert went_on == "new"
            assert outcome["after"] == ["out"]
    assert sum(o["went_on"] == "new" for o in killed) >= 25


def test_existing_target(tmp_path: Path) -> None:
    """Without being told so, nothing that is there is touched; an empty folder is nothing."""
    (tmp_path / "out").mkdir()
    target = start(tmp_path / "out")
    target.create("a", 1)
    target.commit(None)
    assert tree(tmp_path / "out") == {"a": b"\0"}
    with pytest.raises(TargetExists, match="out: is there already") as caught:
        start(tmp_path / "out")
    assert "--overwrite" in (caught.value.hint or "")
    with pytest.raises(TargetExists, match="is there already"):
        start(tmp_path / "out", resume=True)
    assert sorted(os.listdir(tmp_path)) == ["out"]


@pytest.mark.parametrize("has_exchange", [True, False])
def test_overwrite_keeps_the_old_until_the_new_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_exchange: bool
) -> None:
    """The old one can be read until commit, and is gone after it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").write_bytes(b"old")
    if not has_exchange:
        monkeypatch.setattr(renaming, "exchange", lambda _first, _second: False)
    target = start(tmp_path / "out", overwrite=True)
    target.create("new", 3)
    target.write("new", 0, b"new")
    target.flush()
    assert tree(tmp_path / "out") == {"old": b"old"}
    target.commit(None)
    assert tree(tmp_path / "out") == {"new": b"new"}
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_overwritten_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    """``latest -> step_5`` is replaced as a link; step_5 stays."""
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5/x").write_bytes(b"5")
    (tmp_path / "latest").symlink_to("step_5")
    target = start(tmp_path / "latest", overwrite=True)
    target.create("y", 1)
    target.commit(None)
    assert tree(tmp_path / "step_5") == {"x": b"5"}
    assert tree(tmp_path / "latest") == {"y": b"\0"}
    assert not (tmp_path / "latest").is_symlink()


def test_interrupted_target(tmp_path: Path) -> None:
    """A partial folder is neither taken nor deleted without being told; resume keeps its files, overwrite does not."""
    first = start(tmp_path / "out")
    first.create("a", 4)
    first.write("a", 0, b"abcd")
    first.abandon()
    with pytest.raises(TargetExists, match=r"out\.partial: an earlier run was interrupted here") as caught:
        start(tmp_path / "out")
    assert caught.value.hint == 'continue it with "--resume", or start anew with "--overwrite"'
    second = start(tmp_path / "out", resume=True)
    assert second.is_resumed
    second.create("a", 4)
    second.write("a", 2, b"xy")
    second.abandon()
    assert (tmp_path / "out.partial/a").read_bytes() == b"abxy"
    third = start(tmp_path / "out", overwrite=True)
    assert not third.is_resumed
    assert tree(tmp_path / "out.partial").keys() == {MARKER_NAME}
    third.create("b", 1)
    third.commit(None)
    assert tree(tmp_path / "out") == {"b": b"\0"}


def test_resume_without_anything_to_resume(tmp_path: Path) -> None:
    """Resume is also right for the first run."""
    target = start(tmp_path / "out", resume=True)
    assert not target.is_resumed
    target.abandon(discard=True)
    assert os.listdir(tmp_path) == []


def test_foreign_partial_folder(tmp_path: Path) -> None:
    """A folder of that name that is not ours is not deleted, whatever is asked."""
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.tex").write_bytes(b"years")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(TargetExists, match=f"has no {MARKER_NAME} file"):
            start(tmp_path / "out", **options)
    assert tree(tmp_path) == {"out.partial/thesis.tex": b"years"}


def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one writes, another neither resumes nor overwrites; once the first is gone, it may."""
    monkeypatch.setattr(locked_file, "_FOLLOWS_WITHIN_S", 0.0)
    first = start(tmp_path / "out")
    for options in ({"overwrite": True}, {"resume": True}):
        with pytest.raises(TargetExists, match="another process is writing here now"):
            start(tmp_path / "out", **options)
    first.abandon()
    start(tmp_path / "out", resume=True).abandon(discard=True)


def test_copies_of_a_killed_process(tmp_path: Path) -> None:
    """A run that goes on at once does not take them, which are about to end, for a process that writes."""
    killed = start(tmp_path / "out")
    dying = Timer(0.1, killed.abandon)
    dying.start()
    start(tmp_path / "out", resume=True).abandon(discard=True)
    dying.join()


def test_target_that_appeared_meanwhile(tmp_path: Path) -> None:
    """What took the final name during the run is not replaced; the work is kept."""
    target = start(tmp_path / "out")
    target.create("a", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/theirs").write_bytes(b"1")
    with pytest.raises(TargetExists, match="is there already"):
        target.commit(None)
    assert tree(tmp_path / "out") == {"theirs": b"1"}
    assert (tmp_path / "out.partial/a").exists()


def test_own_folders_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder, the home folder, what holds them, and mount points are no targets of --overwrite."""
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b")
    for path in (tmp_path / "a", tmp_path, Path("/proc")):
        with pytest.raises(UsageError, match="is not replaced"):
            start(path, overwrite=True)
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", str(tmp_path / "a/b"))
    with pytest.raises(UsageError, match="is not replaced"):
        start(tmp_path / "a", overwrite=True)


def test_single_file(tmp_path: Path) -> None:
    """One file is renamed to the final name, whatever it was called before, and nothing else stays."""
    for overwrite, data in ((False, b"one"), (True, b"two")):
        target = start(tmp_path / "model.safetensors", single_file=True, overwrite=overwrite)
        target.create("m.safetensors", 3)
        target.write("m.safetensors", 0, data)
        with pytest.raises(UsageError, match="expected one file"):
            target.create("other", 1)
        assert (tmp_path / "model.safetensors").exists() == overwrite
        target.commit(None)
        assert tree(tmp_path) == {"model.safetensors": data}
    with pytest.raises(TargetExists, match="is there already"):
        start(tmp_path / "model.safetensors", single_file=True)


def test_file_for_folder(tmp_path: Path) -> None:
    """A file is not replaced by a folder, nor a folder by a file, not even with --overwrite."""
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TargetExists, match="is a file, expected to write a folder"):
        start(tmp_path / "file", overwrite=True)
    with pytest.raises(TargetExists, match="is a folder, expected to write a file"):
        start(tmp_path / "folder", overwrite=True, single_file=True)


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "..\\x", "C:\\x", ""])
def test_hostile_path(tmp_path: Path, path: str) -> None:
    """A target writes nothing outside its folder."""
    target = start(tmp_path / "out")
    with pytest.raises(FormatError):
        target.create(path, 1)
    assert sorted(os.listdir(tmp_path)) == ["out.partial"]


def test_link_in_the_partial_folder(tmp_path: Path) -> None:
    """A link left in a resumed folder is not written through."""
    start(tmp_path / "out").abandon()
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "out.partial/a").symlink_to("../mine")
    target = start(tmp_path / "out", resume=True)
    with pytest.raises(StorageError, match="'a' cannot be created"):
        target.create("a", 1)
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_commit_without_the_last_file(tmp_path: Path) -> None:
    """The file that makes it a checkpoint must have been created."""
    target = start(tmp_path / "out")
    target.create("a", 1)
    with pytest.raises(StorageError, match=r"'\.metadata', was never written"):
        target.commit(".metadata")
    assert sorted(os.listdir(tmp_path)) == ["out.partial"]


def test_open_target(tmp_path: Path) -> None:
    """Paths and file URLs are local; parents are made; the journal lies in the partial folder."""
    target = open_target((tmp_path / "new/deep/out").as_uri(), **OPTIONS)
    assert isinstance(target, LocalTarget)
    assert target.journal_path == str(tmp_path / "new/deep/out.partial" / JOURNAL_NAME)
    assert not target.is_sequential
    target.abandon(discard=True)
    assert os.listdir(tmp_path / "new/deep") == []


def test_a_home_that_no_shell_has_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` is refused, where it would become a folder of that name; a folder that is called so is one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    options = {"overwrite": False, "resume": False, "durable": False, "single_file": False}
    with pytest.raises(UsageError, match="only shells know ~") as caught:
        open_target("~/run", **options)
    assert caught.value.hint == "write /home/somebody/run, or ./~/run for a folder"
    assert list(tmp_path.iterdir()) == []
    for name in ("./~/run", "~run", "a~b"):
        open_target(name, **options).abandon(discard=True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("~/a.json", "only shells know ~: /home/somebody/a.json"),
        ("no folder/a.json", "make its folder: mkdir -p 'no folder'"),
        ("there", "give the name of a file in it"),
        ("there/file/a.json", None),
    ],
)
def test_a_small_file_that_cannot_be_written(
    name: str, hint: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its folder is the reason, the hint says what to do about it."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    with pytest.raises(OSError, match=name) as caught:
        Path(name).write_bytes(b"")
    error = unwritable(caught.value, name)
    assert (error.where, error.hint) == (name, hint)
    assert error.message.startswith("cannot be written: ")
