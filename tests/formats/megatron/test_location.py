"""Which iteration is read, and what is said when none can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats.base import Reader, Source
from ckpt_tool.formats.detect import detect
from ckpt_tool.formats.megatron.dist_reader import READER as DIST
from ckpt_tool.formats.megatron.location import TRACKER
from ckpt_tool.formats.megatron.rank_reader import READER as RANKS
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.open import open_store
from tests.formats.conformance import source_of, stored_bytes
from tests.formats.megatron.build import legacy_files
from tests.formats.megatron.places import CHECKPOINTS
from tests.formats.megatron.run import Run

LEGACY = legacy_files(Run())


def dist_files() -> dict[str, bytes]:
    """One iteration of a ``torch_dist`` checkpoint."""
    return stored_bytes(CHECKPOINTS / "td_nodist_t2/ckpt/iter_0000010")


def below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """Files in a folder."""
    return {f"{folder}/{path}": data for path, data in files.items()}


@pytest.mark.parametrize(("reader", "files"), [(DIST, None), (RANKS, LEGACY)], ids=["dist", "legacy"])
def test_tracked_iteration_is_read_not_the_newest(reader: Reader, files: dict[str, bytes] | None) -> None:
    """With the tracker at 10 and a newer, unfinished 20, iteration 10 is read and both are mentioned (R68)."""
    one = files or dist_files()
    unfinished = {next(path for path in one if path.endswith((".distcp", ".pt"))).rpartition("/")[2]: b"half"}
    store = MemoryStore({TRACKER: b"10\n", **below("iter_0000010", one), **below("iter_0000020", unfinished)})
    manifest = reader.read(source_of(store))
    assert manifest.info["folder"] == "iter_0000010"
    assert manifest.notes[0] == (
        f"{TRACKER} names 10: iter_0000010 is read; newer than it: iter_0000020, of which iter_0000020 unfinished"
    )


@pytest.mark.parametrize(("reader", "files"), [(DIST, None), (RANKS, LEGACY)], ids=["dist", "legacy"])
def test_tracker_that_points_nowhere_lists_what_is_there(reader: Reader, files: dict[str, bytes] | None) -> None:
    """With the tracker at 30 and no such folder, complete iterations are listed (R68); the reader is still the one."""
    one = files or dist_files()
    source = source_of(MemoryStore({TRACKER: b"30", **below("iter_0000010", one), **below("iter_0000020", one)}))
    assert detect(source) is reader
    with pytest.raises(NotFound) as caught:
        reader.read(source)
    assert caught.value.message == (
        f"{TRACKER} names 30, but iter_0000030 is not there, or an empty folder; complete iterations: iter_0000010, "
        "iter_0000020"
    )
    assert caught.value.hint == 'name one of them: "memory:/iter_0000020"'


def test_newest_complete_iteration_without_a_tracker() -> None:
    """Without a tracker the newest complete iteration is read, and that it was chosen is said."""
    one = dist_files()
    half = {path: data for path, data in one.items() if path != "metadata.json"}
    files = {**below("iter_0000010", one), **below("iter_0000100", one), **below("iter_0000200", half)}
    manifest = DIST.read(source_of(MemoryStore(files)))
    assert manifest.info["folder"] == "iter_0000100"
    assert "the newest complete iteration, iter_0000100, is read" in manifest.notes[0]


def test_release_is_an_iteration() -> None:
    """A tracker may hold the word ``release``."""
    manifest = RANKS.read(source_of(MemoryStore({TRACKER: b"release", **below("release", LEGACY)})))
    assert manifest.info["folder"] == "release"


@pytest.mark.parametrize("text", [b"", b"ten", b"-1", b"1" * 100, b"\xff\xfe"])
def test_tracker_that_is_no_number_is_refused(text: bytes) -> None:
    """A tracker with anything else in it is damaged."""
    source = source_of(MemoryStore({TRACKER: text, **below("iter_0000010", LEGACY)}))
    with pytest.raises(FormatError, match="expected an iteration's number or 'release'"):
        RANKS.read(source)


def test_plain_dcp_below_a_tracker_is_pointed_at() -> None:
    """An ``fsdp_dtensor`` iteration has no ``metadata.json``: the hint says how to read it."""
    files = {path: data for path, data in dist_files().items() if path != "metadata.json"}
    source = source_of(MemoryStore({TRACKER: b"10", **below("iter_0000010", files)}))
    with pytest.raises(NotFound, match="iter_0000010 is not complete") as caught:
        DIST.read(source)
    assert caught.value.hint == 'saved as fsdp_dtensor or torch_dcp, it is plain DCP: "memory:/iter_0000010"'


@pytest.mark.parametrize("name", ["td_full_t2p2d2", "legacy_t2p2", "old012_zarr_t2p1d1"])
def test_formats_are_told_apart(name: str) -> None:
    """Each of the three is detected at its run's folder and at its iteration's."""
    files = stored_bytes(CHECKPOINTS / name / "ckpt")
    inner = {path.partition("/")[2]: data for path, data in files.items() if "/" in path}
    expected = {"td": "megatron-dist", "legacy": "megatron-legacy", "old012": "megatron-zarr"}[name.partition("_")[0]]
    assert [detect(source_of(MemoryStore(part))).name for part in (files, inner)] == [expected, expected]


def test_tracker_by_itself_is_explained(tmp_path: Path) -> None:
    """Whoever names the tracker file is told to name the folder."""
    (tmp_path / TRACKER).write_text("10")
    source = Source(*open_store(tmp_path / TRACKER))
    assert DIST.probe(source).why == f"{TRACKER} names the iteration to read of a run: name the run's folder instead"


@pytest.mark.parametrize("is_legacy", [False, True])
@pytest.mark.parametrize("is_run", [False, True])
def test_a_folder_with_the_state_of_another_iteration(tmp_path: Path, *, is_legacy: bool, is_run: bool) -> None:
    """A folder that was renamed, or another step's files: a warning of verify, and a note of all else."""
    files, saved_at = (LEGACY, 7) if is_legacy else (dist_files(), 10)
    for folder in (f"iter_{saved_at:07d}", "release", "iter_0000020"):
        root = tmp_path / folder
        for path, data in below(folder, files).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        (root / TRACKER).write_text(folder.removeprefix("iter_"))
        found = verify(root if is_run else root / folder).findings
        said = [finding.message for finding in found if finding.kind == "other-iteration"]
        expected = f"iter_0000020 holds the state of iteration {saved_at}: the folder was renamed, or files of another "
        assert [message.startswith(expected) for message in said] == [True] * (folder == "iter_0000020")
        with open_checkpoint(root if is_run else root / folder) as checkpoint:
            assert set(said) <= set(checkpoint.manifest.notes)
