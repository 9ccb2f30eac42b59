"""Section B of the collected reports: from training checkpoints to safetensors and Hugging Face's layout.

Told by a test elsewhere, of which those here are at most the view through the command:

====  ============================================================================================
R32   plan/test_sequence.py, storage/test_stream_target.py (storage that takes only the next byte)
R34   formats/safetensors/test_writer.py and test_index.py
R38   formats/rank_pt/test_reader.py::test_buffers_are_stored_once_in_the_manifest
R40   formats/safetensors/test_index.py (config says tied, and both are stored)
====  ============================================================================================
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp_of_torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard, distribute_tensor

from tests.formats.dcp.build import Checkpoint
from tests.formats.rank_pt.test_placements import rank_files as saved_by_ranks
from tests.reports.conftest import FIXTURES, Ckpt
from tests.reports.made import as_bytes, dcp, put, rank_files

FSDP2 = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"


def test_r28_shards_of_another_type(ckpt: Ckpt, tmp_path: Path) -> None:
    """R28: a sharded DCP becomes bf16 safetensors of at most 1 KB of tensors a file, with a correct index."""
    whole = {name: torch.randn(64) for name in "abcdefgh"}

    def add(made: Checkpoint) -> None:
        for number, (fqn, value) in enumerate(whole.items()):
            cuts = [(0, 30), (30, 60), (60, 64)]
            parts = [((rank + number) % 3, (lo,), value[lo:hi].clone()) for rank, (lo, hi) in enumerate(cuts)]
            made.tensor(fqn, (64,), parts)

    source, out = dcp(tmp_path / "source", add), tmp_path / "out"
    done = ckpt("export", source, out, "--dtype", "bf16", "--max-shard-size", "1KB")
    assert "cast: 8 tensors from float32 to bfloat16" in done.text
    index = json.loads((out / "model.safetensors.index.json").read_text("utf-8"))
    loaded = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    assert index["weight_map"] == {fqn: name for name, tensors in loaded.items() for fqn in tensors}
    assert index["metadata"]["total_size"] == 8 * 64 * 2
    assert all(sum(value.nbytes for value in tensors.values()) <= 1000 for tensors in loaded.values())
    found = {fqn: value for tensors in loaded.values() for fqn, value in tensors.items()}
    assert sorted(fqn for fqn in whole if torch.equal(found[fqn], whole[fqn].bfloat16())) == sorted(whole)


def test_r29_status_0_means_written(ckpt: Ckpt, tmp_path: Path) -> None:
    """R29: where a command ends with 0 the output is there, with as many tensors as it says; else not."""
    done = ckpt("export", FSDP2, tmp_path / "new" / "folder" / "out", "--json")
    assert (done.status, len(as_bytes(tmp_path / "new/folder/out"))) == (0, done.json["n_tensors"])
    (tmp_path / "file").write_text("not a folder")
    assert ckpt("export", FSDP2, tmp_path / "file" / "out").status == 4
    assert ckpt("export", FSDP2, tmp_path / "file", "--overwrite").status == 2
    assert (tmp_path / "file").read_text() == "not a folder"


@pytest.mark.parametrize(("name", "to"), [("out.pt", "safetensors"), ("out.safetensors", "torch-save")])
def test_r29_names_tell_the_format(ckpt: Ckpt, tmp_path: Path, name: str, to: str) -> None:
    """R29: no file is written under a name that says it is of another format (which is what R86 is about)."""
    refused = ckpt("export", FSDP2, tmp_path / name, "--to", to)
    assert (refused.status, f"'{name}' is no name for a" in refused.err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_r31_every_byte_is_read_once(ckpt: Ckpt, tmp_path: Path) -> None:
    """R31: exports and reshards read what they need and no more, in requests of whole pieces."""
    for words in (["--tp", "2", "--pp", "2", "--default", "replicate"], ["--dp", "3"], []):
        plan = ckpt("plan", FSDP2, "--json", *words).json
        assert plan["read_nbytes"] <= 1.05 * plan["needed_nbytes"]
        stored = ckpt("inspect", FSDP2, "--json").json
        assert plan["n_reads"] <= sum(tensor["chunks"] for tensor in stored["tensors"])
    large = torch.arange(3 << 20, dtype=torch.float32)
    source = dcp(tmp_path / "source", lambda made: made.tensor("w", large.shape, [(0, (0,), large)]))
    plan = ckpt("plan", source, "--dp", "3", "--json").json
    assert plan["read_nbytes"] / plan["n_reads"] >= 1 << 20


LAYOUTS = {"dcp": ["--tp", "2", "--pp", "2"], "rank-files": ["--mesh", "dp=2,tp=2"], "torch-ranks": ["--dp", "3"]}


@pytest.mark.parametrize(("to", "layout"), LAYOUTS.items())
def test_r32_storage_without_seek(ckpt: Ckpt, tmp_path: Path, to: str, layout: list[str]) -> None:
    """R32: object stores take no write at an offset: what is resharded into one holds what is resharded to a disk."""
    url = f"memory://r32/{tmp_path.name}"
    words = ["--to", to, *layout, "--default", "replicate"]
    assert ckpt("reshard", FSDP2, url, *words).status == 0
    assert ckpt("reshard", FSDP2, tmp_path / "disk", *words).status == 0
    assert as_bytes(url) == as_bytes(tmp_path / "disk") == as_bytes(FSDP2)
    assert ckpt("verify", url).status == 0


def test_r34_ghosts_of_an_index(ckpt: Ckpt, tmp_path: Path) -> None:
    """R34: the index names a tensor that is in no file: its three neighbours are exported, it is reported."""
    source, file = tmp_path / "source", "model-00001-of-00001.safetensors"
    source.mkdir()
    tensors = {name: torch.randn(4) for name in "abc"}
    save_file(tensors, source / file)
    index = {"metadata": {"total_size": 48}, "weight_map": dict.fromkeys(["a", "b", "c", "mtp.w"], file)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    done = ckpt("export", source, tmp_path / "out", "--max-shard-size", "20")
    assert (done.status, f"puts 'mtp.w' into {file}, which lacks it" in done.text) == (0, True)
    assert as_bytes(tmp_path / "out") == {n: ("float32", (4,), t.numpy().tobytes()) for n, t in tensors.items()}
    written = json.loads((tmp_path / "out/model.safetensors.index.json").read_text("utf-8"))
    assert sorted(written["weight_map"]) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["out.pt", "out.npz", "out.gguf"])
def test_r28_no_option_is_passed_over(ckpt: Ckpt, tmp_path: Path, name: str) -> None:
    """R28: a size of shards is refused where the format has none, instead of one large file in spite of it."""
    torch.save({"w": torch.ones(4, 4)}, tmp_path / "m.pt")
    refused = ckpt("export", tmp_path / "m.pt", tmp_path / name, "--max-shard-size", "20")
    assert (refused.status, "has no shards of a size to choose" in refused.err) == (2, True)
    assert not (tmp_path / name).exists()
    assert ckpt("export", tmp_path / "m.pt", tmp_path / name).status == 0


@pytest.mark.parametrize(
    ("tied", "says_tied", "kept"),
    [
        ("auto", False, {"head", "emb", "other"}),
        ("keep", False, {"head", "emb", "other"}),
        ("drop", False, {"emb", "other"}),
        ("drop", True, {"emb", "other"}),
    ],
)
def test_r35_tied_tensors(ckpt: Ckpt, tmp_path: Path, tied: str, says_tied: bool, kept: set[str]) -> None:
    """R35: tensors are tied by their bytes, not by their names; what happens to them is chosen, and said."""
    shared = torch.randn(6, 4)
    source = tmp_path / "model.pt"
    torch.save({"emb": shared, "head": shared, "other": torch.ones(6, 4)}, source)
    done = ckpt("export", source, tmp_path / "out.safetensors", "--tied", tied)
    assert set(load_file(tmp_path / "out.safetensors")) == kept
    dropped, written = (
        "shares its bytes with emb: head",
        "1 group of tensors share their bytes and are each written: emb = head",
    )
    assert (dropped in done.text, written in done.text) == ("head" not in kept, "head" in kept)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_r35_equal_copies(ckpt: Ckpt, tmp_path: Path) -> None:
    """R35: FSDP saves a tied vocabulary twice; equal copies are one on request, layers that happen to be equal stay."""
    table, norm = torch.randn(8, 4), torch.ones(4)
    layers = {f"model.layers.{n}.input_layernorm.weight": norm.clone() for n in range(2)}
    attention = {f"model.layers.{n}.self_attn.{p}_proj.weight": torch.eye(4) for n in range(2) for p in "qkvo"}
    mlp = {f"model.layers.{n}.mlp.gate_proj.weight": torch.ones(8, 4) for n in range(2)}
    names = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    for head, kept in ((table.clone(), False), (table + 1, True)):
        source = tmp_path / f"source-{kept}"
        state = {"model": {**names, **layers, **attention, **mlp, "lm_head.weight": head}}
        dcp_of_torch.save(state, checkpoint_id=source, no_dist=True)
        done = ckpt("export", source, tmp_path / "out.safetensors", "--tied", "drop", "--overwrite")
        written = set(load_file(tmp_path / "out.safetensors"))
        assert ("lm_head.weight" in written) is kept
        assert len(written) == 13 + kept
        said = "not tied, their values differ" if kept else "equal to model.model.embed_tokens.weight: model.lm_head"
        assert said in done.text


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("config", ["config.json", "huggingface/config.json"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_r35_a_config_beside_a_training_checkpoint(
    ckpt: Ckpt, tmp_path: Path, config: str, *, head_first: bool
) -> None:
    """R35: a model that fits no family is tied by its config too, and the embedding is what stays of a tied pair."""
    table = torch.arange(12.0).view(6, 2)
    state = {"wte.weight": table, "norm.weight": torch.ones(2), "lm_head.weight": table.clone()}
    source = tmp_path / "source"
    state = dict(reversed(state.items())) if head_first else state
    dcp_of_torch.save({"model": state}, checkpoint_id=source, no_dist=True)
    put(source, {config: b'{"tie_word_embeddings": true, "model_type": "gpt2"}'})
    done = ckpt("export", source, tmp_path / "out")
    assert "1 left out, equal to model.wte.weight: model.lm_head.weight" in done.text
    assert set(load_file(tmp_path / "out/model.safetensors")) == {"wte.weight", "norm.weight"}
    assert json.loads((tmp_path / "out/config.json").read_text("utf-8"))["tie_word_embeddings"]
    assert ckpt("verify", tmp_path / "out", "--strict").status == 0
    kept = ckpt("export", source, tmp_path / "kept", "--tied", "keep")
    assert (kept.status, set(load_file(tmp_path / "kept/model.safetensors"))) == (0, set(state))


def test_r35_the_embedding_stays(ckpt: Ckpt, tmp_path: Path) -> None:
    """R35: of one parameter saved under two names the input embedding is kept, though the head came first."""
    table = torch.arange(12.0).view(6, 2)
    torch.save({"lm_head.weight": table, "model.embed_tokens.weight": table}, tmp_path / "m.pt")
    done = ckpt("export", tmp_path / "m.pt", tmp_path / "out.safetensors", "--tied", "drop")
    assert "shares its bytes with model.embed_tokens.weight: lm_head.weight" in done.text
    assert set(load_file(tmp_path / "out.safetensors")) == {"model.embed_tokens.weight"}


def test_r35_nothing_to_drop_is_said(ckpt: Ckpt, tmp_path: Path) -> None:
    """R35: equal tensors that nothing calls one parameter are written, and a request to drop some says so."""
    torch.save({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, tmp_path / "m.pt")
    done = ckpt("export", tmp_path / "m.pt", tmp_path / "out.safetensors", "--tied", "drop")
    assert "nothing is tied: no two tensors are the same bytes of a file" in done.text
    assert set(load_file(tmp_path / "out.safetensors")) == {"a", "b"}


def test_settings_of_a_run_are_no_config_of_a_model(ckpt: Ckpt, tmp_path: Path) -> None:
    """A ``config.json`` of a trainer beside ranks' files is not carried beside the weights as if it were a model's."""
    source = rank_files(tmp_path / "source", 2, lambda _: {"w": torch.ones(2)})
    put(source, {"config.json": b'{"learning_rate": 0.1}'})
    assert ckpt("export", source, tmp_path / "out").status == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


class TestR37WrongLevel:
    """R37: pointed at the wrong level, the tool says what is there and what to type."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        """Two steps of accelerate, with the files of each rank in a folder of their own."""
        for step in (10, 20):
            shutil.copytree(FIXTURES / "deepspeed/accelerate_fsdp2/ckpt", tmp_path / f"run/checkpoint-{step}")
            shutil.copytree(FIXTURES / "deepspeed/accelerate_ranks/ckpt", tmp_path / f"run/checkpoint-{step}/per_rank")
        return tmp_path / "run"

    @pytest.mark.parametrize("place", ["checkpoint-10", "checkpoint-20/pytorch_model_fsdp_0"])
    def test_levels_that_are_one(self, ckpt: Ckpt, run: Path, place: str) -> None:
        """A step, and the model in it, have the same 21 tensors of the model."""
        done = ckpt("export", run / place, run.parent / "out", "--json")
        assert (done.status, done.json["n_tensors"]) == (0, 21)

    def test_the_run(self, ckpt: Ckpt, run: Path) -> None:
        """The folder above names its checkpoints, their format, and one of them as the thing to type."""
        refused = ckpt("export", run, run.parent / "out")
        assert refused.status == 3
        assert "checkpoint-10 (accelerate), checkpoint-20 (accelerate)" in refused.err
        assert f'give one of them, such as "{run}/checkpoint-20"' in refused.err

    @pytest.mark.parametrize(
        ("file", "kind"),
        [
            ("pytorch_model_fsdp_0/__1_0.distcp", "dcp"),
            ("pytorch_model_fsdp_0/.metadata", "dcp"),
            ("per_rank/pytorch_model_fsdp_0_rank1.bin", "torch-ranks"),
        ],
    )
    def test_single_files(self, ckpt: Ckpt, run: Path, file: str, kind: str) -> None:
        """One rank's file, and the metadata, are not taken for the whole."""
        refused = ckpt("export", run / "checkpoint-10" / file, run.parent / "out")
        folder = (run / "checkpoint-10" / file).parent
        assert (refused.status, f"one file of a {kind} checkpoint" in refused.err) == (3, True)
        assert f'give the folder: "{folder}"' in refused.err

    @pytest.mark.parametrize(
        "file",
        ["hf_sharded/ckpt/model-00002-of-00003.safetensors", "hf_pytorch_bin/ckpt/pytorch_model-00002-of-00003.bin"],
    )
    def test_one_of_several_files(self, ckpt: Ckpt, tmp_path: Path, file: str) -> None:
        """A file that is whole tensors, but not all of them, is exported with a note that says so."""
        done = ckpt("export", FIXTURES / "torch" / file, tmp_path / "out")
        assert (done.status, f"{Path(file).name} is one of 3 files" in done.text) == (0, True)

    def test_a_typing_error(self, ckpt: Ckpt, run: Path) -> None:
        """What is not there is said to be not there, with what is."""
        refused = ckpt("inspect", run / "checkpoint-30")
        assert (refused.status, "did you mean checkpoint-20 or checkpoint-10?" in refused.err) == (3, True)


