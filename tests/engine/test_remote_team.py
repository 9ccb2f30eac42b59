"""Several processes send one plan's files to S3: same bytes, one commit, and none when one is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ckpt_tool.engine import remote_team
from ckpt_tool.engine.around import files_of, owners_of
from ckpt_tool.engine.base import RunReport
from ckpt_tool.engine.run import run_plan
from ckpt_tool.engine.run_share import units_of_files
from ckpt_tool.engine.team import Share
from ckpt_tool.errors import StorageError, UsageError
from ckpt_tool.formats.base import LayOut
from ckpt_tool.geometry.box import Box
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.model import Plan
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.parts.place import PartLimits
from ckpt_tool.storage.remote import retry
from ckpt_tool.storage.s3 import place
from ckpt_tool.storage.target import open_target
from tests.engine.teams import MISFITS, OPTIONS, check_misfit, check_reports, lose, together
from tests.storage.s3_server import BUCKET, Bucket, s3_environment, s3_server
from tests.synthetic import Synthetic, layout_of, limits, make_source, make_target

PART = 500


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A server that takes small parts, and processes that look often."""
    monkeypatch.setattr(place, "PART_LIMITS", PartLimits(PART, PART, 100))
    monkeypatch.setattr(remote_team, "_POLL_S", 0.01)
    monkeypatch.setattr(remote_team, "_BEAT_S", 0.02)
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    with s3_server() as (endpoint, bucket):
        bucket.min_part_bytes = PART
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        yield bucket


def work(count: int = 1, unit: int = 64) -> tuple[Synthetic, Plan, LayOut]:
    """Row blocks to column blocks in five files, many small units; one tensor is in two files as a whole."""
    arrays = {f"w{i}": np.arange(i, i + 240, dtype=np.float32).reshape(12, 20) for i in range(6)}
    source = make_source(arrays, {fqn: [Box((r, 0), (3, 20)) for r in range(0, 12, 3)] for fqn in arrays})
    boxes = {fqn: [Box((0, c), (12, 4)) for c in range(0, 20, 4)] for fqn in arrays}
    boxes["w3"] = [Box((0, 0), (12, 20))] * 2
    target = make_target(source.manifest, boxes, n_files=5)
    layout = layout_of(target, needs_crc32=True)
    owners = owners_of(layout, count) if count > 1 else None
    plan = make_plan(source.manifest, target, limits=replace(limits(unit=unit), in_file_order=True), owners=owners)
    return source, plan, layout


def run(name: str, share: Share | None, *, resume: bool = False, unit: int = 64, count: int | None = None) -> RunReport:
    """One process's part."""
    source, plan, layout = work(count or (share.count if share else 1), unit)
    target = open_target(
        f"s3://{BUCKET}/{name}", overwrite=False, resume=resume, durable=True, single_file=False, memory_bytes=1 << 20,
        joins=share is not None and share.index > 0,
    )  # fmt: skip
    *_, report = run_plan(plan, layout, MemoryStore(source.files), target, OPTIONS, share=share)
    assert isinstance(report, RunReport)
    return report


def content(bucket: Bucket, name: str) -> dict[str, bytes]:
    """Every object's bytes."""
    return {key.partition("/")[2]: data for key, data in bucket.objects.items() if key.startswith(f"{name}/")}


@pytest.mark.parametrize(("count", "part"), [(2, PART), (3, 100 * PART), (7, PART)])
def test_the_bytes_are_those_of_one(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, count: int, part: int) -> None:
    """However many share the work, in parts or whole files, the objects are the same, and nothing else is left."""
    monkeypatch.setattr(place, "PART_LIMITS", PartLimits(part, part, 100))
    run("alone", None)
    reports = together([partial(run, "shared", Share(i, count, "r")) for i in range(count)])
    check_reports(reports)
    assert content(bucket, "shared") == content(bucket, "alone")
    assert bucket.uploads == {}


