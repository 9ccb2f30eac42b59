"""torch opens the files that ``torch.save`` could have written: whole, and one for each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.convert.export import export
from tests.consumers.written import LAYOUTS, Written, case_named, expected_tensors, leaves, restored, write_all

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]


@pytest.fixture(scope="module")
def rank_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """Every checkpoint as one torch file per rank, in another layout than its own."""
    return write_all(tmp_path_factory.mktemp("ranks"), "torch-ranks")


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_file(name: str, tmp_path: Path) -> None:
    """``torch.load(weights_only=True)`` of a file with everything gives nested dicts, every tensor bit for bit."""
    case = case_named(name)
    export(case.url, tmp_path / "whole.pt", to="torch-save", everything=True, names="source", durable=False)
    is_plain = name != "torch/verl_4r_bf16"  # which holds numpy's random state, an object that torch does not allow
    state = torch.load(tmp_path / "whole.pt", weights_only=is_plain)
    found = {".".join(map(str, path)): leaf for path, leaf in leaves(state).items()}
    expected = expected_tensors(case)
    assert {fqn: found[fqn] for fqn in expected} == expected


def test_the_nested_dict_is_the_saved_one(tmp_path: Path) -> None:
    """The file of a DCP checkpoint is, key by key and value by value, what torch's own converter makes."""
    case = case_named("torch/dcp_fsdp2_4r_fp32")
    export(case.url, tmp_path / "whole.pt", to="torch-save", everything=True, names="source", durable=False)
    ours = torch.load(tmp_path / "whole.pt", weights_only=True)
    theirs = restored(case.url, tmp_path)
    assert leaves(ours) == leaves(theirs)
    assert ours["optim"]["param_groups"] == theirs["optim"]["param_groups"]


def test_weights_go_into_a_module(tmp_path: Path) -> None:
    """An export of a training state under its own names loads into the module with ``load_state_dict``, strictly."""
    case = case_named("deepspeed/torchtitan_dp2tp2")
    export(case.url, tmp_path / "weights.pt", to="torch-save", family="none", durable=False)
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    module = torch.nn.ModuleDict({"output": torch.nn.Linear(10, 37, bias=False)})
    module.load_state_dict({"output.weight": state["output.weight"]}, strict=True)
    assert leaves(module.state_dict()) == {("output.weight",): expected_tensors(case)["output.weight"]}
    assert sorted(state) == sorted(fqn for fqn in expected_tensors(case) if not fqn.startswith("optimizer."))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_for_each_rank(rank_files: dict[str, Written], name: str) -> None:
    """Each rank's file opens by itself and holds its pieces, which put together by their layout are the tensors."""
    written = rank_files[name]
    whole = {fqn: torch.zeros(shape, dtype=getattr(torch, dtype)) for fqn, (dtype, shape, _) in written.tensors.items()}
    filled = {fqn: torch.zeros(shape, dtype=torch.bool) for fqn, (_, shape, _) in written.tensors.items()}
    paths = sorted(written.root.glob("*.pt"))
    is_plain = name != "torch/verl_4r_bf16"
    for path in paths:
        state = torch.load(path, weights_only=is_plain)
        for entry in state["__ckpt_layout__"]["tensors"]:
            piece = _piece(state, entry)
            if entry["fqn"] in whole:
                where = tuple(slice(o, o + n) for o, n in zip(entry["offsets"], piece.shape, strict=True))
                whole[entry["fqn"]][where] = piece
                filled[entry["fqn"]][where] = True
    assert len(paths) == state["__ckpt_layout__"]["world_size"]
    assert all(bool(there.all()) for there in filled.values())
    assert {path[0]: leaf for path, leaf in leaves(whole).items()} == dict(written.tensors)


def _piece(state: Any, entry: Any) -> torch.Tensor:
    """The tensor of a layout entry: at its path, or in a list there when a rank has several boxes of it."""
    value = state
    for key in entry["path"]:
        value = value[key]
    if isinstance(value, list):
        value = value[int(entry["entry"].rsplit(".", 1)[1])]
    assert isinstance(value, torch.Tensor)
    return value
