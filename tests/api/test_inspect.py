from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.inspect import inspect
from ckpt_tool.api.shard_map import shard_map
from ckpt_tool.errors import NotFound, UsageError
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.tables import ChunkFlag

FIXTURES = Path(__file__).parents[2] / "fixtures"
FSDP = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"
FLAT = FIXTURES / "torch/dcp_fsdp1_flat_2r/ckpt"


def test_totals_add_up() -> None:
    """Sections, files and ranks each account for all tensors and all stored bytes."""
    found = inspect(FSDP)
    assert sum(total.n_tensors for total in found.totals) == len(found.rows) == 134
    assert sum(total.nbytes for total in found.totals) == found.nbytes
    assert sum(file.payload_nbytes for file in found.files) == found.stored_nbytes
    assert sum(rank.payload_nbytes for rank in found.ranks) == found.stored_nbytes
    assert sum(rank.n_chunks for rank in found.ranks) == sum(row.n_chunks for row in found.rows)


def test_nothing_is_resolved_without_need() -> None:
    """Places of payload stay unresolved until shards are asked for, and then only those of the listed tensors."""
    looked = inspect(FSDP).manifest.chunks
    assert (looked.flags & ChunkFlag.UNRESOLVED).all()
    exact = inspect(FSDP, include=["model.lm_head.weight"], shards=True)
    assert exact.manifest.tensors.fqns == ("model.lm_head.weight",)
    assert not (exact.manifest.chunks.flags & ChunkFlag.UNRESOLVED).any()


@pytest.mark.parametrize(
    ("name", "step"),
    [("torch/dcp_fsdp2_4r_fp32/ckpt", 3), ("torch/dcp_old_t2.1.2/ckpt", 3), ("torch/hf_single/ckpt", None)],
)
def test_step(name: str, step: int | None) -> None:
    """The step is found where a checkpoint has one, by name."""
    assert inspect(FIXTURES / name).step == step


def test_selection() -> None:
    """Patterns and sections choose; what does not exist is an error."""
    assert {row.section for row in inspect(FSDP, section="optimizer").rows} == {"optimizer"}
    assert [row.fqn for row in inspect(FSDP, include=["model.buf_*"], exclude=["*_bool"]).rows] == [
        "model.buf_scalar",
        "model.buf_empty",
        "model.buf_i64",
    ]
    with pytest.raises(NotFound):
        inspect(FSDP, include=["nothing"])
    with pytest.raises(UsageError):
        inspect(FSDP, section="nonsense")


def test_objects_are_read_on_request() -> None:
    """Objects are known by name at once, by value only when asked for."""
    values = {blob.fqn: blob.value for blob in inspect(FSDP, objects=True).objects}
    assert values["step"] == 3
    assert {blob.fqn for blob in inspect(FSDP).objects} == set(values)


def test_an_open_checkpoint_stays_open() -> None:
    """Inspecting an open checkpoint leaves it usable."""
    with open_checkpoint(FSDP) as checkpoint:
        inspect(checkpoint)
        assert checkpoint["model.lm_head.weight"][0:1].shape == (1, 24)


def test_parts_of_a_grid_and_of_flat_slices() -> None:
    """Bands of rows are parts along dimension 0; a rank with nothing has no part."""
    rows = {row.fqn: row for row in inspect(FSDP).rows}
    assert rows["model.lm_head.weight"].parts == (4, 1)
    assert rows["model.odd53"].parts == (3, 1)
    assert rows["model.buf_scalar"].parts == ()


def test_replicas_are_counted() -> None:
    """A box that several ranks store has so many copies; boxes that differ in that have 0."""
    rows = {row.fqn: row for row in inspect(FIXTURES / "torch/verl_2d/ckpt").rows}
    assert (rows["plain"].n_copies, rows["plain"].parts) == (4, (1,))
    assert (rows["r_s1"].n_copies, rows["r_s1"].parts) == (2, (1, 2))
    assert (rows["0.weight"].n_copies, rows["0.weight"].parts) == (1, (4, 1))


def test_shard_map() -> None:
    """The boxes of a tensor come in order of their offsets, with file and rank, and cover it once."""
    with open_checkpoint(FSDP) as checkpoint:
        found = shard_map(checkpoint, "model.lm_head.weight")
        assert [each.box for each in found.boxes] == [
            Box((0, 0), (25, 24)),
            Box((25, 0), (25, 24)),
            Box((50, 0), (25, 24)),
            Box((75, 0), (22, 24)),
        ]
        assert [(each.rank, each.file) for each in found.boxes] == [(n, f"__{n}_0.distcp") for n in range(4)]
        assert {each.offset for each in found.boxes} == {None}
        exact = shard_map(checkpoint, "model.lm_head.weight", exact=True)
        assert None not in {each.offset for each in exact.boxes}
        with pytest.raises(NotFound):
            shard_map(checkpoint, "lm_head.weight")


def test_flat_slices_have_several_boxes() -> None:
    """Flat parameters of FSDP1 give boxes that together hold every element once."""
    with open_checkpoint(FLAT) as checkpoint:
        for fqn in checkpoint:
            found = shard_map(checkpoint, fqn)
            assert sum(each.box.volume for each in found.boxes) == checkpoint.manifest.tensor(fqn).numel
