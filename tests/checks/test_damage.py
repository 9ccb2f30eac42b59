"""Damaged copies of real checkpoints: each damage gives the findings that say what happened, and no others."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import FormatError
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DCP, VERL, BIN = "torch/dcp_fsdp2_4r_fp32", "torch/verl_2d", "torch/hf_pytorch_bin"
SHARDED, DCP_HF, RANKS = "torch/hf_sharded", "torch/hf_dcp_sharded", "ckpt/rank_files_v1"
PAYLOAD_SUFFIXES = {".distcp", ".safetensors", ".pt", ".bin"}


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a copy to be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(FIXTURES / name / "ckpt", tmp_path / "ckpt"))

    return copy


def payload_files(folder: Path) -> list[Path]:
    """Files that hold tensors, sorted."""
    return sorted(path for path in folder.iterdir() if path.suffix in PAYLOAD_SUFFIXES)


def errors(folder: Path, level: str = "full") -> list[Finding]:
    """What is worse than a warning."""
    return [finding for finding in verify(folder, level=level).findings if finding.severity is Severity.ERROR]


def kinds(folder: Path, level: str = "full") -> set[str]:
    """Kinds of what is worse than a warning."""
    return {finding.kind for finding in errors(folder, level)}


def place_of(folder: Path, fqn: str) -> FileRange:
    """Bytes of the first chunk of a tensor."""
    with open_checkpoint(folder) as checkpoint:
        manifest = checkpoint.resolve([fqn])
        row = int(manifest.chunks.rows_of(manifest.tensor_id(fqn))[0])
        return manifest.chunks.record(row, manifest.tensors, manifest.files).where


@pytest.mark.parametrize(
    ("name", "fqn"),
    [
        (DCP, "model.model.layers.0.mlp.down_proj.weight"),
        (DCP, "optim.state.model.layers.1.mlp.up_proj.weight.exp_avg"),
        (VERL, "0.weight"),
        (BIN, "model.embed_tokens.weight"),
    ],
)
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_flipped_bit_in_a_payload(copied: Callable[[str], Path], name: str, fqn: str, at: float) -> None:
    """The lowest bit of the first, a middle or the last byte: one crc-mismatch that names tensor, file and bytes."""
    folder = copied(name)
    where = place_of(folder, fqn)
    path = folder / where.path
    data = bytearray(path.read_bytes())
    data[where.offset + int((where.length - 1) * at)] ^= 1
    path.write_bytes(data)
    assert kinds(folder, "default") == set()
    [found] = errors(folder)
    assert (found.kind, found.fqn, found.where) == ("crc-mismatch", fqn, where)


def test_deleted_file_of_a_dcp_checkpoint(copied: Callable[[str], Path]) -> None:
    """A partial copy: exactly the missing files, and the tensors that lost elements, at every level."""
    folder = copied(DCP)
    with open_checkpoint(folder) as checkpoint:
        chunks, paths = checkpoint.manifest.chunks, checkpoint.manifest.files.paths
        lost = {
            checkpoint.manifest.tensors.fqns[tensor]
            for tensor, file in zip(chunks.tensor.tolist(), chunks.file.tolist(), strict=True)
            if paths[file] in {"__0_0.distcp", "__2_0.distcp"}
        }
    (folder / "__0_0.distcp").unlink()
    (folder / "__2_0.distcp").unlink()
    for level in ("quick", "default", "full"):
        found = errors(folder, level)
        missing = [f.where.path for f in found if f.kind == "missing-file" and f.where is not None]
        assert missing == ["__0_0.distcp", "__2_0.distcp"]
        assert {f.fqn for f in found if f.kind == "lost-data"} == lost
        assert {f.kind for f in found} == {"missing-file", "lost-data"}


@pytest.mark.parametrize("name", [SHARDED, BIN])
def test_deleted_file_of_an_indexed_checkpoint(copied: Callable[[str], Path], name: str) -> None:
    """The index still names it."""
    folder = copied(name)
    gone = payload_files(folder)[1]
    gone.unlink()
    [found] = errors(folder)
    assert found.kind == "missing-file"
    assert found.message.startswith(gone.name)


@pytest.mark.parametrize(("name", "expected"), [(VERL, {"gap", "missing-file"}), (DCP_HF, {"gap"})])
def test_deleted_file_that_nothing_names(copied: Callable[[str], Path], name: str, expected: set[str]) -> None:
    """Its boxes are missing from the tensors, in global coordinates."""
    folder = copied(name)
    payload_files(folder)[0].unlink()
    found = errors(folder)
    assert {f.kind for f in found} == expected
    assert any("no chunk holds [0:25" in f.message for f in found)


@pytest.mark.parametrize("n_missing", [1, 1000])
def test_truncated_file_of_a_dcp_checkpoint(copied: Callable[[str], Path], n_missing: int) -> None:
    """Both sizes and the difference, and the tensors that are cut."""
    folder = copied(DCP)
    path = folder / "__3_0.distcp"
    nbytes = path.stat().st_size
    os.truncate(path, nbytes - n_missing)
    for level in ("quick", "full"):
        found = errors(folder, level)
        assert {f.kind for f in found} == {"truncated-file", "lost-data"}
        [cut] = [f for f in found if f.kind == "truncated-file"]
        assert cut.where == FileRange("__3_0.distcp", nbytes - n_missing, n_missing)
        assert f"expected at least {nbytes:,} ({n_missing:,} missing)" in cut.message


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("name", [SHARDED, BIN, VERL, DCP_HF, RANKS])
def test_truncated_file_among_others(copied: Callable[[str], Path], name: str, keep: float) -> None:
    """A file that cannot be opened is one finding; the other files are still checked."""
    folder = copied(name)
    victim = payload_files(folder)[-1]
    os.truncate(victim, int(victim.stat().st_size * keep))
    found = errors(folder)
    [unreadable] = [f for f in found if f.kind == "unreadable-file"]
    assert unreadable.where is not None
    assert unreadable.where.path == victim.name
    assert {f.kind for f in found} <= {"unreadable-file", "gap", "missing-file"}
    assert [f for f in found if f.kind == "missing-file"] == []


def test_single_truncated_file_is_the_readers_error(tmp_path: Path) -> None:
    """Where nothing else can be read there is no report."""
    for name, file in (("torch/hf_single", "model.safetensors"), ("torch/pt_files", "model_only.pt")):
        data = (FIXTURES / name / "ckpt" / file).read_bytes()
        (tmp_path / file).write_bytes(data[: len(data) // 2])
        with pytest.raises(FormatError):
            verify(tmp_path / file)


def test_empty_file(copied: Callable[[str], Path]) -> None:
    """A file that was opened and never written."""
    folder = copied(DCP)
    os.truncate(folder / "__1_0.distcp", 0)
    assert kinds(folder) == {"empty-file", "lost-data"}


@pytest.mark.parametrize(("name", "expected"), [(SHARDED, "index-wrong-file"), (BIN, "index-wrong-file")])
def test_swapped_files_of_an_indexed_checkpoint(copied: Callable[[str], Path], name: str, expected: str) -> None:
    """Two files have each other's name: the index is wrong about all their tensors."""
    folder = copied(name)
    swap(*payload_files(folder)[:2])
    assert kinds(folder) == {expected}


