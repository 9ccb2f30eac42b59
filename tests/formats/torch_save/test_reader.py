"""Files of torch.save: the reader's contract on real ones, and what it says of odd ones."""

from __future__ import annotations

import argparse
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.errors import FormatError, UnsafePickle
from ckpt_tool.formats.torch_save.reader import READER
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.optimizer import optimizer_views
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import (
    FIXTURES,
    Case,
    ReaderTests,
    Truth,
    all_rows,
    assemble,
    source_of,
    stored_bytes,
    truth_of,
)
from tests.formats.recorded import checksums_of
from tests.storage.recording import RecordingStore

PT = FIXTURES / "torch/pt_files/ckpt"
ARANGE = Truth("float32", (2, 3), np.arange(6, dtype=np.float32).tobytes())


def odd_truth() -> dict[str, Truth]:
    """The odd tensors; complex128 stands in the file as bytes, for safetensors does not have it."""
    truth = truth_of(PT / "odd.truth.safetensors")()
    truth["c128"] = Truth("complex128", (3,), truth.pop("c128#bytes:complex128").data)
    return truth


def small(truth: Mapping[str, Truth] | None = None) -> Callable[[], Mapping[str, Truth]]:
    """The truth of the files with one 2x3 tensor."""
    return lambda: {"w": ARANGE} if truth is None else truth


MODEL = truth_of(PT / "model_only.truth.safetensors")
TRAINING = truth_of(PT / "train_namespace.truth.safetensors")


class TestTorchSave(ReaderTests):
    """Zip and legacy files, of every dtype, byte order and kind of view."""

    reader = READER
    reader_import = "ckpt_tool.formats.torch_save.reader:READER"
    cases = (
        Case("odd_zip", PT / "odd_zip.pt", odd_truth, max_read_requests=3, max_resolve_requests=0),
        Case("odd_legacy", PT / "odd_legacy.pt", odd_truth, max_read_requests=3, max_resolve_requests=0),
        Case("model_only", PT / "model_only.pt", MODEL, max_read_requests=3),
        Case("model_only_proto4", PT / "model_only_proto4.pt", MODEL, max_read_requests=3),
        Case("whole_module", PT / "whole_module.pt", MODEL, max_read_requests=3),
        Case("repacked_deflate", PT / "repacked_deflate.pt", MODEL, max_read_requests=39),
        Case("train_namespace", PT / "train_namespace.pt", TRAINING, max_read_requests=3),
        Case("train_namespace_legacy", PT / "train_namespace_legacy.pt", TRAINING, max_read_requests=3),
        Case("cuda_loc", PT / "cuda_loc.pt", small()),
        Case("cuda_loc_legacy", PT / "cuda_loc_legacy.pt", small()),
        Case("from_buffer", PT / "from_buffer.pt", small()),
        Case("no_crc32", PT / "no_crc32.pt", small()),
        Case("bigendian", PT / "bigendian.pt", small()),
        Case(
            "align4096",
            PT / "align4096.pt",
            small({"w": ARANGE, "v": Truth("float32", (3,), np.ones(3, dtype=np.float32).tobytes())}),
        ),
    )


def saved(value: Any, **options: Any) -> bytes:
    """The bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def read(data: bytes) -> tuple[MemoryStore, Manifest]:
    """A manifest of one file's bytes, all rows resolved."""
    store = MemoryStore({"a.pt": data})
    manifest = READER.read(source_of(store))
    return store, manifest.replace(chunks=READER.resolve(source_of(store), manifest, all_rows(manifest)))


def whole(data: bytes, fqn: str) -> Truth:
    """One tensor of a file's bytes."""
    store, manifest = read(data)
    return assemble(store, manifest, manifest.chunks, fqn)


def test_joined_names_that_collide_stay_reachable() -> None:
    """Two key paths of one dotted name are two tensors; the later one has a number behind its name."""
    data = saved({"a.b": torch.zeros(2), "a": {"b": torch.ones(3)}, "n": {"0": torch.zeros(1), 0: torch.ones(1)}})
    _, manifest = read(data)
    assert manifest.tensors.fqns == ("a.b", "a.b#2", "n.0", "n.0#2")
    assert manifest.tensors.paths == (("a.b",), ("a", "b"), ("n", "0"), ("n", 0))
    assert whole(data, "a.b#2") == Truth("float32", (3,), np.ones(3, dtype=np.float32).tobytes())
    assert sum("more than one entry" in note for note in manifest.notes) == 2


