"""Readers of safetensors folders on checkpoints that torch, transformers and PEFT wrote."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.formats.base import BoxTable, WriteRequest
from ckpt_tool.formats.safetensors import dcp_hf, index_file, rank_files, rank_writer, single
from tests.formats.conformance import FIXTURES, Case, ReaderTests, assemble, chunk_bytes, truth_of
from tests.formats.safetensors.places import file_bytes, model_bytes, opened, source_and_store, written

TORCH, DEEPSPEED = FIXTURES / "torch", FIXTURES / "deepspeed"


def _untied(fqn: str) -> str | None:
    """The truth has both ends of a tied pair; the files have the embedding."""
    return None if fqn == "lm_head.weight" else fqn


def _saved_name(fqn: str) -> str:
    """PEFT saves without the adapter's name, which live parameters have in them."""
    return fqn.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def _without_scalar(fqn: str) -> str | None:
    """Leaves out what torch's consolidation damaged, see `test_torch_consolidation_loses_scalars`."""
    return None if fqn == "buf_scalar" else fqn


def _case(  # what differs between the cases below
    name: str,
    folder: str,
    max_read_requests: int,
    *,
    below: str = "ckpt",
    rename: Callable[[str], str | None] = str,
    without: tuple[str, ...] = (),
) -> Case:
    return Case(
        name,
        FIXTURES / folder / below,
        truth_of(FIXTURES / folder, rename),
        without_truth=without,
        max_read_requests=max_read_requests,
        max_resolve_requests=0,
    )


class TestSafetensors(ReaderTests):
    """One file: transformers' single model, and a PEFT adapter."""

    reader = single.READER
    reader_import = "ckpt_tool.formats.safetensors.single:READER"
    cases = (
        _case("hf_single", "torch/hf_single", 1),
        _case("named", "torch/hf_single", 1, below="ckpt/model.safetensors"),
        _case("peft_lora", "deepspeed/peft_lora", 2, rename=_saved_name),
    )


class TestSafetensorsIndex(ReaderTests):
    """Several files with an index: transformers', and those that torch consolidated."""

    reader = index_file.READER
    reader_import = "ckpt_tool.formats.safetensors.index_file:READER"
    cases = (
        _case("hf_sharded", "torch/hf_sharded", 4),
        _case("hf_st_tied", "deepspeed/hf_st_tied", 4, rename=_untied),
        _case(
            "consolidated",
            "torch/hf_dcp_consolidated",
            3,
            rename=_without_scalar,
            without=("buf_scalar",),
        ),
    )


class TestDcpHf(ReaderTests):
    """Shards of torch's Hugging Face writer, by themselves and below consolidated files."""

    reader = dcp_hf.READER
    reader_import = "ckpt_tool.formats.safetensors.dcp_hf:READER"
    cases = (
        _case("hf_dcp_sharded", "torch/hf_dcp_sharded", 4),
        _case("sharded", "torch/hf_dcp_consolidated", 8, below="ckpt/sharded"),
    )


class TestRankFiles(ReaderTests):
    """Rank files of version 1, as they were written first: three ranks, one of which lacks a tensor, and an object."""

    reader = rank_files.READER
    reader_import = "ckpt_tool.formats.safetensors.rank_files:READER"
    cases = (_case("rank_files_v1", "ckpt/rank_files_v1", 4),)


def test_rank_files_of_version_1_are_frozen() -> None:
    """Laid out again from its own manifest, the first checkpoint of the format comes out byte for byte."""
    location = FIXTURES / "ckpt/rank_files_v1/ckpt"
    with opened(location) as source:
        manifest = rank_files.READER.read(source)
        blobs = rank_files.READER.load_blobs(source, manifest, range(len(manifest.blobs)))
        payloads = [chunk_bytes(source.store, manifest, manifest.chunks, row) for row in range(len(manifest.chunks))]
    chunks = manifest.chunks
    asked = WriteRequest(
        tensors=manifest.tensors,
        boxes=BoxTable(chunks.tensor, chunks.offsets, chunks.sizes, chunks.rank),
        world_size=3,
        blobs=blobs,
        mesh_axes=manifest.mesh.axes if manifest.mesh else (),
        mesh_sizes=manifest.mesh.sizes if manifest.mesh else (),
        info=manifest.info,
    )
    expected = {p.relative_to(location).as_posix(): p.read_bytes() for p in location.rglob("*") if p.is_file()}
    actual = written(rank_writer.WRITER.lay_out(asked), payloads)
    assert sorted(actual) == sorted(expected)
    assert actual == expected


def test_torch_consolidation_loses_scalars() -> None:
    """Torch 2.13's consolidation zeroes tensors without dimensions; ``check`` finds it by the shards beside them."""
    with opened(TORCH / "hf_dcp_consolidated/ckpt") as source:
        manifest = index_file.READER.read(source)
        consolidated = assemble(source.store, manifest, manifest.chunks, "buf_scalar").data
        found = [f for f in index_file.READER.check(source, manifest) if f.kind == "differs-from-shard"]
    assert consolidated == bytes(4)
    assert truth_of(TORCH / "hf_dcp_consolidated")()["buf_scalar"].data == b"\x00\x00P@"
    assert [f.fqn for f in found] == ["buf_scalar"]
    assert "sharded/shard-00002-model-00001-of-00002.safetensors" in found[0].message


