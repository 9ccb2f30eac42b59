"""A table of flat parameters: real FSDP1 vectors of several ranks become the parameters that were trained."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ckpt_tool
from ckpt_tool.api.convert.flat import load_flat_table
from ckpt_tool.errors import LayoutError, UsageError
from tests.ranks import start_ranks


def model() -> nn.Module:
    """Two layers, wrapped by themselves, below a head; sizes that no number of ranks divides."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)), nn.Sequential(nn.Linear(3, 7)), nn.Linear(7, 2)
    )


IN_VECTORS = (
    ("2.weight", "2.bias"),
    ("0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"),
    ("1.0.weight", "1.0.bias"),
)
"""Parameters by vector, the root's first, as ``parameters()`` has them."""


def write_table(sharded: nn.Module, folder: str) -> None:
    """Run what the page on layouts says to run in the job."""
    page = (Path(__file__).parents[2] / "docs/layouts.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    os.chdir(folder)
    exec(compile(block, "docs/layouts.md", "exec"), {"model": sharded})


def job(rank: int, size: int, keeps_names: bool, rendezvous: str, folder: str) -> None:
    """Save what FSDP1 calls a local state dict, the table, and the whole model beside it."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    sharded = FullyShardedDataParallel(
        model(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        device_id=torch.device("cpu"),
        use_orig_params=keeps_names,
    )
    if keeps_names:
        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.LOCAL_STATE_DICT):
            torch.save({"model": sharded.state_dict()}, f"{folder}/ckpt/model_rank_{rank}.pt")
        if not rank:
            write_table(sharded, folder)
        dist.destroy_process_group()
        return
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.0)
    for parameter in sharded.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rank))
    optimizer.step()
    with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.LOCAL_STATE_DICT):
        state = {"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, f"{folder}/ckpt/model_rank_{rank}.pt")
    names = [fqn.replace("_fsdp_wrapped_module.", "") for fqn, _ in sharded.named_parameters()]
    plain = {fqn: value.detach().clone() for fqn, value in zip(names, sharded.parameters(), strict=True)}
    torch.save(plain, f"{folder}/plain/model_rank_{rank}.pt")
    moments: list[Any] = [None] * size
    dist.all_gather_object(moments, [optimizer.state[parameter]["exp_avg"] for parameter in sharded.parameters()])
    if not rank:
        torch.save([torch.cat(parts) for parts in zip(*moments, strict=True)], f"{folder}/moments.pt")
        write_table(sharded, folder)
    dist.destroy_process_group()


def test_names_kept_by_fsdp1(tmp_path: Path) -> None:
    """``use_orig_params=True`` aligns parameters, and saves ranks' views of the vectors beside these: left out."""
    (tmp_path / "ckpt").mkdir()
    start_ranks(job, (2, True, str(tmp_path / "rendezvous"), str(tmp_path)), 2)
    result = ckpt_tool.export(tmp_path / "ckpt", tmp_path / "out", flat=tmp_path / "flat.json")
    expected = {fqn: value.detach().numpy() for fqn, value in model().named_parameters()}
    with ckpt_tool.open(tmp_path / "out") as exported:
        assert set(exported) == set(expected)
        for fqn, value in expected.items():
            np.testing.assert_array_equal(exported[fqn].numpy(), value)
    assert any("and 5 more by itself is left out" in note for note in result.notes)


@pytest.mark.parametrize("size", [2, 3])
def test_vectors_of_fsdp1(tmp_path: Path, size: int) -> None:
    """Saved as ShardedTensors, and as each rank's own tensors with padding: both are exported bit for bit."""
    for name in ("ckpt", "plain"):
        (tmp_path / name).mkdir()
    start_ranks(job, (size, False, str(tmp_path / "rendezvous"), str(tmp_path)), size)
    expected = {fqn: value.detach().numpy() for fqn, value in model().named_parameters()}
    for name in ("ckpt", "plain"):
        result = ckpt_tool.export(tmp_path / name, tmp_path / f"{name}.safetensors", flat=tmp_path / "flat.json")
        with ckpt_tool.open(tmp_path / f"{name}.safetensors") as exported:
            assert set(exported) == set(expected)
            for fqn, value in expected.items():
                np.testing.assert_array_equal(exported[fqn].numpy(), value)
        assert any("are 8 parameters, as" in note for note in result.notes)
        assert not any("cannot unflatten" in note for note in result.notes)
    ckpt_tool.reshard(tmp_path / "ckpt", tmp_path / "dcp", dp=2, flat=tmp_path / "flat.json", default="shard0")
    with ckpt_tool.open(tmp_path / "dcp") as resharded:
        for vector, fqns in zip(torch.load(tmp_path / "moments.pt"), IN_VECTORS, strict=True):
            at = 0
            for fqn in fqns:
                moment = resharded[f"optimizer.state.{fqn}.exp_avg"].numpy()
                assert moment.shape == expected[fqn].shape
                assert moment.ravel().tolist() == vector[at : at + moment.size].tolist()
                assert resharded[f"optimizer.state.{fqn}.step"].numpy() == 1
                at += moment.size
        objects = resharded.objects()
    assert objects["optimizer.param_groups.0.params"] == [fqn for fqns in IN_VECTORS for fqn in fqns]
    assert objects["optimizer.param_groups.0.lr"] == 0.0


def ranks(folder: Path, contents: list[dict[str, torch.Tensor]]) -> Path:
    """A file for each rank."""
    folder.mkdir()
    for rank, content in enumerate(contents):
        torch.save(content, folder / f"model_rank_{rank}.pt")
    return folder


def test_pieces_of_parameters_and_alignment(tmp_path: Path) -> None:
    """Parts of one parameter that ranks hold with different lengths, and parameters that begin at multiples."""
    whole = torch.arange(12, dtype=torch.float32)
    vector = torch.arange(100, 116, dtype=torch.float32)
    source = ranks(
        tmp_path / "source",
        [
            {"head.weight": whole[:7], "x._flat_param": vector[:8]},
            {"head.weight": whole[7:], "x._flat_param": vector[8:]},
        ],
    )
    table = tmp_path / "table.toml"
    table.write_text(
        '[[flat]]\nname = "head.weight"\nshape = [3, 4]\n'
        '[[flat]]\nname = "*._flat_param"\nparameters = [["a", [3, 2], 0], ["b", [], 8], ["c", [3], 16]]\n',
        encoding="utf-8",
    )
    with pytest.raises(LayoutError, match=r"the parameters have 19 elements, 'x._flat_param' has 16"):
        ckpt_tool.export(source, tmp_path / "out", flat=table)
    table.write_text(table.read_text(encoding="utf-8").replace(", 16]", ", 12]"), encoding="utf-8")
    ckpt_tool.export(source, tmp_path / "out", flat=table)
    with ckpt_tool.open(tmp_path / "out") as exported:
        assert exported["head.weight"].numpy().tolist() == whole.reshape(3, 4).tolist()
        assert exported["x.a"].numpy().tolist() == vector[:6].reshape(3, 2).tolist()
        assert exported["x.b"].numpy().tolist() == 108
        assert exported["x.c"].numpy().tolist() == vector[12:15].tolist()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[flat]]\nshape = [1]", "an entry needs name"),
        ('[[flat]]\nname = "x"', "either parameters or a shape"),
        ('[[flat]]\nname = "x"\nshape = [-1]', r"a shape is a list of sizes, got \[-1\]"),
        ('[[flat]]\nname = "x"\nparameters = [["a"]]', "parameters are a list of names with shapes"),
        ('[[flat]]\nname = "x"\nparameters = [["a", [3]], ["b", [1], 2]]', "'b' begins at 2, before the end .* 3"),
        ("[rule]\n", "rule is dict, expected a list of tables"),
        ('[[flat]]\nname = "x"\nshapes = [1]', "shapes"),
        ("flat = 3", "flat is int, expected a list of tables"),
    ],
)
def test_what_is_wrong_with_a_table(text: str, said: str) -> None:
    """Each fault is named, with the entry that has it."""
    with pytest.raises(LayoutError, match=said):
        load_flat_table(text, "table.toml")


def test_a_table_that_does_not_fit(tmp_path: Path) -> None:
    """Names that are not there, tensors of several dimensions, a file that cannot be read."""
    source = ranks(tmp_path / "source", [{"x._flat_param": torch.zeros(4), "w": torch.zeros(2, 2)} for _ in range(2)])
    table = tmp_path / "table.toml"
    for text, said in (
        ('name = "y"\nshape = [1]', "no tensor is called 'y'"),
        ('name = "w"\nshape = [4]', r"'w' has shape \[2, 2\], a flat parameter has one dimension"),
        ('name = "x._flat_param"\nparameters = [["a", [3]]]', "the parameters have 3 elements, 'x._flat_param' has 8"),
    ):
        table.write_text(f"[[flat]]\n{text}\n", encoding="utf-8")
        with pytest.raises(LayoutError, match=said):
            ckpt_tool.reshard(source, tmp_path / "out", dp=2, flat=table)
    with pytest.raises(UsageError, match="cannot be read"):
        ckpt_tool.export(source, tmp_path / "out", flat=tmp_path / "none.toml")