def test_values_are_one_blob_each_outside_of_dicts() -> None:
    """Dicts are entered, a tuple or an object without tensors is one value, an empty dict stays."""
    value = {
        "w": torch.zeros(1),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
        "empty": {},
        "rng": (3, tuple(range(5)), None),
    }
    _, manifest = read(saved(value))
    blobs = {blob.fqn: blob for blob in manifest.blobs}
    assert list(blobs) == ["groups.0.lr", "groups.0.betas", "groups.0.params", "args", "empty", "rng"]
    assert blobs["groups.0.betas"].value == (0.9, 0.99)
    assert blobs["groups.0.params"].path == ("groups", 0, "params")
    assert blobs["args"].value.attribute("layers") == [1, 2]
    assert blobs["empty"].value == {}
    assert all(blob.is_loaded and blob.kind == "value" for blob in manifest.blobs)


def test_a_list_with_a_tensor_inside_is_entered() -> None:
    """A tensor deep in tuples and objects is found, with the way to it as its name."""
    _, manifest = read(saved({"queue": [("x", {"t": torch.zeros(2)})], "ns": argparse.Namespace(t=torch.ones(1), k=3)}))
    assert manifest.tensors.fqns == ("queue.0.1.t", "ns.t")
    assert [blob.fqn for blob in manifest.blobs] == ["queue.0.0", "ns.k"]


def test_a_bare_tensor_has_a_name() -> None:
    """torch.save of a single tensor reads as the tensor ``value``."""
    data = saved(torch.arange(3))
    assert read(data)[1].tensors.record(0).path == ()
    assert whole(data, "value") == Truth("int64", (3,), np.arange(3).tobytes())


def test_tied_tensors_share_bytes_and_are_reported() -> None:
    """Two names of one tensor point at the same bytes; so do views, as far as they overlap."""
    base = torch.arange(12.0).view(3, 4)
    store, manifest = read(saved({"embed": base, "head": base, "row": base[1]}))
    chunks = [manifest.chunks.record(row, manifest.tensors, manifest.files) for row in range(3)]
    assert chunks[0].where == chunks[1].where
    assert chunks[2].where.offset == chunks[0].where.offset + 16
    findings = {finding.kind: finding for finding in READER.check(source_of(store), manifest)}
    assert findings["tied-tensors"].message == "'embed' and 'head' have the same bytes in the file"
    assert findings["overlapping-views"].fqn == "row"


def test_parts_of_special_tensors_are_tensors() -> None:
    """Sparse, quantized and nested tensors come as their parts, with a note each; a packed fp4 keeps its bytes."""
    store = MemoryStore(stored_bytes(PT / "extra_zip.pt"))
    manifest = READER.read(source_of(store))
    assert [(meta.fqn, meta.dtype.name, meta.shape) for meta in manifest.tensors] == [
        ("fp4x2", "float4_e2m1fn_x2", (6,)),
        ("sparse_coo.indices", "int64", (2, 4)),
        ("sparse_coo.values", "float32", (4,)),
        ("sparse_csr.crow_indices", "int64", (5,)),
        ("sparse_csr.col_indices", "int64", (4,)),
        ("sparse_csr.values", "float32", (4,)),
        ("q_per_tensor.values", "qint8", (3, 4)),
        ("q_per_channel.values", "quint8", (3, 4)),
        ("q_per_channel.scale", "float64", (3,)),
        ("q_per_channel.zero_point", "int64", (3,)),
        ("nested_tensor.values", "float32", (5,)),
        ("nested_tensor.sizes", "int64", (2, 1)),
        ("nested_tensor.strides", "int64", (2, 1)),
        ("nested_tensor.offsets", "int64", (2,)),
        ("buffer_cls", "float32", (2,)),
    ]
    assert assemble(store, manifest, manifest.chunks, "fp4x2").data == bytes(range(6))
    assert [(blob.fqn, blob.value) for blob in manifest.blobs] == [
        ("q_per_tensor.scale", 0.1),
        ("q_per_tensor.zero_point", 3),
    ]
    notes = "\n".join(manifest.notes)
    for said in ("sparse_coo tensor [4, 4]", "per_channel_affine", "nested tensor", "'meta' is a meta tensor [3, 4]"):
        assert said in notes


