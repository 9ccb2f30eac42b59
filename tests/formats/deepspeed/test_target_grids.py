"""Which rank of a target has which part: layers of stages, and shards by rules that name dimensions, not boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import CkptError, LayoutError, Unsupported
from ckpt_tool.formats.deepspeed.target_stages import Stages
from tests.formats.deepspeed.made import FOLDER, numbered, stage2, with_latest

TIED = "tied_modules.embed.weight"


def pipeline(*stages: list[int], tied: list[int] | None = None) -> dict[str, Any]:
    """What a reader says of a pipeline whose layer 0 is tied."""
    own = {} if tied is None else {TIED: {"layer": 0, "stages": tied}}
    return {"pipeline": {"stages": list(stages), "tied": own, "has_model_axis": False}}


@pytest.mark.parametrize(
    ("info", "n_stages", "options", "ends", "tied"),
    [
        (pipeline([0, 1, 2], [3]), 2, {}, (3, 4), None),
        (pipeline([0, 1, 2], [3], tied=[0, 1]), 2, {}, (3, 5), (0, 1)),
        (pipeline([0, 1, 2], [3], tied=[0, 1]), 4, {}, (2, 3, 4, 5), (0, 3)),
        (pipeline([0, 1, 2, 3], tied=[0]), 2, {}, (3, 5), (0, 1)),
        (pipeline([0, 1, 2], [3, 4, 5]), 3, {"first": 1, "last": 3}, (1, 3, 6), None),
        (pipeline([0, 1], [2, 4], [5], tied=[0, 1]), 3, {"first": 2}, (2, 4, 6), (0, 1)),
        (pipeline([0, 1, 2], [3]), 1, {}, (4,), None),
    ],
)
def test_layers_of_stages(
    info: dict[str, Any], n_stages: int, options: dict[str, int], ends: tuple[int, ...], tied: tuple[int, ...] | None
) -> None:
    """As in the source where it has as many, or even shares; a tied parameter is where its layers are."""
    found = Stages.of(info, n_stages, **options)
    assert found is not None
    assert found.ends == ends
    assert found.is_spread == ((n_stages != len(info["pipeline"]["stages"]) or bool(options)) and n_stages > 1)
    if tied is not None:
        assert found.of_parameter(TIED) == tied
        assert (found.layer_of(TIED), found.key_of(TIED)) == (0, "weight")
    assert found.of_parameter("1.up.weight") == (next(n for n, end in enumerate(ends) if end > 1),)


@pytest.mark.parametrize(
    ("info", "n_stages", "options", "error", "match"),
    [
        ({}, 2, {}, Unsupported, "2 pipeline stages of a source that is no pipeline"),
        (pipeline([0, 2, 3, 5], tied=[0]), 2, {}, LayoutError, r"which of the layers \[1, 4, 6\] uses it again"),
        (pipeline([0, 1], [2]), 2, {"first": 3}, LayoutError, "3 layers cannot be shared by 2 stages"),
    ],
)
def test_stages_that_are_not_known(
    info: dict[str, Any], n_stages: int, options: dict[str, int], error: type[CkptError], match: str
) -> None:
    """Nothing is guessed."""
    with pytest.raises(error, match=match):
        Stages.of(info, n_stages, **options)


RECORD = {
    "universal_checkpoint_version": 0.4,
    "tp_replicated_parameter_patterns": [r".*norm"],
    "parameter_with_2_sub_params_cat_dim_0": [r"gate_up"],
    "parameter_with_sub_params": [{"patterns": [r"qkv"], "shape": [[8, 4, 4], 3], "partition_dim": 0}],
    "parameter_with_row_parallelism_patterns": [r"down", r"bias"],
    "vocabulary_parameter_patterns": [r"emb"],
    "original_vocab_size": 13,
}
WHOLE = {
    "emb": numbered(13, 3, start=1), "norm": numbered(3, start=100), "gate_up": numbered(16, 3, start=200),
    "qkv": numbered(16, 3, start=300), "down": numbered(3, 8, start=400), "bias": numbered(8, start=500),
}  # fmt: skip


def shard(name: str, rank: int, n: int) -> torch.Tensor:
    """As Megatron-DeepSpeed cuts it."""
    tensor = WHOLE[name]
    if name == "emb":
        tensor = torch.cat([tensor, torch.zeros(3, 3)])
    if name == "norm":
        return tensor
    parts = {"gate_up": [8, 8], "qkv": [8, 4, 4]}.get(name, [tensor.shape[name == "down"]])
    dim = 1 if name == "down" else 0
    return torch.cat([part.chunk(n, dim)[rank] for part in tensor.split(parts, dim)], dim)


def source_of(folder: Path, *, without: str = "") -> Path:
    """Two tensor-parallel ranks, each with two data-parallel ones."""
    groups = [
        [name for name in own if name != without] for own in (("emb", "gate_up", "qkv", "down"), ("norm", "bias"))
    ]
    for rank in (0, 1):
        weights = {name: shard(name, rank, 2) for name in WHOLE if name != without}
        files = stage2(weights, groups, mp=rank, mp_world_size=2, universal_checkpoint_info=RECORD)
        for path, data in with_latest(files).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    return folder


@pytest.mark.parametrize(("tp", "dp"), [(1, 3), (2, 2), (4, 3)])
def test_shards_by_rules(tp: int, dp: int, tmp_path: Path) -> None:
    """Halves, parts of a fused weight, columns, copies, and rows of padding: each rank has what its run would have."""
    reshard(source_of(tmp_path / "source"), tmp_path / "out", to="deepspeed", zero_stage=2, tp=tp, dp=dp, durable=False)
    with open_checkpoint(tmp_path / "source") as before, open_checkpoint(tmp_path / "out") as after:
        assert after.manifest.mesh is not None
        assert after.manifest.mesh.sizes == (1, dp, tp)
        found = {fqn: view.numpy().tobytes() for fqn, view in after.items()}
        assert found == {fqn: view.numpy().tobytes() for fqn, view in before.items()}
        assert all(torch.equal(after[f"module.{name}"].torch(), tensor) for name, tensor in WHOLE.items())
    for rank in range(tp):
        state = torch.load(tmp_path / f"out/{FOLDER}mp_rank_{rank:02d}_model_states.pt", weights_only=True)
        for name, whole in WHOLE.items():
            expected = shard(name, rank, tp) if tp > 1 else whole
            assert torch.equal(state["module"][name], expected), name
        assert state["checkpoint_parallel_dimensions"] == {"pp_degree": 1, "tp_degree": tp}
        assert (state["universal_checkpoint_info"] == RECORD) == (tp > 1)


def test_shares_that_do_not_divide(tmp_path: Path) -> None:
    """A number of ranks that does not divide a part is refused."""
    with pytest.raises(LayoutError, match=r"along dimension \d of .* are not 3 equal shares"):
        reshard(source_of(tmp_path / "source"), tmp_path / "out", to="deepspeed", zero_stage=2, tp=3, durable=False)


def test_through_dcp_to_other_tensor_parallel_ranks(tmp_path: Path) -> None:
    """The record of how shards join goes along as an object; how many rows were padding does not: not guessed."""
    for without in ("emb", ""):
        source = source_of(tmp_path / f"source{without}", without=without)
        reshard(source, tmp_path / f"dcp{without}", dp=2, default="replicate", durable=False)
    reshard(tmp_path / "dcpemb", tmp_path / "back", to="deepspeed", zero_stage=1, tp=4, durable=False)
    with open_checkpoint(tmp_path / "sourceemb") as before, open_checkpoint(tmp_path / "back") as after:
        assert {fqn: view.numpy().tobytes() for fqn, view in after.items()} == {
            fqn: view.numpy().tobytes() for fqn, view in before.items()
        }
    with pytest.raises(LayoutError, match=r"emb: \[13\] along dimension 0 of \[13, 3\] are not 4 equal shares"):
        reshard(tmp_path / "dcp", tmp_path / "refused", to="deepspeed", zero_stage=1, tp=4, durable=False)
