"""Section A of the collected reports: checkpoints of torch's DCP, FSDP and DTensor.

Told by a test elsewhere, of which those here are at most the view through the command:

====  ============================================================================================
R5    formats/rank_pt/test_placements.py::test_tensor_parallel_then_fsdp_on_one_dimension
R16   reports/test_optimizer.py, manifest/test_optimizer.py (spellings of one state, groups, normal form)
R17   reports/test_optimizer.py, verify/test_optimizer.py
R25   formats/dcp/test_reader.py::test_ranks_without_collectives_are_joined, acceptance (dcp_no_collectives)
R26   bench/test_dcp_scale.py (200,000 chunks), cli/test_startup.py (no torch)
====  ============================================================================================
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt_tool
from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.formats._pickle.nodes import Size
from tests.formats.dcp import build
from tests.formats.dcp.build import Checkpoint
from tests.formats.rank_pt.test_placements import rank_files as saved_by_ranks
from tests.reports.conftest import FIXTURES, Ckpt
from tests.reports.made import as_bytes, boxes, dcp, put, rank_files, saved, values

Row = tuple[int, list[int], list[int]]


@pytest.mark.parametrize("to", ["dcp", "rank-files", "torch-ranks"])
@pytest.mark.parametrize("n_ranks", [3, 4, 5])
def test_r1_last_rank_is_empty(ckpt: Ckpt, tmp_path: Path, n_ranks: int, to: str) -> None:
    """R1: 6 elements on 4 ranks leave the last one empty; they go to 3, 4 and 5 ranks, cut as torch.chunk cuts."""
    whole = torch.arange(6, dtype=torch.float32)
    parts = [(rank, (2 * rank,), whole[2 * rank : 2 * rank + 2].clone()) for rank in range(3)]
    source = put(dcp(tmp_path / "source", lambda made: made.tensor("w", (6,), parts)), {"__3_0.distcp": b""})
    ranks = ckpt("inspect", source, "--json").json["by_rank"]
    assert [(row["rank"], row["payload_nbytes"]) for row in ranks] == [(0, 8), (1, 8), (2, 8), (3, 0)]
    assert ckpt("reshard", source, tmp_path / "out", "--dp", str(n_ranks), "--to", to).status == 0
    assert boxes(tmp_path / "out", "w") == [(0, [0], [2]), (1, [2], [2]), (2, [4], [2])]
    assert values(tmp_path / "out", "w") == whole.tolist()


def test_r2_dimension_smaller_than_the_mesh(ckpt: Ckpt, tmp_path: Path) -> None:
    """R2: one row over FSDP 2 x TP 4 is on four ranks as copies and on four not at all; resharded it is stored once."""
    row = torch.arange(17, dtype=torch.float32).reshape(1, 17)
    placements = [Shard(0), Replicate()]
    files = saved_by_ranks((2, 4), lambda mesh: {"w": distribute_tensor(row, mesh, placements, src_data_rank=None)})
    source = put(tmp_path / "source", files)
    assert boxes(source, "w") == [(rank, [0, 0], [1, 17]) for rank in range(4)]
    ranks = ckpt("inspect", source, "--json").json["by_rank"]
    assert [row["rank"] for row in ranks if not row["payload_nbytes"]] == [4, 5, 6, 7]
    assert ckpt("verify", source, "--full").status == 0
    done = ckpt("reshard", source, tmp_path / "out", "--dp", "4", "--to", "rank-files")
    assert "too small for all its ranks, 3 ranks have nothing of it: w" in done.text
    assert boxes(tmp_path / "out", "w") == [(0, [0, 0], [1, 17])]
    assert values(tmp_path / "out", "w") == row.tolist()


def test_r4_uneven_chunks_in_any_order(ckpt: Ckpt, tmp_path: Path) -> None:
    """R4: chunks of 7, 1 and 2 rows, two of them by one rank, are checked for coverage and resharded."""
    w, v = torch.arange(30, dtype=torch.float32).reshape(10, 3), torch.arange(8)

    def add(made: Checkpoint) -> None:
        made.tensor("w", (10, 3), [(0, (3, 0), w[3:].clone()), (1, (0, 0), w[:1].clone()), (0, (1, 0), w[1:3].clone())])
        made.tensor("v", (8,), [(1, (5,), v[5:].clone()), (1, (0,), v[:5].clone())])

    source = dcp(tmp_path / "source", add)
    assert ckpt("verify", source, "--full").status == 0
    assert (values(source, "w"), values(source, "v")) == (w.tolist(), v.tolist())
    for name, layout in {"dp": ["--dp", "3"], "tp": ["--tp", "2", "--default", "shard0"]}.items():
        assert ckpt("reshard", source, tmp_path / name, *layout).status == 0
        assert as_bytes(tmp_path / name) == as_bytes(source)


def test_r4_a_hole_is_never_filled(ckpt: Ckpt, tmp_path: Path) -> None:
    """R4: without one of the chunks, verify names the elements, and neither reshard nor export writes anything."""
    whole = torch.arange(10.0)

    def add(made: Checkpoint) -> None:
        made.tensor("w", (10,), [(0, (3,), whole[3:].clone()), (1, (0,), whole[:1].clone())])

    source = dcp(tmp_path / "source", add)
    found = ckpt("verify", source)
    assert (found.status, "w: no chunk holds [1:3] (2 of 10 elements, 20.0%)" in found.text) == (1, True)
    for command in (["reshard", source, tmp_path / "out", "--dp", "2"], ["export", source, tmp_path / "out"]):
        refused = ckpt(*command)
        assert (refused.status, "no stored data for [1:3]" in refused.err) == (3, True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_r5_strided_shards(ckpt: Ckpt, tmp_path: Path) -> None:
    """R5: rows cut by TP 2, then by FSDP 2, come out in order; files under each other's names do not change that."""
    rows = torch.arange(64).reshape(16, 4)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    files = saved_by_ranks((2, 2), lambda mesh: {"w": distribute_tensor(rows, mesh, placements, src_data_rank=None)})
    source = put(tmp_path / "source", files)
    assert boxes(source, "w") == [(rank, [start, 0], [4, 4]) for rank, start in enumerate((0, 8, 4, 12))]
    assert ckpt("export", source, tmp_path / "out.safetensors").status == 0
    assert values(tmp_path / "out.safetensors", "w") == rows.tolist()
    one, two = (source / f"model_world_size_4_rank_{rank}.pt" for rank in (1, 2))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert "warning renamed-file x2" in ckpt("verify", source).text
    assert values(source, "w") == rows.tolist()