def test_a_named_index_reads_its_siblings() -> None:
    """Naming the index is naming the folder."""
    with opened(TORCH / "hf_sharded/ckpt/model.safetensors.index.json") as source:
        assert index_file.READER.probe(source).confidence > single.READER.probe(source).confidence
        manifest = index_file.READER.read(source)
        actual = {f: assemble(source.store, manifest, manifest.chunks, f) for f in manifest.tensors.fqns}
    assert actual == truth_of(TORCH / "hf_sharded")()


def test_one_file_of_a_set_is_read_with_a_note() -> None:
    """A file of a numbered set holds whole tensors; the note says that there are more."""
    with opened(TORCH / "hf_sharded/ckpt/model-00002-of-00003.safetensors") as source:
        manifest = single.READER.read(source)
        assert single.READER.probe(source).confidence > index_file.READER.probe(source).confidence
    assert manifest.notes[0] == (
        "model-00002-of-00003.safetensors is one of 3 files; the index beside it names the others: open the folder"
    )


def test_one_shard_of_torch_is_not_taken_for_a_checkpoint() -> None:
    """A shard alone has parts of tensors whose whole shape nobody knows: no reader takes it."""
    with opened(TORCH / "hf_dcp_sharded/ckpt/shard-00002-model-00001-of-00001.safetensors") as source:
        confidences = [r.probe(source).confidence for r in (single.READER, index_file.READER, dcp_hf.READER)]
    assert max(confidences) <= 0.5


def test_companions_go_into_info() -> None:
    """What a model is comes from ``config.json``, what an adapter is from ``adapter_config.json``."""
    with opened(DEEPSPEED / "hf_st_tied/ckpt") as source:
        model = index_file.READER.read(source)
    with opened(DEEPSPEED / "peft_lora/ckpt") as source:
        adapter = single.READER.read(source)
    stated = {key: model.info[key] for key in ("model_type", "tie_word_embeddings", "torch_dtype")}
    assert stated == {"model_type": "llama", "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    assert model.info["config"]["num_key_value_heads"] == 2
    assert any("tied to 'model.embed_tokens.weight' (config.json" in note for note in model.notes)
    assert (adapter.info["adapter"]["r"], adapter.info["adapter"]["alpha"]) == (3, 6)
    assert any(note.startswith("a PEFT adapter (r=3, alpha=6)") for note in adapter.notes)


def test_consolidated_files_are_preferred_to_their_shards() -> None:
    """With whole files above them, ``sharded/`` is left out, and said to be."""
    with opened(TORCH / "hf_dcp_consolidated/ckpt") as source:
        manifest = index_file.READER.read(source)
        assert index_file.READER.probe(source).confidence > 0.5 > dcp_hf.READER.probe(source).confidence
    assert all("/" not in path for path in manifest.files.paths)
    assert "sharded/ holds the same tensors in 8 pieces and was left out" in manifest.notes


def test_shapes_and_dtypes_cost_no_more_than_the_start_of_each_file() -> None:
    """R98: a large file is described by one read of 64 KiB."""
    listed = {"big": {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}}
    memory, store = source_and_store({"model.safetensors": file_bytes(listed, bytes(1 << 20))})
    assert single.READER.read(memory).tensors.record(0).shape == (1 << 20,)
    assert [(c.offset, c.length) for c in store.calls] == [(0, 64 << 10)]


def test_a_long_header_costs_a_second_read() -> None:
    """What is missing of a header is read in one more request; nothing is read twice."""
    tensors = {f"layer.{i}.{'x' * 100}": b"ab" for i in range(1000)}
    memory, store = source_and_store({"a.safetensors": model_bytes(tensors), "b.safetensors": model_bytes({"y": b"c"})})
    assert len(index_file.READER.read(memory).tensors) == 1001
    reads = sorted((c.path, c.offset) for c in store.calls)
    assert reads == [("a.safetensors", 0), ("a.safetensors", 64 << 10), ("b.safetensors", 0)]


def test_a_folder_of_the_trainer(tmp_path: Path) -> None:
    """The model is read; what the other files are is told, and the step."""
    folder = shutil.copytree(TORCH / "hf_single/ckpt", tmp_path / "checkpoint-40")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"lr": 0.1}, folder / name)
    (folder / "trainer_state.json").write_text('{"global_step": 40, "log_history": []}')
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.manifest.info["step"] == 40
        note = next(note for note in checkpoint.manifest.notes if "Trainer" in note)
    assert "optimizer.pt (the optimizer's state, by number of parameter), scheduler.pt" in note
    assert note.endswith("rng_state.pth (random states), training_args.bin (arguments of the run)")
