"""Several processes execute one plan into one folder: same bytes, one commit, and none when one is lost."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from ckpt_tool.engine import team
from ckpt_tool.engine.base import RunReport
from ckpt_tool.engine.run import run_plan
from ckpt_tool.engine.run_share import units_of
from ckpt_tool.engine.team import Share
from ckpt_tool.errors import StorageError
from ckpt_tool.formats.base import LayOut
from ckpt_tool.geometry.box import Box
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.model import Plan
from ckpt_tool.storage.local.target import LocalTarget
from ckpt_tool.storage.memory import MemoryStore
from tests.engine.teams import MISFITS, OPTIONS, check_misfit, check_reports, lose, together
from tests.synthetic import Synthetic, layout_of, limits, make_source, make_target


def work(unit: int = 64) -> tuple[Synthetic, Plan, LayOut]:
    """Row blocks to column blocks, many small units."""
    arrays = {f"w{i}": np.arange(i, i + 240, dtype=np.float32).reshape(12, 20) for i in range(4)}
    source = make_source(arrays, {fqn: [Box((r, 0), (3, 20)) for r in range(0, 12, 3)] for fqn in arrays})
    target = make_target(source.manifest, {fqn: [Box((0, c), (12, 10)) for c in (0, 10)] for fqn in arrays}, n_files=3)
    plan = make_plan(source.manifest, target, limits=limits(unit=unit))
    return source, plan, layout_of(target, needs_crc32=True)


def run(
    folder: Path, share: Share | None, *, resume: bool = False, unit: int = 64, overwrite: bool = False
) -> RunReport:
    """One process's part."""
    source, plan, layout = work(unit)
    joins = share is not None and share.index > 0
    target = LocalTarget(str(folder), overwrite=overwrite, resume=resume, durable=True, single_file=False, joins=joins)
    *_, report = run_plan(plan, layout, MemoryStore(source.files), target, OPTIONS, share=share)
    assert isinstance(report, RunReport)
    return report


def content(folder: Path) -> dict[str, bytes]:
    """Every file's bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("count", [2, 4, 7])
def test_the_bytes_are_those_of_one(tmp_path: Path, count: int) -> None:
    """However many share the work, the folder is the same, and nothing of theirs is left in it."""
    run(tmp_path / "alone", None)
    parts = [partial(run, tmp_path / "shared", Share(i, count, "r")) for i in range(count)]
    reports = together(parts)
    check_reports(reports)
    assert content(tmp_path / "shared") == content(tmp_path / "alone")
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")] == []


def test_shares_are_even_and_leave_nothing_out() -> None:
    """Units go to one process each, in runs whose bytes differ by a unit at most."""
    _, plan, _ = work()
    parts = [units_of(plan, Share(index, 5), {}) for index in range(5)]
    assert list(chain.from_iterable(parts)) == list(range(plan.tiles.n_units))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("again", [1, 2, 3])
@pytest.mark.parametrize("who", [0, 2])
def test_a_lost_process_commits_nothing_and_resume_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: int, again: int
) -> None:
    """Whoever is lost, the others stop, and any number of processes goes on with what was done."""
    monkeypatch.setattr(team, "_START_TIMEOUT_S", 60.0)
    run(tmp_path / "alone", None)
    _, plan, _ = work()
    with monkeypatch.context() as patch:
        patch.setattr(team, "_START_TIMEOUT_S", 1.5)  # that others wait for one that is lost before they look
        lose(patch, units_of(plan, Share(who, 3), {})[-1])
        results = together([partial(run, tmp_path / "shared", Share(i, 3, "first")) for i in range(3)])
    assert isinstance(results[0], StorageError)
    assert not (tmp_path / "shared").exists()
    shares = [None] if again == 1 else [Share(i, again, "second") for i in range(again)]
    reports = together([partial(run, tmp_path / "shared", share, resume=True) for share in shares])
    check_reports(reports, has_resumed=bool(who))  # the first one's share was done, and maybe another's
    assert content(tmp_path / "shared") == content(tmp_path / "alone")


def test_what_an_earlier_run_left_invites_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a leader that is gone is not taken for one that waits."""
    monkeypatch.setattr(team, "_START_TIMEOUT_S", 0.3)
    with pytest.raises(StorageError, match="process 2 of 2 did not appear"):
        run(tmp_path / "shared", Share(0, 2))
    assert [path.name[:13] for path in (tmp_path / "shared.partial").iterdir()].count("CKPT_TOGETHER") == 1
    with pytest.raises(StorageError, match="process 1 of 2, which makes the files, did not appear"):
        run(tmp_path / "shared", Share(1, 2))
    monkeypatch.setattr(team, "_START_TIMEOUT_S", 20.0)
    results = together([partial(run, tmp_path / "shared", Share(i, 2), resume=True) for i in (1, 0)])
    check_reports(results)


@pytest.mark.parametrize(("share", "unit", "message"), MISFITS)
def test_who_does_not_fit_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: Share, unit: int, message: str
) -> None:
    """Processes that were started differently do not work on one folder."""
    monkeypatch.setattr(team, "_START_TIMEOUT_S", 60.0)
    results = together(
        [lambda: run(tmp_path / "shared", Share(0, 2)), lambda: run(tmp_path / "shared", share, unit=unit)]
    )
    check_misfit(results, message)
