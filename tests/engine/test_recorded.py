"""A byte that changed since a checkpoint was saved is seen by whoever copies it, where its file records a checksum."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt_tool
from ckpt_tool.errors import IntegrityError
from ckpt_tool.manifest.model import Chunk
from tests.formats.megatron.places import CHECKPOINTS

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCES = {
    "dcp, cut by rows": FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt",
    "torch.save in several files": FIXTURES / "torch/hf_pytorch_bin/ckpt",
    "files of ranks": FIXTURES / "torch/verl_4r_bf16/ckpt",
    "stacked layers, taken apart": CHECKPOINTS / "td_full_t2p2d2/ckpt",
}

ALL_PROVEN = ("dcp, cut by rows", "torch.save in several files")
"""Every tensor of them lies in runs of its bytes, each with a checksum; replicas are on one rank each."""


def chunks_of(source: Path) -> list[Chunk]:
    """The model's chunks that hold something."""
    with ckpt_tool.open(source) as checkpoint:
        manifest = checkpoint.resolve()
    found = [
        manifest.chunks.record(row, manifest.tensors, manifest.files)
        for row in range(len(manifest.chunks))
        if not manifest.tensors.section[manifest.chunks.tensor[row]]
    ]
    return [chunk for chunk in found if chunk.where.length]


def refusal(source: Path, target: Path) -> str | None:
    """Why a copy is not made; None where it is."""
    try:
        ckpt_tool.export(source, target)
    except IntegrityError as error:
        return str(error)
    return None


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("name", SOURCES)
def test_a_flipped_bit_is_seen(tmp_path: Path, name: str) -> None:
    """The message names file and bytes, nothing gets a name, and whoever wants the copy all the same gets it."""
    folder = SOURCES[name]
    good = ckpt_tool.export(folder, tmp_path / "good")
    assert good.report.proven_nbytes > good.report.written_nbytes // 3
    n_seen, tried = 0, chunks_of(folder)[::7]
    for number, chunk in enumerate(tried):
        source, target = tmp_path / f"source{number}", tmp_path / f"target{number}"
        shutil.copytree(folder, source)
        flip(source / chunk.where.path, chunk.where.offset + chunk.where.length // 2)
        said = refusal(source, target)
        if said is not None:
            n_seen += 1
            assert f"{chunk.where}" in said
            assert "the file records" in said
            assert not target.exists()
            ckpt_tool.export(source, target, digest=None, overwrite=True)
            assert target.exists()
    assert n_seen == len(tried) if name in ALL_PROVEN else n_seen


@given(cut=st.sampled_from(["rows", "columns", "whole"]), n_ranks=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_what_is_proven(tmp_path_factory: pytest.TempPathFactory, cut: str, n_ranks: int, seed: int) -> None:
    """Tensors in one piece or cut by rows are proven, all their bytes; cut by columns they cannot be."""
    source = tmp_path_factory.mktemp("source")
    made = torch.Generator().manual_seed(seed)
    value = torch.randn(6, 12, generator=made)
    torch.save({"w": value, "b": torch.randn(5, generator=made)}, source / "whole.pt")
    if cut != "whole":
        ckpt_tool.reshard(
            source / "whole.pt", source / "cut", to="dcp", mesh=f"tp={n_ranks}", default="shard0",
            rules=_rules(source, cut),
        )  # fmt: skip
    result = ckpt_tool.export(source / ("whole.pt" if cut == "whole" else "cut"), source / "out")
    is_cut = cut == "columns" and n_ranks > 1
    assert result.report.proven_nbytes == 4 * 5 + (0 if is_cut else value.nbytes)
    with ckpt_tool.open(source / "out") as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), value)


def _rules(folder: Path, cut: str) -> Path:
    path = folder / "rules.toml"
    kind = "column" if cut == "rows" else "row"
    path.write_text(f'[[rule]]\nmatch = "w"\nkind = "{kind}"\n[[rule]]\nmatch = "b"\nkind = "replicated"\n')
    return path


def test_files_without_checksums_are_copied(tmp_path: Path) -> None:
    """Whoever saves without CRCs has none to compare, and safetensors never have any: 0 bytes are proven."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(100.0)}, tmp_path / "bare.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    first = ckpt_tool.export(tmp_path / "bare.pt", tmp_path / "a.safetensors")
    second = ckpt_tool.export(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (first.report.proven_nbytes, second.report.proven_nbytes) == (0, 0)


def test_damage_is_found_by_a_run_that_goes_on(tmp_path: Path) -> None:
    """What an earlier run has copied counts too: its sums are in the journal, and the same source is still damaged."""
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "source.pt")
    (chunk,) = chunks_of(tmp_path / "source.pt")
    flip(tmp_path / "source.pt", chunk.where.offset + 100)
    for resume in (False, True):
        with pytest.raises(IntegrityError, match=r"'w' .* the file records"):
            ckpt_tool.export(tmp_path / "source.pt", tmp_path / "out", resume=resume)
    assert not (tmp_path / "out").exists()
