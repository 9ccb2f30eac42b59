"""The reader of Orbax on what Orbax and TensorStore wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import FormatError, NotFound, Unsupported
from ckpt_tool.formats.orbax.reader import READER
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import Case, ReaderTests, source_of, stored_bytes
from tests.formats.zoo import CHECKPOINTS, case
from tests.reports.made import as_bytes
from tests.storage.recording import RecordingStore

OPTIONS: dict[str, Any] = {"max_read_requests": 12, "max_resolve_requests": 0}


class TestOrbax(ReaderTests):
    """Databases with zarr 2 and 3, compressed and not, several items, a run's step, a tall tree."""

    reader = READER
    reader_import = "ckpt_tool.formats.orbax.reader:READER"
    cases = (
        case("orbax_zarr2", "ckpt/3", **OPTIONS),
        case("orbax_zarr3", "ckpt/3", **OPTIONS),
        case("orbax_plain", "ckpt/3", **OPTIONS),
        case("orbax_files", "ckpt/3", max_read_requests=40, max_resolve_requests=0),
        case("orbax_manager", "ckpt/3", max_read_requests=20, max_resolve_requests=0),
        case("orbax_default", "ckpt/7", **OPTIONS),
        case("ocdbt_tall", max_read_requests=200, max_resolve_requests=0),
    )


class TestNodesNotCompressed(ReaderTests):
    """A database whose nodes are not compressed: small values are byte ranges of nodes."""

    reader = READER
    reader_import = "ckpt_tool.formats.orbax.reader:READER"
    cases = (case("ocdbt_raw", max_read_requests=200, max_resolve_requests=0),)

    def test_read_takes_no_payload(self, case: Case, store: RecordingStore) -> None:
        """The checksum of a node covers the values in it, so that other payload is noticed; none is decoded."""
        manifest = self.reader.read(source_of(store))
        codecs = {entry.codec for entry in manifest.files}
        assert {"zstd", "zlib", None} <= codecs
        assert not any("slice" in codec for codec in codecs if codec)


def copied(name: str, folder: Path) -> Path:
    """A checkpoint that may be changed."""
    return shutil.copytree(CHECKPOINTS / name / "ckpt", folder / name)


def test_keys_that_have_dots_stay_apart() -> None:
    """``layers.1`` is one key; positions of lists are numbers; what is no array is an object."""
    with open_checkpoint(CHECKPOINTS / "orbax_zarr2/ckpt/3") as checkpoint:
        assert checkpoint.manifest.tensor("params.layers.1.scale").path == ("params", "layers.1", "scale")
        assert checkpoint.manifest.tensor("lst.0").path == ("lst", 0)
        assert checkpoint.objects() == {"name": "run", "none": None, "opt_state.1": {}}
        assert "PyTreeCheckpointHandler" in checkpoint.manifest.info["item_handlers"]


def test_items_of_a_manager() -> None:
    """Two trees keep their items' names, a JSON item is an object."""
    with open_checkpoint(CHECKPOINTS / "orbax_manager/ckpt/3") as checkpoint:
        assert {fqn.partition(".")[0] for fqn in checkpoint} == {"params", "rest"}
        assert checkpoint.objects()["meta"] == {"lr": 0.1}


def test_the_state_of_a_random_generator_is_told() -> None:
    """A key of JAX is an array of integers with a note of its generator."""
    with open_checkpoint(CHECKPOINTS / "orbax_default/ckpt/7") as checkpoint:
        assert checkpoint.manifest.info["random_keys"] == {"rng": "threefry2x32"}


