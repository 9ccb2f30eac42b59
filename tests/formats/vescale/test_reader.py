"""veScale's checkpoints: two that it wrote itself, and others made by torch's writer as its sources describe them.

What is made by hand is pipeline stages, of which veScale saves none without GPUs; and, of ragged shards, which came
after its only release, the class that its pickles name.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.ragged import ragged_boxes
from ckpt_tool.formats._torch_file.written import fresh_tensor
from ckpt_tool.formats.bundle import VESCALE
from ckpt_tool.geometry.box import Box
from tests.formats.conformance import FIXTURES, Case, ReaderTests, truth_of
from tests.formats.zoo import extracted

if TYPE_CHECKING:
    from ckpt_tool.formats.base import Reader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

REAL = extracted(FIXTURES / "vescale/checkpoints.tar.xz")
MODULE = "vescale.dtensor.placement_types"


def our_name(name: str) -> str:
    """Our name of a tensor in the truth."""
    section, _, rest = name.partition("/")
    return rest if section == "model" else f"optimizer.state.{rest.replace('/', '.')}"


class TestVeScale(ReaderTests):
    """Weights, fp32 masters, moments and steps, of its own release; also where ranks shared one parameter's state."""

    reader = cast("Reader", VESCALE)
    reader_import = "ckpt_tool.formats.bundle:VESCALE"
    cases = tuple(Case(name, REAL / name / "ckpt", truth_of(REAL / name, our_name)) for name in ("dp2_tp2", "dp3"))


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    """fp32 counting up."""
    return torch.arange(start, start + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def state_of(names: Mapping[str, torch.Tensor], chunk: int = 0) -> dict[str, Any]:
    """A stage's optimizer: by dtype, then by chunk and name; keys are text, as flattening makes them."""
    return {
        "torch.float32": {
            str((chunk, name)): {
                "exp_avg": value * 3, "step": torch.tensor(5.0), "shard_casted_float16_groups": value + 0.25,
            }
            for name, value in names.items()
        },
        "param_group_meta": [{"lr": 0.5, "params": [0, 1]}],
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two stages."""
    stages = [{"layers.0.up.weight": numbered(5, 3), "emb.weight": numbered(4, 2, start=50)},
              {"layers.1.up.weight": numbered(5, 3, start=100)}]  # fmt: skip
    model = {name: value.to(torch.bfloat16) for stage in stages for name, value in stage.items()}
    dcp.save(model, checkpoint_id=tmp_path / "saved/model", no_dist=True)
    for number, stage in enumerate(stages):
        dcp.save(state_of(stage), checkpoint_id=tmp_path / f"saved/optimizer/pp_{number}", no_dist=True)
    return tmp_path / "saved"


def test_model_and_stages_are_one(folder: Path) -> None:
    """Weights under their names, states of all stages under the parameters', groups under their stage."""
    with open_checkpoint(folder) as found:
        assert found.format == "vescale"
        state = "optimizer.state.layers.1.up.weight"
        assert torch.equal(found[f"{state}.exp_avg"].torch(), numbered(5, 3, start=100) * 3)
        assert torch.equal(found[f"{state}.shard_casted_float16_groups"].torch(), numbered(5, 3, start=100) + 0.25)
        assert torch.equal(found["emb.weight"].torch(), numbered(4, 2, start=50).to(torch.bfloat16))
        assert len(found) == 3 + 3 * 3
        assert found.objects()["optimizer.pp_1.param_group_meta.0.lr"] == 0.5
    report = verify(folder, level="full")
    assert [finding.message for finding in report.findings if finding.severity.name == "ERROR"] == []


def test_it_goes_elsewhere(folder: Path, tmp_path: Path) -> None:
    """Resharded for DCP, and its masters exported as the weights."""
    reshard(folder, tmp_path / "dcp", dp=3, default="replicate", durable=False)
    with open_checkpoint(folder) as before, open_checkpoint(tmp_path / "dcp") as after:
        assert {k: v.numpy().tobytes() for k, v in after.items()} == {k: v.numpy().tobytes() for k, v in before.items()}
    export(folder, tmp_path / "out.safetensors", masters=True, names="source", durable=False)
    with open_checkpoint(tmp_path / "out.safetensors") as found:
        assert torch.equal(found["emb.weight"].torch(), numbered(4, 2, start=50) + 0.25)


def test_chunks_with_the_same_names_stay_apart(tmp_path: Path) -> None:
    """Two model chunks of one stage, as interleaved pipelines have them."""
    dcp.save({"w": numbered(2)}, checkpoint_id=tmp_path / "model", no_dist=True)
    both = state_of({"w": numbered(2)}, 0)
    both["torch.float32"] |= state_of({"w": numbered(2, start=10)}, 1)["torch.float32"]
    dcp.save(both, checkpoint_id=tmp_path / "optimizer/pp_0", no_dist=True)
    with open_checkpoint(tmp_path) as found:
        assert torch.equal(found["optimizer.state.1.w.exp_avg"].torch(), numbered(2, start=10) * 3)


# ------------------------------------------------------------------------------------------------------ ragged shards


@dataclass(frozen=True)
class RaggedShard:
    """As the sources declare it; torch's own base cannot be pickled by subclasses."""

    dims: tuple[int, ...]
    local_units: tuple[int, ...]


@dataclass(frozen=True)
class _StridedRaggedShard(RaggedShard):
    split_factor: int = 2


@pytest.fixture
def ragged_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that pickles name."""
    module = types.ModuleType(MODULE)
    for own in (RaggedShard, _StridedRaggedShard):
        monkeypatch.setattr(own, "__module__", MODULE)
        setattr(module, own.__name__, own)
    for name in ("vescale", "vescale.dtensor"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)


def saved(folder: Path, whole: torch.Tensor, mesh: torch.Tensor, names: tuple[str, ...], cut: Any) -> None:
    """A file per rank, whose DTensor has what ``cut`` gives for the rank's coordinate: placements and local part."""
    folder.mkdir(parents=True)
    for rank in range(mesh.numel()):
        coordinate = [int(c) for c in (mesh == rank).nonzero()[0]]
        placements, local = cut(coordinate)
        device_mesh = DeviceMesh("cpu", mesh, mesh_dim_names=names, _init_backend=False, _rank=rank)
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        value = DTensor(local, DTensorSpec(device_mesh, placements, tensor_meta=meta), requires_grad=False)
        torch.save({"w": value}, folder / f"model_world_size_{mesh.numel()}_rank_{rank}.pt")


@pytest.mark.parametrize(
    ("shape", "dims", "units"),
    [((10, 4), (0,), (1, 2, 2, 0)), ((6, 5, 2), (0, 1), (1, 4, 0, 1)), ((8,), (0,), (3, 1, 2, 2))],
)
def test_ragged_shards_are_joined(
    shape: tuple[int, ...], dims: tuple[int, ...], units: tuple[int, ...], tmp_path: Path, ragged_classes: None
) -> None:
    """Runs of the flattened tensor in shares: rows, parts of rows of planes, and nothing at all."""
    whole = numbered(*shape)

    def cut(coordinate: list[int]) -> tuple[Any, torch.Tensor]:
        share = whole.numel() // sum(units)
        start = share * sum(units[: coordinate[0]])
        return (RaggedShard(dims, units),), whole.flatten()[start : start + share * units[coordinate[0]]].clone()

    saved(tmp_path / "s", whole, torch.arange(4), ("fsdp",), cut)
    with open_checkpoint(tmp_path / "s") as found:
        (view,) = found.values()
        assert torch.equal(view.torch(), whole)


def test_ragged_within_shards(tmp_path: Path, ragged_classes: None) -> None:
    """Experts over one axis, their rows ragged over the other: the later axis cuts first."""
    whole, units = numbered(8, 3, 2), (1, 3)

    def cut(coordinate: list[int]) -> tuple[Any, torch.Tensor]:
        own = whole[4 * coordinate[1] : 4 * coordinate[1] + 4].flatten()
        share = own.numel() // sum(units)
        start = share * sum(units[: coordinate[0]])
        local = own[start : start + share * units[coordinate[0]]].clone()
        return (_StridedRaggedShard((0,), units, split_factor=2), Shard(0)), local

    saved(tmp_path / "s", whole, torch.arange(4).reshape(2, 2), ("fsdp", "ep"), cut)
    with open_checkpoint(tmp_path / "s") as found:
        (view,) = found.values()
        assert torch.equal(view.torch(), whole)


@pytest.mark.parametrize(
    ("dims", "units", "numel", "match"),
    [
        ((1,), (1, 1), 12, "expected leading dimensions"),
        ((0,), (1, 4), 12, "do not divide"),
        ((0,), (1, 3), 12, "do not divide"),
        ((0,), (1, 1), 8, "its local tensor has 8"),
    ],
)
def test_what_does_not_fit(dims: tuple[int, ...], units: tuple[int, ...], numel: int, match: str) -> None:
    """Shares that cut a row, and local tensors of another length, are the file's fault."""
    local: TensorRef = fresh_tensor(0, dtype("float32"), (numel,))
    with pytest.raises(FormatError, match=match):
        ragged_boxes(Box((0, 0), (6, 4)), dims, units, 0, local)