def test_swapped_files_of_a_dcp_checkpoint(copied: Callable[[str], Path]) -> None:
    """Items are not where the metadata says they are."""
    folder = copied(DCP)
    swap(*payload_files(folder)[:2])
    assert "item-mismatch" in kinds(folder, "default")


def test_swapped_rank_files(copied: Callable[[str], Path]) -> None:
    """Files that say themselves which rank they are lose nothing, but the names are wrong."""
    folder = copied(VERL)
    swap(*payload_files(folder)[:2])
    warned = [f.kind for f in verify(folder, level="full").findings if f.severity is Severity.WARNING]
    assert (kinds(folder), warned) == (set(), ["renamed-file"] * 2)


def swap(one: Path, other: Path) -> None:
    """Exchange two files."""
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def edit_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    """Change a DCP checkpoint's metadata by means of torch."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_chunk_dropped_from_the_metadata(copied: Callable[[str], Path]) -> None:
    """Torch loads such a checkpoint and leaves the elements as they were; here it is exactly one gap."""
    folder = copied(DCP)
    fqn = "model.model.layers.0.mlp.down_proj.weight"

    def drop(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata[fqn].chunks.pop(1)
        index = next(i for i in metadata.storage_data if i.fqn == fqn and tuple(i.offset) == tuple(chunk.offsets))
        del metadata.storage_data[index]

    edit_metadata(folder, drop)
    [found] = errors(folder, "quick")
    assert (found.kind, found.fqn) == ("gap", fqn)
    assert found.message == "no chunk holds [6:12, 0:40] (240 of 960 elements, 25.0%)"


def test_metadata_that_points_to_another_tensor(copied: Callable[[str], Path]) -> None:
    """The stored tensor has another shape than the metadata says: tensor, file and item are named."""
    folder = copied(DCP)
    names = ("model.model.layers.0.mlp.down_proj.weight", "model.model.layers.0.mlp.up_proj.weight")

    def exchange(metadata: Any) -> None:
        one, other = (
            next(i for i in metadata.storage_data if i.fqn == fqn and tuple(i.offset) == (0, 0)) for fqn in names
        )
        places = metadata.storage_data
        places[one], places[other] = places[other], places[one]

    edit_metadata(folder, exchange)
    assert kinds(folder, "quick") <= {"length-mismatch"}
    found = errors(folder, "default")
    assert [(f.kind, f.fqn) for f in found] == [("item-mismatch", name) for name in sorted(names)]
    assert all(f.where is not None and f.where.path == "__0_0.distcp" for f in found)
    assert "is float32[6, 40] in the metadata, the stored tensor is float32[10, 24]" in found[0].message


def test_stray_copies(copied: Callable[[str], Path]) -> None:
    """A second copy of a shard and an interrupted upload lie beside a whole checkpoint."""
    folder = copied(DCP)
    shutil.copy(folder / "__0_0.distcp", folder / "__9_0.distcp")
    (folder / ".metadata.tmp").write_bytes(b"half")
    (folder / "__8_0.distcp").write_bytes(b"")
    report = verify(folder, level="quick")
    assert report.is_ok
    assert [(f.kind, f.where.path if f.where else None) for f in report.findings] == [
        ("empty-file", "__8_0.distcp"),
        ("stray-file", "__9_0.distcp"),
        ("unfinished-file", ".metadata.tmp"),
    ]


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("bytecheckpoint/ddp_2r", "global_step_2/model/.metadata"),
        ("bytecheckpoint/ddp_2r", "global_step_2/optimizer/.metadata"),
        ("deepspeed/ds_z2_bf16", "*/*pp_rank_1_*_optim_states.pt"),
        ("torch_checkpointing/fsdp2_tp_2x2", "model_1.pt"),
        ("torch/verl_2d", "*rank_3.pt"),
    ],
)
def test_what_is_missing_is_to_be_fetched(copied: Callable[[str], Path], name: str, lost: str) -> None:
    """A file that others tell of is an error without a look at payload, and the plan to fetch names it."""
    folder = copied(name)
    (path,) = folder.glob(lost)
    path.unlink()
    for level in ("quick", "default"):
        report = verify(folder, level=level)
        assert not report.is_ok, level
    assert path.relative_to(folder).as_posix() in {where.path for where in report.to_fetch()}


def test_a_rank_without_its_file_of_an_item(copied: Callable[[str], Path]) -> None:
    """State that is no tensor is placed by nothing: that other ranks have it is what tells."""
    folder = copied("torch_checkpointing/fsdp2_tp_2x2")
    (folder / "train_state_2.pt").unlink()
    (finding,) = [one for one in verify(folder).findings if one.kind == "missing-rank-file"]
    assert finding.severity is Severity.WARNING
    assert "train_state_2.pt is not here: 3 of 4 ranks" in finding.message