def test_a_run_is_pointed_into(tmp_path: Path) -> None:
    """The folder above the steps names them."""
    copied("orbax_manager", tmp_path)
    with pytest.raises(NotFound, match=r"its folders hold some.*orbax_manager/3 \(orbax\)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["not JSON", "{}", '{"a": "b"}', '{"YQ==": "{\\"sharding_type\\": 3}"}'])
def test_a_sharding_that_makes_no_sense_is_left_out(damage: str, tmp_path: Path) -> None:
    """It changes nothing about where bytes lie."""
    step = copied("orbax_zarr2", tmp_path) / "3"
    (step / "_sharding").write_text(damage)
    with open_checkpoint(step) as checkpoint:
        assert checkpoint.manifest.mesh is None


def test_export_is_what_was_saved(tmp_path: Path) -> None:
    """Weights of a database as one safetensors file."""
    export(CHECKPOINTS / "orbax_zarr3/ckpt/3", tmp_path / "m.safetensors", include=["params.*"], names="source")
    ours, truth = as_bytes(tmp_path / "m.safetensors"), as_bytes(CHECKPOINTS / "orbax_zarr3/ckpt/3")
    assert ours == {fqn: truth[fqn] for fqn in truth if fqn.startswith("params.")}


def test_a_missing_chunk_is_an_error(tmp_path: Path) -> None:
    """Orbax stores chunks of zeros too, and says so: one that is not there was lost."""
    step = copied("orbax_files", tmp_path) / "3"
    (step / "params.layers_0.kernel/1.0").unlink()
    report = verify(step)
    assert not report.is_ok
    assert ("missing-chunk", "params.layers_0.kernel") in {(f.kind, f.fqn) for f in report.findings}


def test_chunks_left_out_are_zeros_where_nothing_says_otherwise(tmp_path: Path) -> None:
    """Zarr leaves out chunks of the fill value; a note says how many."""
    step = copied("orbax_files", tmp_path) / "3"
    document = json.loads((step / "_METADATA").read_text())
    document["store_array_data_equal_to_fill_value"] = False
    (step / "_METADATA").write_text(json.dumps(document))
    (step / "params.layers_0.kernel/1.0").unlink()
    with open_checkpoint(step) as checkpoint:
        found = checkpoint["params.layers_0.kernel"][:]
        assert "1 chunk is not stored, which stands for the fill value 0" in checkpoint.manifest.notes[0]
    with open_checkpoint(CHECKPOINTS / "orbax_files/ckpt/3") as checkpoint:
        truth = checkpoint["params.layers_0.kernel"][:].copy()
    truth[3:, :5] = 0
    assert np.array_equal(found, truth)
    assert verify(step, level="full").is_ok


def test_a_leaf_without_an_array(tmp_path: Path) -> None:
    """The tree tells of arrays that are not stored, and the store of arrays that the tree does not tell."""
    step = copied("orbax_files", tmp_path) / "3"
    (step / "big").rename(step / "other")
    kinds = {(f.kind, f.fqn) for f in verify(step).findings}
    assert {("missing-tensor", "big"), ("stray-tensor", "other")} <= kinds


def test_leaves_of_one_name(tmp_path: Path) -> None:
    """Orbax stores ``{"x.y": a, "x": {"y": b}}`` as one array, the last: that one is lost is an error, and noted."""
    step = copied("orbax_files", tmp_path) / "3"
    tree = json.loads((step / "_METADATA").read_text("utf-8"))
    tree["tree_metadata"]["('b', 'ig')"] = {
        **tree["tree_metadata"]["('big',)"],
        "key_metadata": [{"key": "big", "key_type": 2}],
    }
    (step / "_METADATA").write_text(json.dumps(tree), "utf-8")
    assert [(f.kind, f.fqn) for f in verify(step).findings if f.severity is Severity.ERROR] == [
        ("missing-tensor", "big")
    ]
    with open_checkpoint(step) as checkpoint:
        assert any("several leaves of the tree are called 'big'" in note for note in checkpoint.manifest.notes)


def test_unfinished_saves_are_refused(tmp_path: Path) -> None:
    """Processes wrote and nobody put it together; an item has still its temporary name."""
    step = copied("orbax_zarr2", tmp_path) / "3"
    (step / "manifest.ocdbt").unlink()
    with pytest.raises(NotFound, match="never put together"):
        open_checkpoint(step)
    step = copied("orbax_manager", tmp_path) / "3"
    (step / "params").rename(step / "params.orbax-checkpoint-tmp")
    with pytest.raises(NotFound, match=r"did not finish: params\.orbax-checkpoint-tmp"):
        open_checkpoint(step)


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """Each part is decoded once for a copy that reads it once, whatever the budget."""
    source = CHECKPOINTS / "orbax_zarr2/ckpt/3"
    export(source, tmp_path / "m.safetensors", everything=False, memory_budget_bytes=1 << 12, names="source")
    assert as_bytes(tmp_path / "m.safetensors").items() <= as_bytes(source).items()


def edited(text: bytes, name: str = "orbax_files") -> MemoryStore:
    """The checkpoint with another description of ``params.emb.embedding``."""
    files = stored_bytes(CHECKPOINTS / name / "ckpt/3")
    return MemoryStore({**files, "params.emb.embedding/.zarray": text})


def described(**fields: Any) -> bytes:
    """A description of an array."""
    sound = {
        "zarr_format": 2,
        "shape": [14, 6],
        "chunks": [7, 6],
        "dtype": "bfloat16",
        "compressor": None,
        "order": "C",
    }
    return json.dumps({**sound, **fields}).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no description"),
        (b"[" * 100_000, "no description"),
        (b"[]", "no description"),
        (described(shape=[14, -6]), r"shape \[14, -6\]"),
        (described(chunks=[0, 6]), "in chunks of"),
        (described(chunks=[7]), "in chunks of"),
        (described(shape=[1 << 40, 1 << 40]), "is no array"),
        (described(shape=[1.5, 6]), "in chunks of"),
    ],
)
def test_a_description_that_lies(text: bytes, message: str) -> None:
    """One clear error for each, and no memory is taken for what a number claims."""
    with pytest.raises(FormatError, match=message):
        READER.read(source_of(edited(text)))


