"""DTensors that torch itself cut, pickled by one process that plays every rank, and joined again."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats.rank_pt.reader import READER
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import Truth, assemble, source_of

MeshFiles = Callable[[Any], dict[str, Any]]


@contextmanager
def rank_of(rank: int, mesh_sizes: Sequence[int]) -> Iterator[Any]:
    """The device mesh as one rank sees it, with collectives that do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=prod(mesh_sizes), store=FakeStore())
    try:
        names = tuple("abc"[: len(mesh_sizes)])
        yield init_device_mesh("cpu", tuple(mesh_sizes), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def rank_files(mesh_sizes: Sequence[int], state_on: MeshFiles) -> dict[str, bytes]:
    """Every rank's file of the state that ``state_on(mesh)`` makes."""
    world_size = prod(mesh_sizes)
    files = {}
    for rank in range(world_size):
        with rank_of(rank, mesh_sizes) as mesh:
            buffer = io.BytesIO()
            torch.save(state_on(mesh), buffer)
        files[f"model_world_size_{world_size}_rank_{rank}.pt"] = buffer.getvalue()
    return files


def joined(files: dict[str, bytes]) -> dict[str, Truth]:
    """All tensors of the files."""
    store = MemoryStore(files)
    manifest = READER.read(source_of(store))
    return {fqn: assemble(store, manifest, manifest.chunks, fqn) for fqn in manifest.tensors.fqns}


def arange(*shape: int) -> Any:
    """A tensor whose elements are their flat positions."""
    return torch.arange(prod(shape)).view(shape)


def positions(*shape: int) -> Truth:
    """The truth of `arange`."""
    return Truth("int64", shape, np.arange(prod(shape)).tobytes())


def test_tensor_parallel_then_fsdp_on_one_dimension() -> None:
    """16 rows over TP 2, then FSDP 2: the split factor says that TP cut first, and rows come out in order."""
    fsdp_over_tp = [_StridedShard(0, split_factor=2), Shard(0)]
    files = rank_files(
        (2, 2), lambda mesh: {"w": distribute_tensor(arange(16, 4), mesh, fsdp_over_tp, src_data_rank=None)}
    )
    assert joined(files) == {"w": positions(16, 4)}
    manifest = READER.read(source_of(MemoryStore(files)))
    assert [str(manifest.chunks.box(row, 2)) for row in range(4)] == [
        "[0:4, 0:4]",
        "[8:12, 0:4]",
        "[4:8, 0:4]",
        "[12:16, 0:4]",
    ]


def test_a_local_tensor_of_two_boxes() -> None:
    """A strided shard whose other axis replicates is rows 0:4 and 8:12 of one local tensor: two chunks a rank."""
    strided = [_StridedShard(0, split_factor=2), Replicate()]
    files = rank_files((2, 2), lambda mesh: {"w": distribute_tensor(arange(16, 4), mesh, strided, src_data_rank=None)})
    assert joined(files) == {"w": positions(16, 4)}
    manifest = READER.read(source_of(MemoryStore(files)))
    assert [str(manifest.chunks.box(row, 2)) for row in manifest.chunks.rows_of(0)[:2]] == ["[0:4, 0:4]", "[8:12, 0:4]"]
    assert len(manifest.chunks) == 8


PLACEMENTS = (Shard(0), Shard(1), Replicate(), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3))


@pytest.mark.parametrize("mesh_sizes", [(2, 3), (4, 1)])
def test_every_pair_of_placements(mesh_sizes: tuple[int, int]) -> None:
    """Uneven sizes, empty pieces, and each pair of placements that torch can make: all join to what was cut."""
    shapes = {"odd": (7, 5), "thin": (1, 9), "even": (12, 6)}
    pairs = list(product(PLACEMENTS, PLACEMENTS))

    def state(mesh: Any) -> dict[str, Any]:
        return {
            f"{name}.{i}": distribute_tensor(arange(*shape), mesh, list(pair), src_data_rank=None)
            for name, shape in shapes.items()
            for i, pair in enumerate(pairs)
        }

    expected = {f"{name}.{i}": positions(*shape) for name, shape in shapes.items() for i in range(len(pairs))}
    assert joined(rank_files(mesh_sizes, state)) == expected


def test_a_recorded_shard_order_is_followed() -> None:
    """Two plain shards of one dimension cut left to right, unless the spec records that the right axis cut first."""
    whole = arange(8, 2)

    def state(mesh: Any) -> dict[str, Any]:
        a, b = mesh.get_coordinate()
        local = whole.chunk(2, 0)[b].chunk(2, 0)[a].clone()
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=(ShardOrderEntry(0, (1, 0)),))
        return {"w": DTensor(local, spec, requires_grad=False)}

    assert joined(rank_files((2, 2), state)) == {"w": positions(8, 2)}


def test_scalars_and_empty_tensors() -> None:
    """0-dim and zero-size DTensors join too."""
    both = [Replicate()]
    files = rank_files(
        (2,),
        lambda mesh: {
            "scalar": distribute_tensor(arange(1).view(()), mesh, both, src_data_rank=None),
            "none": distribute_tensor(arange(0, 4), mesh, [Shard(0)], src_data_rank=None),
        },
    )
    assert joined(files) == {"scalar": Truth("int64", (), bytes(8)), "none": Truth("int64", (0, 4), b"")}


def test_partial_sums_are_refused() -> None:
    """What ranks hold summands of cannot be joined by copying."""
    files = rank_files((2,), lambda mesh: {"g": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)})
    with pytest.raises(Unsupported, match="Partial") as caught:
        READER.read(source_of(MemoryStore(files)))
    assert caught.value.where == "model_world_size_2_rank_0.pt: g"


def test_a_local_tensor_of_the_wrong_shape_is_refused() -> None:
    """When placement and local shape disagree, the order of rows is not known: an error, not a guess."""

    def state(mesh: Any) -> dict[str, Any]:
        local = torch.zeros(5, 2)
        return {
            "w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([8, 2]), stride=(2, 1))
        }

    with pytest.raises(FormatError, match=r"holds \[4, 2\], its local tensor is \[5, 2\]"):
        READER.read(source_of(MemoryStore(rank_files((2,), state))))