class TestR8StateOfRanks:
    """R8: state of one rank each, as of a data loader, cannot be resharded; nobody loses it without being asked."""

    def source(self, folder: Path, *, as_tensors: bool = False) -> Path:
        """Four ranks' positions, as objects or as tensors."""

        def add(made: Checkpoint) -> None:
            made.tensor("w", (4,), [(0, (0,), torch.arange(4.0))])
            for rank in range(4):
                if as_tensors:
                    made.tensor(f"dataloader.dp_rank_{rank}.at", (1,), [(rank, (0,), torch.tensor([rank]))])
                else:
                    made.stored(f"dataloader.dp_rank_{rank}", rank, None, None, saved(f"position {rank}".encode()))

        return dcp(folder, add)

    @pytest.mark.parametrize("as_tensors", [False, True])
    @pytest.mark.parametrize("n_ranks", [2, 8])
    def test_a_change_of_ranks_is_refused(self, ckpt: Ckpt, tmp_path: Path, n_ranks: int, as_tensors: bool) -> None:
        """Fewer and more ranks alike; the message names the entries and the hint both ways out."""
        source = self.source(tmp_path / "source", as_tensors=as_tensors)
        refused = ckpt("reshard", source, tmp_path / "out", "--dp", str(n_ranks))
        assert (refused.status, "4 entries hold the state of single ranks (dataloader.dp_rank_0" in refused.err) == (
            2,
            True,
        )
        assert f"and 1 more): 4 ranks saved them, the target has {n_ranks}, so data or random numbers" in refused.err
        assert "--rank-state drop" in refused.err
        assert "--rank-state keep" in refused.err

    @pytest.mark.parametrize("as_tensors", [False, True])
    def test_drop_says_what_it_dropped(self, ckpt: Ckpt, tmp_path: Path, as_tensors: bool) -> None:
        """The weights go on, the four entries are listed."""
        source = self.source(tmp_path / "source", as_tensors=as_tensors)
        done = ckpt("reshard", source, tmp_path / "out", "--dp", "2", "--rank-state", "drop", "--json")
        dropped = [entry["fqn"] for entry in done.json["dropped"]]
        assert [fqn.removesuffix(".at") for fqn in dropped] == [f"dataloader.dp_rank_{rank}" for rank in range(4)]
        assert list(as_bytes(tmp_path / "out")) == ["w"]
        assert ckpt("inspect", tmp_path / "out", "--json").json["blobs"] == []

    @pytest.mark.parametrize("words", [["--dp", "4"], ["--dp", "2", "--rank-state", "keep"]])
    def test_kept(self, ckpt: Ckpt, tmp_path: Path, words: list[str]) -> None:
        """As many ranks as before carry it, and so does whoever asks for it."""
        assert ckpt("reshard", self.source(tmp_path / "source"), tmp_path / "out", *words).status == 0
        shown = ckpt("inspect", tmp_path / "out", "--objects", "--json").json["blobs"]
        assert [blob["fqn"] for blob in shown] == [f"dataloader.dp_rank_{rank}" for rank in range(4)]

    @pytest.mark.parametrize("to", ["dcp", "rank-files", "torch-ranks", "torch-save"])
    def test_objects_of_ranks_stay_apart(self, ckpt: Ckpt, tmp_path: Path, to: str) -> None:
        """Objects that differ between ranks are all there, also where names are unique; equal ones are one."""
        source = rank_files(tmp_path / "source", 2, lambda _: {"w": torch.ones(2)})
        states = {f"extra_state_world_size_2_rank_{r}.pt": saved({"at": r, "lr": 0.5}) for r in range(2)}
        put(source, states)
        command = ["export", "--all"] if to == "torch-save" else ["reshard", "--dp", "2"]
        assert ckpt(command[0], source, tmp_path / "out", *command[1:], "--to", to).status == 0
        with open_checkpoint(tmp_path / "out") as checkpoint:
            found = {(blob.fqn.partition("@")[0], blob.value) for blob in checkpoint.load_blobs()}
        assert found == {("extra_state.at", 0), ("extra_state.at", 1), ("extra_state.lr", 0.5)}

    @pytest.mark.parametrize("to", ["dcp", "rank-files", "torch-ranks"])
    def test_objects_of_ranks_keep_their_values(self, ckpt: Ckpt, tmp_path: Path, to: str) -> None:
        """Ranks that saved without collectives, each an object of one name: none gets another one's."""
        for rank in range(2):
            made = Checkpoint()
            made.tensor("w", (4,), [(rank, (2 * rank,), torch.full((2,), float(rank)))])
            made.stored("at", rank, None, None, saved(["position", rank]))
            files = {name.replace(".metadata", f"__{rank}.metadata"): data for name, data in made.files().items()}
            put(tmp_path / "source", files)
        assert ckpt("reshard", tmp_path / "source", tmp_path / "out", "--dp", "2", "--to", to).status == 0
        with open_checkpoint(tmp_path / "out") as checkpoint:
            blobs = [(blob.fqn.partition("@rank"), blob) for blob in checkpoint.load_blobs()]
        ranks = [(int(name[2]) if name[2] else blob.rank, blob.value) for name, blob in blobs]
        assert sorted(ranks) == [(rank, ["position", rank]) for rank in range(2)]

    def test_random_states_of_rank_files(self, ckpt: Ckpt, tmp_path: Path) -> None:
        """Random states that each rank saved in a file of its own are such state too."""
        source = FIXTURES / "torch/verl_4r_bf16/ckpt"
        refused = ckpt("reshard", source, tmp_path / "out", "--dp", "2")
        assert (refused.status, "extra_state.rng.cpu@rank0" in refused.err) == (2, True)
        done = ckpt("reshard", source, tmp_path / "out", "--dp", "2", "--rank-state", "drop", "--json")
        assert [entry["fqn"] for entry in done.json["dropped"]] == [f"extra_state.rng.cpu@rank{r}" for r in range(4)]