def test_each_file_is_one_process_s_and_no_unit_is_of_two() -> None:
    """Files and units go to one process each, and none is left out; nobody has more than a file too much."""
    _, plan, layout = work(3)
    shares = [files_of(layout, Share(index, 3)) or frozenset() for index in range(3)]
    assert sorted(path for own in shares for path in own) == sorted(layout.manifest.files.paths)
    assert all(shares)
    units = [units_of_files(plan, own, {}) for own in shares]
    assert sorted(unit for part in units for unit in part) == list(range(plan.tiles.n_units))
    paths = np.array(plan.target.files.paths)
    for own, part in zip(shares, units, strict=True):
        unit_of_write = np.searchsorted(plan.tiles.unit_bounds, plan.writes.tile, side="right") - 1
        assert set(paths[plan.writes.file[np.isin(unit_of_write, part)]]) <= own


@pytest.mark.parametrize(
    ("who", "dies", "part"), [(0, "silently", PART), (2, "with a word", 100 * PART), (2, "silently", PART)]
)
def test_a_lost_process_commits_nothing_and_resume_ends_the_same(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, who: int, dies: str, part: int
) -> None:
    """Whoever is lost, the others stop, and as many processes go on with what was sent."""
    monkeypatch.setattr(place, "PART_LIMITS", PartLimits(part, part, 100))
    monkeypatch.setattr(remote_team, "_START_TIMEOUT_S", 60.0)
    run("alone", None)
    _, plan, layout = work(3)
    with monkeypatch.context() as patch:
        patch.setattr(remote_team, "_START_TIMEOUT_S", 1.5)  # that others wait for one that is lost before they look
        lose(patch, units_of_files(plan, files_of(layout, Share(who, 3)) or (), {})[-1])
        if dies == "silently":
            patch.setattr(remote_team, "_SILENCE_S", 0.3)
            end = remote_team._Pulse.end
            patch.setattr(
                remote_team._Pulse,
                "end",
                lambda self, state, **more: end(self, None if state == "ended" else state, **more),
            )
        results = together([partial(run, "shared", Share(i, 3, "first")) for i in range(3)])
    assert isinstance(results[0], StorageError)
    left = content(bucket, "shared")
    assert "CKPT_UNFINISHED" in left
    assert part > PART or left.keys().isdisjoint(layout.manifest.files.paths)
    reports = together([partial(run, "shared", Share(i, 3, "second"), resume=True) for i in range(3)])
    check_reports(reports, has_resumed=bool(who))  # the first one's share was done, and maybe another's
    assert content(bucket, "shared") == content(bucket, "alone")
    assert bucket.uploads == {}


def test_what_an_earlier_run_left_invites_nobody(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note of a leader that is gone is not taken for one that waits."""
    monkeypatch.setattr(remote_team, "_START_TIMEOUT_S", 0.3)
    with pytest.raises(StorageError, match="process 2 of 2 did not appear"):
        run("shared", Share(0, 2))
    assert "CKPT_JOURNAL/together" in content(bucket, "shared")
    with pytest.raises(StorageError, match="process 1 of 2, which commits, did not appear"):
        run("shared", Share(1, 2))
    monkeypatch.setattr(remote_team, "_START_TIMEOUT_S", 20.0)
    results = together([partial(run, "shared", Share(i, 2), resume=True) for i in (1, 0)])
    check_reports(results)


@pytest.mark.parametrize(("share", "unit", "message"), MISFITS)
def test_who_does_not_fit_is_told(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, share: Share, unit: int, message: str
) -> None:
    """Processes that were started differently do not work on one target."""
    monkeypatch.setattr(remote_team, "_START_TIMEOUT_S", 60.0)
    results = together([partial(run, "shared", Share(0, 2)), partial(run, "shared", share, unit=unit)])
    check_misfit(results, message)
    assert content(bucket, "shared").keys() <= {path for path in content(bucket, "shared") if path.startswith("CKPT_")}


def test_another_number_of_processes_does_not_go_on(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes which file follows from their number, so that what was sent fits that number alone."""
    monkeypatch.setattr(remote_team, "_START_TIMEOUT_S", 0.3)
    with pytest.raises(StorageError, match="did not appear"):
        run("shared", Share(0, 2))
    with pytest.raises(UsageError, match="begun from another source or with other options"):
        run("shared", None, resume=True)
    assert bucket.count("POST", "uploads") > 0
