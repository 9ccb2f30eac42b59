"""Records of FairScale and torch_xla: vectors become the parameters that the libraries' own scripts would make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tool
from ckpt_tool.errors import FormatError
from ckpt_tool.formats.rank_pt.shard_metadata import parse_shard_metadata

PARAMETERS = {
    "embed.weight": torch.arange(15, dtype=torch.float32).reshape(5, 3),
    "layers.0.weight": torch.arange(100, 112, dtype=torch.float32).reshape(3, 4),
    "layers.0.bias": torch.arange(200, 203, dtype=torch.float32),
}
"""``layers.0`` is wrapped by itself; the root holds the rest."""


def parts(vector: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """What ranks get of a vector: equal parts, the last ones padded with -1."""
    size = -(-len(vector) // world_size)
    padded = torch.cat([vector, torch.full((size * world_size - len(vector),), -1.0)])
    return list(padded.split(size))


def fairscale(world_size: int) -> list[dict[str, Any]]:
    """Files of a FairScale run as fairseq saves them; the head shares the embedding."""
    root, layer = PARAMETERS["embed.weight"].flatten(), torch.cat([
        PARAMETERS["layers.0.weight"].flatten(), PARAMETERS["layers.0.bias"]
    ])  # fmt: skip
    held = [
        {
            "fsdp_path": "",
            "params": {
                "flat_param_0": {
                    "names": ["embed.weight"], "shapes": [torch.Size([5, 3])], "numels": [15], "padding": 0,
                }
            },
            "no_broadcast_optim_state": False,
            "shared_param_info": [("embed.weight", "head.weight")],
        },
        {
            "fsdp_path": "layers.0",
            "params": {
                "flat_param_0": {
                    "names": ["weight", "bias"], "shapes": [torch.Size([3, 4]), torch.Size([3])], "numels": [12, 3],
                    "padding": 1,
                }
            },
            "no_broadcast_optim_state": False,
            "shared_param_info": [],
        },
    ]  # fmt: skip
    return [
        {
            "model": {"flat_param_0": one, "layers.0.flat_param_0": other, "buffer": torch.tensor([7.0])},
            "shard_metadata": {"param_metadata": held, "buffer_names": ["buffer"]},
            "epoch": 3,
        }
        for one, other in zip(parts(root, world_size), parts(layer, world_size), strict=True)
    ]


def xla(world_size: int) -> list[dict[str, Any]]:
    """Files of a torch_xla run: the embedding alone is not flattened with others."""
    layer = torch.cat([PARAMETERS["layers.0.weight"].flatten(), PARAMETERS["layers.0.bias"]])
    shard = "_fsdp_shard_FSDP_SHARD_SEPARATOR_"
    own, other = f"{shard}embed_FSDP_SHARD_SEPARATOR_weight", f"{shard}_fpw_module_FSDP_SHARD_SEPARATOR_flat_param_0"
    return [
        {
            "model": {own: one, f"_fsdp_wrapped_module.layers.0.{other}": two, "buffer": torch.tensor([7.0])},
            "shard_metadata": {
                "shard_info": {
                    "": {own: {"_orig_size": torch.Size([5, 3]), "_orig_name": "embed.weight"}},
                    "_fsdp_wrapped_module.layers.0": {
                        other: {"_orig_size": torch.Size([15]), "_orig_name": "_fsdp_wrapped_module.flat_param_0"}
                    },
                },
                "flatten_info": {
                    "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.flat_param_0": (
                        ["weight", "bias"], [torch.Size([3, 4]), torch.Size([3])], [12, 3],
                    )
                },
                "buffer_info": {},
                "world_size": world_size,
                "rank": rank,
            },
        }
        for rank, (one, two) in enumerate(
            zip(parts(PARAMETERS["embed.weight"].flatten(), world_size), parts(layer, world_size), strict=True)
        )
    ]  # fmt: skip


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Files of ranks in a folder."""
    for name, value in files.items():
        torch.save(value, folder / name)
    return folder


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize(
    ("library", "name"), [(fairscale, "checkpoint_last-shard{}.pt"), (xla, "ckpt_rank-{:08d}-of-{:08d}.pth")]
)
def test_vectors_become_parameters(
    library: Callable[[int], list[dict[str, Any]]], name: str, world_size: int, tmp_path: Path
) -> None:
    """Every parameter is whole and bit for bit, whatever the number of ranks; padding is in none of them."""
    files = {name.format(rank, world_size): content for rank, content in enumerate(library(world_size))}
    with ckpt_tool.open(write(tmp_path, files)) as checkpoint:
        tensors = {fqn: view.numpy() for fqn, view in checkpoint.items()}
        notes = checkpoint.manifest.notes
    expected = {f"model.{fqn}": value.numpy() for fqn, value in PARAMETERS.items()}
    if library is fairscale:
        expected["model.head.weight"] = expected["model.embed.weight"]
    assert set(tensors) == {*expected, "model.buffer"}
    for fqn, value in expected.items():
        np.testing.assert_array_equal(tensors[fqn], value)
    assert any("2 flat parameters are 3 parameters, as 'shard_metadata' records" in note for note in notes)
    assert not any("cannot unflatten" in note for note in notes)


@pytest.mark.parametrize(("library", "lost"), [(fairscale, 1), (fairscale, 2), (xla, 2)])
def test_missing_ranks_leave_vectors(library: Callable[[int], list[dict[str, Any]]], lost: int, tmp_path: Path) -> None:
    """Without all parts nothing tells which parameters are whole: vectors stay, and the missing file is named."""
    files = {f"checkpoint_last-shard{rank}.pt": one for rank, one in enumerate(library(3)) if rank != lost}
    with ckpt_tool.open(write(tmp_path, files)) as checkpoint:
        assert not {f"model.{fqn}" for fqn in PARAMETERS} & {*checkpoint}
        assert checkpoint.manifest.info["missing_files"] == [f"checkpoint_last-shard{lost}.pt"]


def test_a_record_of_less_than_ranks_hold_is_refused(tmp_path: Path) -> None:
    """What it does not name would be lost without a word."""
    files = fairscale(2)
    held = files[0]["shard_metadata"]["param_metadata"][1]["params"]["flat_param_0"]  # the same for both
    held.update(names=["weight"], shapes=[torch.Size([3, 4])], numels=[12])
    write(tmp_path, {f"ckpt-shard{rank}.pt": file for rank, file in enumerate(files)})
    with pytest.raises(FormatError, match="records 12 elements, ranks hold 16 in 2 parts"):
        ckpt_tool.open(tmp_path)


def test_a_record_that_contradicts_itself_is_refused() -> None:
    """A shape of other sizes than the elements that are counted for it, and a record without a field."""
    record = fairscale(1)[0]["shard_metadata"]
    record["param_metadata"][0]["params"]["flat_param_0"]["numels"] = [14]
    with pytest.raises(FormatError, match=r"the shape of 'embed.weight'"):
        parse_shard_metadata(record, "x")
    del record["param_metadata"][0]["fsdp_path"]
    with pytest.raises(FormatError, match="'fsdp_path'"):
        parse_shard_metadata(record, "x")