def test_r38_buffers_of_all_ranks(ckpt: Ckpt, tmp_path: Path) -> None:
    """R38: a buffer of one element on each of four ranks stays one element, one of no dimension stays that."""

    def state(mesh: object) -> dict[str, object]:
        rows = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)], src_data_rank=None)
        return {"w": rows, "count": torch.tensor([7]), "scale": torch.tensor(2.5)}

    source = put(tmp_path / "source", saved_by_ranks((4,), state))
    assert ckpt("export", source, tmp_path / "out.safetensors").status == 0
    found = load_file(tmp_path / "out.safetensors")
    assert {fqn: value.tolist() for fqn, value in found.items()} == {
        "w": torch.arange(12.0).view(6, 2).tolist(),
        "count": [7],
        "scale": 2.5,
    }


@pytest.mark.parametrize(("same", "word"), [(True, "note tied-stored-twice"), (False, "warning tied-but-different")])
def test_r40_config_against_tensors(ckpt: Ckpt, tmp_path: Path, same: bool, word: str) -> None:
    """R40: the config says tied, and two tensors are stored: a remark when they are equal, a warning when not."""
    embedding = torch.randn(6, 4)
    save_file(
        {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + (not same)}, tmp_path / "m.safetensors"
    )
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}', "utf-8")
    found = ckpt("verify", tmp_path)
    assert (found.status, word in found.text) == (0, True)
    assert ckpt("verify", tmp_path, "--strict").status == (0 if same else 1)


def test_r41_space(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R41: the size is told before, to the byte; a disk too small is told at once and nothing stays on it."""
    plan = ckpt("export", FSDP2, tmp_path / "out", "--dry-run", "--json").json
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=100, used=100, free=0))
    refused = ckpt("export", FSDP2, tmp_path / "out")
    assert (refused.status, f"({plan['target_nbytes']:,} and 0 bytes)" in refused.err) == (4, True)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert ckpt("export", FSDP2, tmp_path / "out").status == 0
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) == plan["target_nbytes"]


@pytest.mark.parametrize("target", ["out.npz", "out.gguf", "out"])
def test_a_name_that_is_no_text(ckpt: Ckpt, tmp_path: Path, target: str) -> None:
    """Pickles hold half a surrogate pair in a name; formats of UTF-8 refuse it in a line, and leave nothing."""
    torch.save({"a\ud800": torch.ones(2)}, tmp_path / "m.pt")
    ran = ckpt("export", tmp_path / "m.pt", tmp_path / target)
    assert ran.status == 3
    assert "'a\\ud800" in ran.text
    assert not (tmp_path / target).exists()
