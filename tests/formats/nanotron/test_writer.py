"""nanotron's layout, written: read back here, and as its public source loads parameters on one rank and on several.

What stands here for its loader follows ``serialize/weights.py`` (0.4); the library itself loads it in
``tests/consumers/test_nanotron.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import LayoutError, Unsupported, UsageError
from ckpt_tool.formats.nanotron.writer import WRITER
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob
from tests.formats.torch_save.laid_out import request_of
from tests.formats.zoo import CHECKPOINTS
from tests.reports.made import as_bytes

SOURCE = CHECKPOINTS / "nanotron_tp2_dp2/ckpt"
BLOCK = "model.decoder.0.pp_block"
FP32 = DTYPES["float32"]


def loaded_whole(folder: Path, fqn: str, n_tp: int) -> torch.Tensor:
    """All of a parameter that is cut, as a rank of ``n_tp`` puts it together before it takes its own part."""
    *module, leaf = fqn.split(".")
    where = folder.joinpath("model", *module)
    own = where / f"model_{leaf}_pp-rank-0-of-1_tp-rank-0-of-{n_tp}.safetensors"
    if own.exists():
        with safe_open(own, "pt") as file:
            found: torch.Tensor = file.get_tensor("data")
            return found
    shards = list(where.glob(f"model_{leaf}*.safetensors"))
    assert shards
    whole = None
    for path in shards:
        match = re.search(r"pp-rank-(\d+)-of-\d+_tp-rank-(\d+)-of-\d+", str(path))
        assert match is not None
        with safe_open(path, "pt") as file:
            said, part = file.metadata(), file.get_tensor("data")
        assert set(said) == {"version", "local_global_slices_pairs", "unsharded_shape"}
        assert said["version"] == "1.2"  # nanotron 0.4, the one release, refuses what is newer
        shape = [int(size) for size in said["unsharded_shape"].strip("()").split(",") if size]
        whole = torch.full(shape, torch.nan, dtype=part.dtype) if whole is None else whole
        for pair in said["local_global_slices_pairs"].split(";"):
            local, target = (
                tuple(
                    slice(*(None if number == "None" else int(number) for number in dim.split(",")))
                    for dim in side.split("|")
                )
                for side in pair.split("#")
            )
            whole[target] = part[local]
    assert whole is not None
    return whole


def as_raw(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor."""
    data: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return data


@pytest.mark.parametrize("n_tp", [1, 2])
def test_what_its_loader_finds(n_tp: int, tmp_path: Path) -> None:
    """Fused and other parameters that are cut, by slices; a norm in the one file without ranks in its name."""
    result = export(SOURCE, tmp_path / "there", to="nanotron", durable=False)
    truth = {fqn: data for fqn, (_, _, data) in as_bytes(SOURCE).items() if not fqn.startswith("optimizer.")}
    norm = f"{BLOCK}.input_layernorm.weight"
    cut = sorted(set(truth) - {norm})
    assert {fqn: as_raw(loaded_whole(tmp_path / "there", fqn, n_tp)) for fqn in cut} == {fqn: truth[fqn] for fqn in cut}
    path = tmp_path / "there/model" / norm.rpartition(".")[0].replace(".", "/") / "model_weight.safetensors"
    with safe_open(path, "pt") as file:
        assert as_raw(file.get_tensor("data")) == truth[norm]
    assert {fqn: data for fqn, (_, _, data) in as_bytes(tmp_path / "there").items()} == truth
    assert verify(tmp_path / "there", level="full").is_ok
    metadata = json.loads((tmp_path / "there/checkpoint_metadata.json").read_text("utf-8"))
    assert (metadata["tp"], metadata["dp"], metadata["metas"]["last_train_step"]) == (1, 1, 3)
    assert any(dropped.why == "optimizer state" for dropped in result.dropped)


def test_other_sources(tmp_path: Path) -> None:
    """Names tell which file nanotron looks for; a run that is not known is one at its start."""
    shapes = {
        "model.token_position_embeddings.pp_block.token_embedding.weight": (8, 4),
        f"{BLOCK}.attn.qkv_proj.weight": (12, 4),
        f"{BLOCK}.attn.qkv_proj.bias": (12,),
        f"{BLOCK}.mlp.down_proj.weight": (4, 6),
        f"{BLOCK}.post_attention_layernorm.weight": (4,),
        "model.final_layer_norm.pp_block.weight": (4,),
        "model.lm_head.pp_block.weight": (8, 4),
    }
    state = {fqn: torch.randn(shape) for fqn, shape in shapes.items()}
    save_file(state, tmp_path / "w.safetensors")
    reshard(tmp_path / "w.safetensors", tmp_path / "there", to="nanotron", durable=False)
    for fqn, tensor in state.items():
        if "norm" in fqn:
            path = tmp_path / "there/model" / fqn.rpartition(".")[0].replace(".", "/") / "model_weight.safetensors"
            with safe_open(path, "pt") as file:
                assert torch.equal(file.get_tensor("data"), tensor)
                assert file.metadata() is None
        else:
            assert torch.equal(loaded_whole(tmp_path / "there", fqn, 2), tensor)
    metadata = json.loads((tmp_path / "there/checkpoint_metadata.json").read_text("utf-8"))
    assert metadata["metas"]["data_stages"] == []


def test_what_it_refuses() -> None:
    """Other names, states and objects, a name that tells nothing, names that no file can have, parts."""
    one = [(0, Box.whole((2, 2)), 0)]

    def request(fqn: str) -> object:
        return WRITER.lay_out(request_of({(fqn,): (FP32, (2, 2))}, one))

    with pytest.raises(Unsupported, match="1 of 1 tensor does not have nanotron's names: w"):
        request("w")
    with pytest.raises(Unsupported, match="the source has 1 other entry: optimizer"):
        request(f"optimizer.state.{BLOCK}.o_proj.weight.exp_avg")
    with pytest.raises(LayoutError, match="does not tell whether they do"):
        request(f"{BLOCK}.router.weight")
    with pytest.raises(Unsupported, match="no file of nanotron's can be called so"):
        request(f"../{BLOCK}..o_proj.weight")
    blob = Blob("step", "value", None, 1, ("step",), is_loaded=True)
    with pytest.raises(Unsupported, match="the source has 1 other entry: step"):
        WRITER.lay_out(request_of({(f"{BLOCK}.o_proj.weight",): (FP32, (2, 2))}, one, blobs=[blob]))
    halves = [(0, Box((row, 0), (1, 2)), row) for row in (0, 1)]
    with pytest.raises(LayoutError, match="expected one whole box of each tensor"):
        WRITER.lay_out(request_of({(f"{BLOCK}.o_proj.weight",): (FP32, (2, 2))}, halves, world_size=2))


def test_ranks_are_its_own_affair(tmp_path: Path) -> None:
    """A mesh is refused, with why."""
    with pytest.raises(UsageError, match="nanotron holds whole tensors"):
        reshard(SOURCE, tmp_path / "there", to="nanotron", tp=2)
