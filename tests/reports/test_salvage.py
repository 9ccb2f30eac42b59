"""Damaged checkpoints, as people met them: what is kept, what to fetch again, what another copy says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ckpt_tool.api.checkpoint import open_checkpoint
from tests.formats.megatron.places import CHECKPOINTS
from tests.reports.conftest import FIXTURES, Ckpt
from tests.reports.made import as_bytes

DCP = FIXTURES / "torch/dcp_fsdp2_tp_2x2/ckpt"
HF = FIXTURES / "torch/hf_sharded/ckpt"


def test_command(tmp_path: Path, ckpt: Ckpt) -> None:
    """Status 1 when something is lost; the list is in the result."""
    torch.save({f"w{i}": torch.full((9, 9), float(i)) for i in range(6)}, tmp_path / "whole.pt")
    raw = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(raw[:-200])
    assert ckpt("verify", tmp_path / "whole.pt", "--salvage", tmp_path / "c.pt").status == 0
    ran = ckpt("verify", tmp_path / "a.pt", "--salvage", tmp_path / "b.pt", "--json")
    assert ran.status == 0
    assert ran.json["lost"] == []
    (tmp_path / "a.pt").write_bytes(raw[:2500])
    ran = ckpt("verify", tmp_path / "a.pt", "--salvage", tmp_path / "d.pt")
    assert ran.status == 1
    assert "lost: " in ran.text
    assert ckpt("verify", tmp_path / "a.pt", "--salvage", tmp_path / "b.pt").status == 2


def test_plan_fetch(tmp_path: Path, ckpt: Ckpt) -> None:
    """Missing files whole, a wrong payload by its bytes, a cut file from where it ends; nothing if nothing is wrong."""
    shutil.copytree(DCP, tmp_path / "d")
    assert ckpt("verify", tmp_path / "d", "--plan-fetch", "--full", "--quiet").out == ""
    (tmp_path / "d/__1_0.distcp").unlink()
    cut = tmp_path / "d/__2_0.distcp"
    cut.write_bytes(cut.read_bytes()[:5000])
    with open_checkpoint(DCP) as checkpoint:
        manifest = checkpoint.resolve()
        chunks = [manifest.chunks.record(row, manifest.tensors, manifest.files) for row in range(len(manifest.chunks))]
    where = next(c.where for c in chunks if c.where.path == "__3_0.distcp" and c.where.length > 100)
    path = tmp_path / "d" / where.path
    raw = bytearray(path.read_bytes())
    raw[where.offset] ^= 1
    path.write_bytes(raw)
    ran = ckpt("verify", tmp_path / "d", "--full", "--plan-fetch")
    assert ran.status == 1
    assert ran.out.splitlines() == [
        "__1_0.distcp", "__2_0.distcp 5000-", f"__3_0.distcp {where.offset}-{where.end - 1}",
    ]  # fmt: skip
    listed = ckpt("verify", tmp_path / "d", "--full", "--plan-fetch", "--json").json["fetch"]
    assert listed[0] == {"file": "__1_0.distcp", "offset": None, "length": None}
    assert listed[1] == {"file": "__2_0.distcp", "offset": 5000, "length": None}


def test_against(tmp_path: Path, ckpt: Ckpt) -> None:
    """A copy in another format is held against its source; one other element is an error that names it."""
    assert ckpt("export", HF, tmp_path / "out.pt", "--names", "source").status == 0
    assert ckpt("verify", tmp_path / "out.pt", "--against", HF).status == 0
    save_file({"a": np.zeros(4, "f4"), "b": np.zeros(2, "f4")}, tmp_path / "one.safetensors")
    save_file({"a": np.array([0, 0, 3, 0], "f4"), "c": np.zeros(2, "f4")}, tmp_path / "two.safetensors")
    ran = ckpt("verify", tmp_path / "one.safetensors", "--against", tmp_path / "two.safetensors", "--json")
    assert ran.status == 1
    found = {finding["kind"]: finding for finding in ran.json["findings"]}
    assert found["differs"]["fqn"] == "a"
    assert "in 1 of 4 elements, the first at [2]" in found["differs"]["message"]
    assert {found["only-here"]["severity"], found["only-there"]["severity"]} == {"warning"}
    assert ckpt("verify", tmp_path / "one.safetensors", "--against", HF, "--quick").status == 2


def test_cut_files_of_every_kind(tmp_path: Path, ckpt: Ckpt) -> None:
    """A safetensors file and a stream of torch before 1.6 that were cut: what lies before the cut is kept."""
    tensors = {f"w{i}": torch.full((9, 9), float(i)) for i in range(6)}
    save_file({name: each.numpy() for name, each in tensors.items()}, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    for name in ("a.safetensors", "a.pt"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-400])
        assert "--salvage OUT" in ckpt("verify", path).text
        out = tmp_path / f"out-{name}"
        ran = ckpt("verify", path, "--salvage", out, "--json")
        assert ran.status == 1
        kept = dict.fromkeys(ran.json["kept"])
        assert len(kept) == 4
        assert {each["fqn"] for each in ran.json["lost"]} == set(tensors) - set(kept)
        with open_checkpoint(out) as checkpoint:
            assert all(np.array_equal(checkpoint[fqn][:], tensors[fqn].numpy()) for fqn in kept)


def test_metadata_made_of_blobs(tmp_path: Path, ckpt: Ckpt) -> None:
    """Safetensors blobs in DCP's files say names and places: all is back, and what cannot be known is said."""
    source = FIXTURES / "torch/dcp_safetensors/ckpt"
    shutil.copytree(source, tmp_path / "d", ignore=shutil.ignore_patterns(".metadata"))
    ran = ckpt("verify", tmp_path / "d", "--salvage", tmp_path / "out")
    assert ran.status == 1
    assert "no whole shapes" in ran.text
    assert ckpt("diff", source, tmp_path / "out").status == 0
    cut = tmp_path / "d/__2_0.distcp"
    cut.write_bytes(cut.read_bytes()[:-500])
    ran = ckpt("verify", tmp_path / "d", "--salvage", tmp_path / "less", "--json")
    assert 0 < len(ran.json["lost"]) < len(ran.json["kept"])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(("share", "n_whole"), [(0.4, 2), (0.97, 6)])