class TestR10SameKey:
    """R10: ranks saved different tensors under one key, and nothing says how they join."""

    def source(self, folder: Path) -> Path:
        """``w`` differs, ``b`` does not."""
        return rank_files(folder, 2, lambda rank: {"w": torch.full((3,), float(rank)), "b": torch.ones(2)})

    def test_verify_says_so(self, ckpt: Ckpt, tmp_path: Path) -> None:
        """An error that counts the values."""
        found = ckpt("verify", self.source(tmp_path / "source"))
        assert found.status == 1
        assert "'w': same key, different bytes, no placement: 2 distinct values in 2 files" in found.text

    def test_conversions_refuse(self, ckpt: Ckpt, tmp_path: Path) -> None:
        """Nothing is written, and the hint says how to go on."""
        source = self.source(tmp_path / "source")
        for command in (["reshard", source, tmp_path / "out", "--dp", "2"], ["export", source, tmp_path / "out"]):
            refused = ckpt(*command)
            assert refused.status == 3
            assert "1 tensor differs between ranks and nothing says how they join (w)" in refused.err
            assert "--unequal 'w=concat:0'" in refused.err
            assert "--unequal first" in refused.err
            assert "--exclude w" in refused.err
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

    def test_ways_to_go_on(self, ckpt: Ckpt, tmp_path: Path) -> None:
        """The first rank's on request, or without the tensor."""
        source = self.source(tmp_path / "source")
        assert ckpt("export", source, tmp_path / "first", "--unequal", "first").status == 0
        assert values(tmp_path / "first", "w") == [0.0, 0.0, 0.0]
        assert ckpt("export", source, tmp_path / "without", "--exclude", "w").status == 0
        assert list(as_bytes(tmp_path / "without")) == ["b"]

    def test_concatenated(self, ckpt: Ckpt, tmp_path: Path) -> None:
        """One behind another on request: only what differs, and it is said."""
        source = self.source(tmp_path / "source")
        done = ckpt("reshard", source, tmp_path / "out", "--dp", "3", "--unequal", "concat:0")
        assert done.status == 0
        assert "1 tensor of ranks is put one behind another, as --unequal says: w along 0" in done.text
        assert values(tmp_path / "out", "w") == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
        assert values(tmp_path / "out", "b") == [1.0, 1.0]

    def test_other_shapes_concatenated(self, ckpt: Ckpt, tmp_path: Path) -> None:
        """Tensors whose shapes differ are kept apart by the reader, and joined by a rule for their name."""
        source = rank_files(tmp_path / "source", 3, lambda rank: {"w": torch.full((2, rank + 1), float(rank))})
        assert ckpt("export", source, tmp_path / "out", "--unequal", "w=concat:1").status == 0
        with ckpt_tool.open(tmp_path / "out") as whole:
            assert list(whole) == ["w"]
            assert whole["w"][...].tolist() == [[0.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 2
        refused = ckpt("export", source, tmp_path / "no")
        assert (refused.status, "--exclude 'w@rank*'" in refused.err) == (3, True)
        first = ckpt("reshard", source, tmp_path / "first", "--dp", "2", "--unequal", "first")
        assert (first.status, "1 tensor is the first rank's, as --unequal says: w" in first.text) == (0, True)
        assert values(tmp_path / "first", "w") == [[0.0], [0.0]]
        refused = ckpt("export", source, tmp_path / "no", "--unequal", "w=concat:0")
        assert refused.status == 2
        assert (
            "what ranks hold of 'w' does not fit together along dimension 0: float32 [2, 1], float32 [2, 2]"
            in refused.err
        )


def test_r11_partial_copy(ckpt: Ckpt, tmp_path: Path) -> None:
    """R11: files with the tensors in each are listed; of a partial copy, the missing files and what they held."""
    source, missing = FIXTURES / "torch/dcp_ddp_dedup/ckpt", {"__1_0.distcp", "__3_0.distcp"}
    rows = {row["path"]: row for row in ckpt("inspect", source, "--json").json["by_file"]}
    assert sum(row["payload_nbytes"] for row in rows.values()) == 10_759
    in_file: dict[str, set[str]] = {}
    for chunk in ckpt("inspect", source, "--json", "--shards").json["chunks"]:
        in_file.setdefault(chunk["file"], set()).add(chunk["fqn"])
    assert {path: len(fqns) for path, fqns in in_file.items()} == {path: row["n_tensors"] for path, row in rows.items()}
    copy = put(tmp_path / "copy", {p.name: p.read_bytes() for p in source.iterdir() if p.name not in missing})
    findings = ckpt("verify", copy, "--json").json["findings"]
    assert {found["file"] for found in findings if found["kind"] == "missing-file"} == missing
    assert {found["fqn"] for found in findings if found["kind"] == "lost-data"} == set.union(*map(in_file.get, missing))  # type: ignore[arg-type]
    refused = ckpt("export", copy, tmp_path / "out")
    assert (refused.status, "the file is missing" in refused.err) == (3, True)


def test_r14_r23_what_differs(ckpt: Ckpt, tmp_path: Path) -> None:
    """R14, R23: two checkpoints are compared with a list of missing, unexpected, reshaped and changed tensors."""
    one = {"w": torch.arange(10.0), "gone": torch.ones(2), "nan": torch.tensor([torch.nan]), "s": torch.ones(2, 3)}
    two = {"w": one["w"].clone(), "new": torch.ones(2), "nan": one["nan"].clone(), "s": torch.ones(2, 4)}
    two["w"][7] = 9
    torch.save(one, tmp_path / "one.pt")
    save_file(two, tmp_path / "two.safetensors")
    found = ckpt("diff", tmp_path / "one.pt", tmp_path / "two.safetensors", "--json")
    assert found.status == 1
    rows = {row["fqn"]: row for row in found.json["tensors"]}
    statuses = {fqn: row["status"] for fqn, row in rows.items() if row["status"] != "same"}
    assert statuses == {"gone": "only-a", "new": "only-b", "s": "shape", "w": "differs"}
    assert (rows["w"]["max_abs"], rows["w"]["first"]["index"]) == (2.0, [7])
    assert ckpt("diff", tmp_path / "one.pt", tmp_path / "one.pt").status == 0


def test_r14_parts_of_a_checkpoint(ckpt: Ckpt, tmp_path: Path) -> None:
    """R14: a selection is copied with a list of what stays behind; a selection of nothing is an error."""
    source = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"
    done = ckpt("reshard", source, tmp_path / "out", "--dp", "2", "--include", "model.*", "--json")
    model = {fqn: tensor for fqn, tensor in as_bytes(source).items() if fqn.startswith("model.")}
    assert as_bytes(tmp_path / "out") == model
    assert {entry["fqn"] for entry in done.json["dropped"]} == set(as_bytes(source)) - set(model)
    nothing = ckpt("reshard", source, tmp_path / "none", "--dp", "2", "--include", "modell.*")
    assert (nothing.status, "no tensor matches 'modell.*' among 134" in nothing.err) == (3, True)


def test_r19_payload_against_metadata(ckpt: Ckpt, tmp_path: Path) -> None:
    """R19: the metadata says [1571, 3], the stored tensor is [1571]: verify and every conversion say so."""

    def add(made: Checkpoint) -> None:
        made.tensor("w", (1571, 3), [(0, (0, 0), torch.zeros(1571))])
        made.change(0, sizes=Size((1571, 3)))

    source = dcp(tmp_path / "source", add)
    said = "the chunk of 'w' at [0, 0] is float32[1571, 3] in the metadata, the stored tensor is float32[1571]"
    for command, status in ((["verify", source], 1), (["export", source, tmp_path / "out"], 3)):
        found = ckpt(*command)
        assert (found.status, said in found.text) == (status, True)


def test_r20_flat_parameters(ckpt: Ckpt, tmp_path: Path) -> None:
    """R20: FSDP1's rank files are read without a job; what cannot be unflattened is listed, and never half exported."""
    sharded = FIXTURES / "torch/fsdp1_per_rank_pt_2r/ckpt"
    assert {rank for rank, _, _ in boxes(sharded, "model.model.embed_tokens.weight")} == {0, 1}
    flat = rank_files(tmp_path / "flat", 2, lambda rank: {"x._flat_param": torch.full((8,), float(rank))})
    assert "cannot unflatten: need the names and shapes" in ckpt("inspect", flat).text
    refused = ckpt("export", flat, tmp_path / "out")
    assert (refused.status, "say what is in it with --flat FILE" in refused.err) == (3, True)
    table = tmp_path / "flat.toml"
    table.write_text('[[flat]]\nname = "x._flat_param"\nparameters = [["w", [3, 4]], ["b", [3]]]\n', encoding="utf-8")
    assert ckpt("export", flat, tmp_path / "out", "--flat", table).status == 0
    assert as_bytes(tmp_path / "out") == {
        "x.w": ("float32", (3, 4), torch.tensor([0.0] * 8 + [1.0] * 4).numpy().tobytes()),
        "x.b": ("float32", (3,), torch.ones(3).numpy().tobytes()),
    }  # fmt: skip


@pytest.mark.parametrize("to", ["dcp", "rank-files", "torch-ranks", "safetensors", "torch-save"])
def test_r22_scalars_and_nothing(ckpt: Ckpt, tmp_path: Path, to: str) -> None:
    """R22: tensors of no dimension, and of no element, are listed, copied, cut, put together again and exported."""

    def add(made: Checkpoint) -> None:
        for fqn, value in {"scalar": torch.tensor(2.5), "none": torch.zeros(0), "flat": torch.zeros(0, 4)}.items():
            made.tensor(fqn, value.shape, [(0, (0,) * value.ndim, value)])
        made.tensor("one", (1,), [(1, (0,), torch.ones(1))])

    source = dcp(tmp_path / "source", add)
    shapes = {row["fqn"]: row["shape"] for row in ckpt("inspect", source, "--json").json["tensors"]}
    assert shapes == {"scalar": [], "none": [0], "flat": [0, 4], "one": [1]}
    assert ckpt("verify", source, "--full").status == 0
    out = tmp_path / "out"
    if to in {"safetensors", "torch-save"}:
        assert ckpt("export", source, out, "--to", to).status == 0
    else:
        assert ckpt("reshard", source, out, "--dp", "3", "--to", to).status == 0
    assert as_bytes(out) == as_bytes(source)
    back = ckpt("reshard", out, tmp_path / "back", "--tp", "2", "--default", "shard0", "--to", "rank-files")
    assert back.status == 0
    assert as_bytes(tmp_path / "back") == as_bytes(source)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_r22_a_file_of_no_element(ckpt: Ckpt, tmp_path: Path) -> None:
    """R22: with a file for each item, that of a tensor without elements is known, and one of an earlier save is not."""
    state = {"w": torch.ones(2), "none": torch.empty(0, 4)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "c", single_file_per_rank=False), no_dist=True)
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 2
    assert ckpt("verify", tmp_path / "c", "--full", "--strict").status == 0
    put(tmp_path / "c", {"__0_7.distcp": saved(torch.ones(1))})
    found = ckpt("verify", tmp_path / "c", "--full", "--strict")
    assert (found.status, "__0_7.distcp" in found.out) == (1, True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_inside_an_object_are_never_lost(ckpt: Ckpt, tmp_path: Path) -> None:
    """A state dict that was not flattened is one object: a format of tensors alone refuses it, DCP takes it along."""
    state, planner = {"model": {"w": torch.ones(2)}, "step": 3}, DefaultSavePlanner(flatten_state_dict=False)
    save(state, checkpoint_id=tmp_path / "source", no_dist=True, planner=planner)
    assert "w: <tensor float32 [2]>" in ckpt("inspect", tmp_path / "source", "--objects").text
    refused = ckpt("export", tmp_path / "source", tmp_path / "out")
    assert "no tensors, only 2 other objects" in refused.err
    assert "format_utils dcp_to_torch SRC OUT.pt" in refused.err
    refused = ckpt("export", tmp_path / "source", tmp_path / "out", "--all")
    assert (refused.status, "'model' holds 1 tensor, which would be lost" in refused.err) == (3, True)
    assert ckpt("reshard", tmp_path / "source", tmp_path / "moved", "--dp", "2").status == 0
    assert ckpt("diff", tmp_path / "source", tmp_path / "moved", "--everything").status == 0
    save(state | {"w": torch.ones(3)}, checkpoint_id=tmp_path / "mixed", no_dist=True, planner=planner)
    assert (
        "left out, an object with 1 tensor inside: model" in ckpt("export", tmp_path / "mixed", tmp_path / "out").text
    )


def test_metadata_of_torch_1_13(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of DCP lived in another module before torch 2.0."""
    old = "torch.distributed._shard.checkpoint.metadata"
    monkeypatch.setattr(build.record, "__defaults__", (old,))
    source = put(tmp_path / "source", build.row_cut().files())
    assert old.encode() in (source / ".metadata").read_bytes()
    assert ckpt("verify", source, "--full").status == 0
    assert values(source, "w") == torch.arange(18.0).reshape(6, 3).tolist()