def test_a_grid_of_chunks_that_are_not_there() -> None:
    """A huge shape over few files is an error, not a loop."""
    with pytest.raises(FormatError, match="are not stored"):
        READER.read(source_of(edited(described(shape=[1 << 30, 6], chunks=[1, 6], compressor={"id": "zstd"}))))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compressor": {"id": "zfpy"}}, "coded with 'zfpy', expected one of zstd, "),
        ({"compressor": {"id": "lzma", "format": 3}}, "coded with 'lzma'"),
        ({"dtype": "<M8[ns]"}, "element type"),
        ({"filters": [{"id": "delta"}]}, "coded with 'delta'"),
        ({"filters": [{"id": "shuffle", "elementsize": 0}]}, "coded with 'shuffle'"),
        ({"order": "K"}, "order"),
    ],
)
def test_codings_that_are_not_known(fields: dict[str, Any], message: str) -> None:
    """They are named."""
    with pytest.raises(Unsupported, match=message):
        READER.read(source_of(edited(described(**fields))))


def test_arrays_without_a_tree(tmp_path: Path) -> None:
    """Folders of arrays alone: names are theirs, groups are none, and a file of small values is told of."""
    step = copied("orbax_files", tmp_path) / "3"
    for path in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "_strings.json"):
        (step / path).unlink()
    (step / "checkpoint").write_bytes(b"\x81\xa4step\x03")
    (step / "group").mkdir()
    (step / "group/zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with open_checkpoint(step) as checkpoint:
        assert checkpoint.format == "orbax"
        assert set(checkpoint) == set(as_bytes(CHECKPOINTS / "orbax_files/ckpt/3"))
        assert checkpoint.manifest.tensor("params.layers.1.scale").path == ("params.layers.1.scale",)
        assert "checkpoint holds the tree and its small values" in checkpoint.manifest.notes[1]
        lost = [one.where for one in verify(checkpoint).findings if one.kind == "missing-file"]
        assert lost == [FileRange("_METADATA", 0, 0)]
    with open_checkpoint(step / "checkpoint") as values:
        assert values.objects() == {"step": 3}


def test_files_without_checksums_are_those_on_the_disk() -> None:
    """Values that lie together in one file of the database are one file that nobody can check."""
    step = CHECKPOINTS / "orbax_zarr3" / "ckpt/3"
    said = {found.kind: found.message for found in verify(step, level="full").findings}
    with open_checkpoint(step) as checkpoint:
        entries = [entry for entry in checkpoint.manifest.files if entry.part is not None]
    n = len({entry.part.path for entry in entries if entry.part is not None})
    assert n < len(entries)
    assert said["not-covered"].startswith(f"not covered: {n} of {n} file")