def test_a_cut_npz(tmp_path: Path, ckpt: Ckpt, save: Callable[..., None], share: float, n_whole: int) -> None:
    """R47: a zip of numpy's, whose headers tell what is whole; the names of what was cut off are not known."""
    arrays = {f"a{n}": np.random.default_rng(n).standard_normal((40, 5)).astype("f4") for n in range(6)}
    save(tmp_path / "in.npz", **arrays)
    raw = (tmp_path / "in.npz").read_bytes()
    (tmp_path / "in.npz").write_bytes(raw[: int(len(raw) * share)])
    refused = ckpt("inspect", tmp_path / "in.npz")
    assert (refused.status, f"{n_whole} members are whole" in refused.err) == (3, True)
    saved = ckpt("verify", tmp_path / "in.npz", "--salvage", tmp_path / "out.npz", "--json")
    assert (saved.status, saved.json["kept"]) == (1, [f"a{n}" for n in range(n_whole)])
    assert "not known" in saved.json["unknown"][0]
    with np.load(tmp_path / "out.npz") as found:
        assert all(np.array_equal(found[name], arrays[name]) for name in saved.json["kept"])


def test_a_cut_gguf(tmp_path: Path, ckpt: Ckpt) -> None:
    """R47: the header names what the rest of a cut file lacks."""
    arrays: dict[str, Any] = {f"a{n}": np.full((8, 5), n, "f4") for n in range(4)}
    np.savez(tmp_path / "in.npz", **arrays)
    assert ckpt("export", tmp_path / "in.npz", tmp_path / "in.gguf").status == 0
    raw = (tmp_path / "in.gguf").read_bytes()
    (tmp_path / "in.gguf").write_bytes(raw[:-170])
    assert "--salvage OUT.gguf" in ckpt("verify", tmp_path / "in.gguf").err
    saved = ckpt("verify", tmp_path / "in.gguf", "--salvage", tmp_path / "out.gguf", "--json")
    assert (saved.status, [each["fqn"] for each in saved.json["lost"]]) == (1, ["a2", "a3"])
    assert {fqn: data for fqn, (_, _, data) in as_bytes(tmp_path / "out.gguf").items()} == {
        fqn: arrays[fqn].tobytes() for fqn in ("a0", "a1")
    }


