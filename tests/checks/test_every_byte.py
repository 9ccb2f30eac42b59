"""A flipped bit anywhere in a zip of torch is found, also where no value changes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CkptError
from ckpt_tool.manifest.finding import Severity
from tests.reports.made import as_bytes

FIXTURES = Path(__file__).parents[2] / "fixtures"


def is_seen(place: Path, path: Path, at: int, bit: int) -> bool:
    """Whether a verification of every byte says so if this bit is flipped; a field that only looks odd is a warning."""
    raw = path.read_bytes()
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
    try:
        found = verify(place, level="full", n_workers=1).findings
        return any(f.severity is Severity.ERROR or f.kind == "container-odd" for f in found)
    except CkptError:
        return True
    finally:
        path.write_bytes(raw)


def contents(place: Path) -> tuple[object, object]:
    """Tensors and objects."""
    with open_checkpoint(place) as checkpoint:
        return as_bytes(place), checkpoint.objects()


@pytest.mark.parametrize(
    ("name", "file", "n"),
    [
        ("torch/dcp_no_flatten/ckpt", "__1_0.distcp", 40),  # the items of empty boxes are among them
        ("torch/verl_2d/ckpt", "model_world_size_4_rank_1.pt", 30),
        ("torch/pt_files/ckpt/repacked_deflate.pt", "", 40),
        ("torch/pt_files/ckpt/model_only_proto4.pt", "", 40),
    ],
)
def test_any_byte(tmp_path: Path, name: str, file: str, n: int) -> None:
    """Headers, descriptors, padding, pickles, payload, directories, compressed members; bytes by chance."""
    source = FIXTURES / name
    place = tmp_path / source.name
    if source.is_dir():
        shutil.copytree(source, place)
    else:
        shutil.copy(source, place)
    path = place / file if file else place
    rng = random.Random(name)
    size = path.stat().st_size
    places = sorted({*rng.sample(range(size), n), *range(0, 62, 7), *range(size - 60, size, 7)})
    assert [at for at in places if not is_seen(place, path, at, at % 8)] == []


def test_zstd_frames(tmp_path: Path) -> None:
    """Frames have no checksum of their own, what they hold has: a bit that changes anything of it is found."""
    place = Path(shutil.copytree(FIXTURES / "torch/dcp_zstd/ckpt", tmp_path / "c"))
    path = place / "__1_0.distcp"
    raw, before = path.read_bytes(), contents(place)
    unseen = [at for at in range(0, len(raw), 97) if not is_seen(place, path, at, at % 8)]
    for at in unseen:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        assert contents(place) == before, at
    assert len(unseen) < 5


def test_objects_of_rank_files(tmp_path: Path) -> None:
    """The file of objects is no JSON any more."""
    shutil.copytree(FIXTURES / "ckpt/rank_files_v1/ckpt", tmp_path / "c")
    assert is_seen(tmp_path / "c", tmp_path / "c/ckpt_objects.json", 0, 4)
    assert verify(tmp_path / "c", level="full").is_ok