def test_a_pickled_module_names_its_tensors_as_its_state_dict_does() -> None:
    """Parameters, buffers and submodules of a whole module are found without its class; the note names the class."""
    store = MemoryStore(stored_bytes(PT / "whole_module.pt"))
    manifest = READER.read(source_of(store))
    assert set(manifest.tensors.fqns) == set(MODEL())
    assert "common.Tiny" in "\n".join(manifest.notes)


def test_optimizer_of_a_training_file_gets_names() -> None:
    """Integer keys are kept, and match the model's parameters by order and shape."""
    store = MemoryStore(stored_bytes(PT / "train_namespace.pt"))
    manifest = READER.read(source_of(store))
    assert ("optimizer", "state", 0, "exp_avg") in set(manifest.tensors.paths or ())
    assert manifest.info["int_keyed_dicts"] == ["optimizer.state"]
    assert manifest.info["epoch"] == 3
    (view,) = optimizer_views(manifest)
    assert (view.prefix, view.spelling, len(view.parameters)) == ("optimizer", "ids", 14)
    assert view.names[0] == "model.odd53"
    assert view.names[13] == "model.lm_head.weight"
    assert view.groups[0].hyperparameters["betas"] == (0.9, 0.999)


def test_unrecorded_checksums_are_said() -> None:
    """With CRCs switched off nothing can be verified, which is no error."""
    for name, count in (("no_crc32.pt", "1 of 1"), ("skip_data.pt", "1 of 1")):
        store = MemoryStore(stored_bytes(PT / name))
        manifest = READER.read(source_of(store))
        (finding,) = READER.check(source_of(store), manifest)
        assert (finding.kind, finding.severity) == ("crc-not-recorded", Severity.INFO)
        assert count in finding.message
        assert [c.where.path for c in checksums_of(READER, source_of(store), manifest) if c.fqn] == []


def test_checksums_name_their_tensors() -> None:
    """Each storage's CRC is that of the tensor in it; the pickle has one too."""
    store, manifest = read(saved({"a": torch.arange(4), "b": torch.ones(2)}))
    found = [(c.fqn, c.where.length) for c in checksums_of(READER, source_of(store), manifest)]
    assert [fqn for fqn, _ in found] == [None, "a", "b"]
    assert found[1:] == [("a", 32), ("b", 8)]


def test_reading_one_tensor_of_many_touches_only_its_bytes() -> None:
    """Of 100 tensors in 4 MB, the manifest costs three requests, and one tensor its header and its bytes."""
    data = saved({f"t{i}": torch.full((10_240,), float(i)) for i in range(100)})
    store = RecordingStore(MemoryStore({"a.pt": data}))
    source = source_of(store)
    manifest = READER.read(source)
    assert len(store.calls) == 3
    assert store.nbytes < 100_000
    row = manifest.chunks.rows_of(manifest.tensor_id("t57"))
    assert manifest.chunks.flags[row].tolist() == [ChunkFlag.UNRESOLVED]
    store.clear()
    chunks = READER.resolve(source, manifest, row)
    assert [call.length for call in store.calls] == [65_536, 30 + len("archive/data/57")]
    assert assemble(store, manifest, chunks, "t57").data == np.full(10_240, 57, dtype=np.float32).tobytes()