@pytest.mark.parametrize(
    "damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:9000])]
)
def test_a_rank_of_megatron_without_its_optimizer(tmp_path: Path, ckpt: Ckpt, damage: Callable[[Path], object]) -> None:
    """R47, R11: the optimizer of one rank is gone or cut: weights and what the other ranks have are kept."""
    whole = CHECKPOINTS / "legacy_t2p2/ckpt"
    shutil.copytree(whole, tmp_path / "in")
    damage(tmp_path / "in/iter_0000010/mp_rank_01_001/distrib_optim.pt")
    checked = ckpt("verify", tmp_path / "in")
    assert (checked.status, "iter_0000010/mp_rank_01_001/distrib_optim.pt" in checked.text) == (1, True)
    assert "mp_rank_01_001/distrib_optim.pt" in ckpt("verify", tmp_path / "in", "--plan-fetch").out
    refused = ckpt("reshard", tmp_path / "in", tmp_path / "no", "--tp", "1")
    assert (refused.status, "mp_rank_01_001/distrib_optim.pt" in refused.err) == (3, True)
    assert ckpt("verify", tmp_path / "in", "--salvage", tmp_path / "out").status == 1
    truth, kept = as_bytes(whole), as_bytes(tmp_path / "out")
    assert {fqn for fqn in truth if fqn.startswith("model.")} <= kept.keys() < truth.keys()
    assert all(truth[fqn] == value for fqn, value in kept.items())


@pytest.mark.parametrize(
    ("fixture", "gone"),
    [
        ("old012_zarr_t2p1d1/ckpt/iter_0000010", "rng_state/shard_0.1_1.2.pt"),
        ("ds_z2_bf16/ckpt/global_step3_universal", "zero/emb.weight/exp_avg_sq.pt"),
    ],
)
def test_nothing_is_lost_is_said_of_whole_checkpoints_alone(
    tmp_path: Path, ckpt: Ckpt, fixture: str, gone: str
) -> None:
    """W13: a file that only others tell of, and whose tensors or objects have no entry, is not passed over."""
    source = CHECKPOINTS / fixture if fixture.startswith("old") else FIXTURES / "deepspeed" / fixture
    shutil.copytree(source, tmp_path / "in")
    assert ckpt("verify", tmp_path / "in", "--salvage", tmp_path / "all").status == 0
    (tmp_path / "in" / gone).unlink()
    saved = ckpt("verify", tmp_path / "in", "--salvage", tmp_path / "out", "--json")
    assert (saved.status, gone in " ".join(saved.json["unknown"])) == (1, True)


@pytest.mark.parametrize("stage", ["ds_z2_bf16", "ds_z3_bf16"])
def test_a_universal_checkpoint_without_model_states(tmp_path: Path, ckpt: Ckpt, stage: str) -> None:
    """R79, R82: nothing names the parameters then: told by every command, with the file to fetch."""
    source = FIXTURES / "deepspeed" / stage / "ckpt/global_step3_universal"
    shutil.copytree(source, tmp_path / "in", ignore=shutil.ignore_patterns("*model_states.pt"))
    for words in (["inspect"], ["verify"], ["verify", "--full"], ["export", tmp_path / "out"]):
        ran = ckpt(words[0], tmp_path / "in", *words[1:])
        assert (ran.status, "no model states, which name the parameters" in ran.err) == (3, True)
    assert "no model states" in ckpt("ls", tmp_path / "in").text
    assert ckpt("verify", tmp_path / "in", "--plan-fetch").out == "mp_rank_00_model_states.pt\n"


@pytest.mark.parametrize("n_left", [0, 3000])
def test_megatron_without_its_common_state(tmp_path: Path, ckpt: Ckpt, n_left: int) -> None:
    """R47, R11: the file of the first rank, in which the arguments lie as well: what other files hold is kept."""
    whole = CHECKPOINTS / "td_full_t2p2d2/ckpt"
    shutil.copytree(whole, tmp_path / "in")
    path = tmp_path / "in/iter_0000010/__0_0.distcp"
    path.write_bytes(path.read_bytes()[:n_left])
    assert ckpt("verify", tmp_path / "in").status == 3
    saved = ckpt("verify", tmp_path / "in", "--salvage", tmp_path / "out", "--json")
    assert saved.status == 1
    truth, kept = as_bytes(whole), as_bytes(tmp_path / "out")
    assert len(kept) == 12
    assert all(truth[fqn] == value for fqn, value in kept.items())
    assert {each["fqn"] for each in saved.json["lost"]} > truth.keys() - kept.keys()


def test_cut_in_a_folder_of_an_iteration(tmp_path: Path, ckpt: Ckpt) -> None:
    """R47: what lies before the cut of a rank's file is kept there, as it is in a file by itself."""
    whole = CHECKPOINTS / "legacy_t2p2/ckpt"
    kept = []
    for share in (0.1, 0.6, 0.9):
        name = f"{share}"
        shutil.copytree(whole, tmp_path / name)
        path = tmp_path / name / "iter_0000010/mp_rank_00_001/distrib_optim.pt"
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
        assert ckpt("verify", tmp_path / name, "--salvage", tmp_path / f"out-{name}").status == 1
        kept.append(len(as_bytes(tmp_path / f"out-{name}")))
    assert kept == sorted(set(kept))
