"""The safetensors library, and loaders that go by the index, open what the tool exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt_tool.api.convert.export import export
from tests.consumers.written import LAYOUTS, Written, bits, case_named, expected_tensors, write_all


@pytest.fixture(scope="module")
def rank_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """Every checkpoint as one safetensors file per rank, in another layout than its own."""
    return write_all(tmp_path_factory.mktemp("ranks"), "rank-files")


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_file(name: str, tmp_path: Path) -> None:
    """``load_file`` has every tensor of the checkpoint under its name, bit for bit; ``safe_open`` slices them."""
    case = case_named(name)
    path = tmp_path / "whole.safetensors"
    export(case.url, path, everything=True, names="source", durable=False)
    loaded = {fqn: bits(value) for fqn, value in load_file(path).items()}
    expected = expected_tensors(case)
    assert {fqn: loaded[fqn] for fqn in expected} == expected
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        for fqn, (_, shape, _) in expected.items():
            if len(shape) == 2 and shape[0] > 2:
                assert torch.equal(file.get_slice(fqn)[1:2], load_file(path)[fqn][1:2])
                return


@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_and_index(name: str, tmp_path: Path) -> None:
    """Loading the files that the index names, as loaders do, gives every tensor once; sizes count tensor bytes."""
    limit = 5_000
    export(case_named(name).url, tmp_path / "out", names="source", everything=True, max_shard_nbytes=limit)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text("utf-8"))
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert files == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    loaded: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    total = 0
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert set(tensors) == {fqn for fqn, where in index["weight_map"].items() if where == file}
        nbytes = [value.nbytes for value in tensors.values()]
        assert sum(nbytes) <= limit or len(nbytes) == 1
        total += sum(nbytes)
        loaded |= {fqn: bits(value) for fqn, value in tensors.items()}
    assert index["metadata"]["total_size"] == total
    expected = expected_tensors(case_named(name))
    assert {fqn: loaded[fqn] for fqn in expected} == expected


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_for_each_rank(rank_files: dict[str, Written], name: str) -> None:
    """Each rank's file opens by itself; its header places every piece, and the pieces make up the tensors."""
    written = rank_files[name]
    whole = {fqn: torch.zeros(shape, dtype=getattr(torch, dtype)) for fqn, (dtype, shape, _) in written.tensors.items()}
    filled = {fqn: torch.zeros(shape, dtype=torch.bool) for fqn, (_, shape, _) in written.tensors.items()}
    for path in sorted(written.root.glob("rank_*.safetensors")):
        with safe_open(path, framework="pt") as file:
            boxes = json.loads(file.metadata()["ckpt.boxes"])
            assert set(boxes) == set(file.keys())
            for key, entry in boxes.items():
                fqn, piece = entry.get("fqn", key), file.get_tensor(key)
                if fqn in whole:
                    where = tuple(slice(o, o + n) for o, n in zip(entry["offsets"], piece.shape, strict=True))
                    whole[fqn][where] = piece
                    filled[fqn][where] = True
    assert all(bool(there.all()) for there in filled.values())
    assert {fqn: bits(value) for fqn, value in whole.items()} == dict(written.tensors)