@pytest.mark.parametrize("name", ["odd_zip.pt", "model_only.pt", "train_namespace.pt"])
def test_a_cut_zip_says_what_can_be_salvaged(name: str) -> None:
    """Cut anywhere, a zip gives one error that counts the storages that are whole."""
    data = (PT / name).read_bytes()
    directory = data.find(b"PK\x01\x02")
    counted = []
    for length in (len(data) // 2, directory + 100, len(data) - 1):
        with pytest.raises(FormatError, match="no end record") as caught:
            READER.read(source_of(MemoryStore({"a.pt": data[:length]})))
        whole_part, _, of = caught.value.message.partition("salvage of ")[2].partition(" of ")
        counted.append((int(whole_part.replace(",", "")), of))
        assert caught.value.hint is not None
    total = counted[-1][0]
    assert 0 < counted[0][0] < total
    assert {count for count, _ in counted[1:]} == {total}
    assert {of for _, of in counted} == {f"{total:,} storages"}


def test_a_zip_cut_inside_its_pickle_says_so() -> None:
    """With less than the first storage nothing can be salvaged."""
    data = (PT / "odd_zip.pt").read_bytes()
    with pytest.raises(FormatError, match="nothing can be salvaged"):
        READER.read(source_of(MemoryStore({"a.pt": data[: len(data) // 10]})))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_a_cut_legacy_stream_is_an_error(share: float) -> None:
    """A stream without its end is refused, with the place."""
    data = (PT / "odd_legacy.pt").read_bytes()
    with pytest.raises(FormatError, match=r"a\.pt"):
        READER.read(source_of(MemoryStore({"a.pt": data[: int(len(data) * share)]})))


def test_torchscript_is_read_as_its_modules(tmp_path: Path) -> None:
    """Scripted modules have the names and tensors of the state dict of what was scripted; no code is looked at."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    torch.jit.script(module).save(tmp_path / "program.pt")
    torch.save(module.state_dict(), tmp_path / "state.pt")
    with open_checkpoint(tmp_path / "program.pt") as program, open_checkpoint(tmp_path / "state.pt") as state:
        assert {fqn: view.numpy().tolist() for fqn, view in program.items()} == {
            fqn: view.numpy().tolist() for fqn, view in state.items()
        }
        assert any("TorchScript" in note for note in program.manifest.notes)


def test_an_exported_program_is_named(tmp_path: Path) -> None:
    """torch.export keeps no pickle of tensors: what gives one is said."""
    path = tmp_path / "program.pt2"
    with zipfile.ZipFile(path, "w") as archive:  # as torch 2.13 names its members
        archive.writestr("program/data/weights/weight_0", bytes(24))
        archive.writestr("program/archive_format", "pt2")
    with pytest.raises(FormatError, match=r"a program of torch\.export") as caught:
        open_checkpoint(path)
    assert "torch.export.load" in (caught.value.hint or "")


def test_a_pickle_that_runs_code_is_refused() -> None:
    """A file that asks for os.system is refused with the byte where it asks."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            import os

            return os.system, ("true",)

    with pytest.raises(UnsafePickle, match="system") as caught:
        READER.read(source_of(MemoryStore({"a.pt": saved({"x": Evil()})})))
    assert str(caught.value.where).startswith("a.pt:archive/data.pkl:")


@pytest.mark.parametrize(
    ("files", "confidence"),
    [
        ({"a.pth.tar": saved({"w": torch.zeros(1)})}, 0.7),
        ({"weights": saved({"w": torch.zeros(1)}, _use_new_zipfile_serialization=False)}, 0.7),
        ({"a.pt": saved(1), "b.pt": saved(2)}, 0.3),
        ({"model_rank_0.pt": saved(1), "model_rank_1.pt": saved(2)}, 0.2),
        ({"a.pt": b"PK\x03\x04 no zip"}, 0.0),
        ({"a.pt": b""}, 0.0),
        ({"pytorch_model.bin": saved(1), "training_args.bin": saved(2)}, 0.7),
        ({"a.pt": saved(1), "model.safetensors": b""}, 0.2),
        ({}, 0.0),
    ],
    ids=["tar-suffix", "no-suffix", "two", "ranks", "broken", "empty", "hf", "safetensors", "nothing"],
)
def test_files_are_known_by_content(files: dict[str, bytes], confidence: float) -> None:
    """Names do not matter, bytes do."""
    assert READER.probe(source_of(MemoryStore(files))).confidence == confidence


def test_one_ranks_file_alone_says_so() -> None:
    """A rank file without its siblings reads as what it is: global shapes, one rank's boxes, and a note."""
    name = "model_world_size_4_rank_1.pt"
    data = (FIXTURES / "torch/verl_2d/ckpt" / name).read_bytes()
    manifest = READER.read(source_of(MemoryStore({name: data})))
    (row,) = manifest.chunks.rows_of(manifest.tensor_id("0.weight"))
    record = manifest.chunks.record(int(row), manifest.tensors, manifest.files)
    assert (str(record.box), record.rank, manifest.tensor("0.weight").shape) == ("[49:73, 0:24]", 1, (97, 24))
    assert "one rank's file of 4: tensors have only the boxes of that rank" in manifest.notes
