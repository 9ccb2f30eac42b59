"""Where the elements of an item are: with how few requests, and not without a look at what they are."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save

from ckpt_tool.errors import CkptError, FormatError, NotFound, Unsupported
from ckpt_tool.formats._dcp.items import HEAD_NBYTES
from ckpt_tool.formats._pickle.nodes import Global, Size
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.dcp.reader import READER
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable
from ckpt_tool.storage.store import ReadCost
from tests.formats.conformance import all_rows, assemble
from tests.formats.dcp.build import NO_GAP, Checkpoint, Item, row_cut, saved, source
from tests.storage.recording import RecordingStore

WIDE_GAP = ReadCost(max_gap_bytes=1 << 20, max_read_bytes=1 << 20, concurrency=1)


def resolved(where: Source) -> tuple[Manifest, ChunkTable]:
    """The manifest, and its chunks resolved."""
    manifest = READER.read(where)
    return manifest, READER.resolve(where, manifest, all_rows(manifest))


def calls(where: Source) -> list[tuple[str, int, int]]:
    """Requests since the store was made or cleared."""
    assert isinstance(where.store, RecordingStore)
    return [(call.path, call.offset, call.length) for call in where.store.calls]


def elements(where: Source, fqn: str = "w") -> bytes:
    """All elements of a tensor, assembled."""
    manifest, chunks = resolved(where)
    return assemble(where.store, manifest, chunks, fqn).data


def rewritten(item: bytes, *, method: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    """An item as another program would write it again, some members changed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(stream, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, members.get(name.rpartition("/")[2], old.read(name)))
    return stream.getvalue()


def test_one_request_per_item() -> None:
    """Reading costs one request, resolving one per item and no byte behind its first kilobyte."""
    checkpoint = row_cut(rows=(40, 40, 41), width=100)
    where = source(checkpoint.files(), NO_GAP)
    manifest = READER.read(where)
    assert len(calls(where)) == 1
    READER.resolve(where, manifest, all_rows(manifest))
    assert calls(where)[1:] == [(f"__{rank}_0.distcp", 0, HEAD_NBYTES) for rank in range(3)]


def test_neighbours_share_a_request() -> None:
    """Items near each other are read together where a request costs more than the gap."""
    checkpoint = Checkpoint()
    for name in "abcdef":
        checkpoint.tensor(name, (5, 5), [(0, (0, 0), torch.ones(5, 5))])
    where = source(checkpoint.files(), WIDE_GAP)
    resolved(where)
    assert len(calls(where)) == 2


def test_only_what_is_asked_for() -> None:
    """Rows that are not asked for, and rows resolved before, cost nothing."""
    where = source(row_cut().files())
    manifest = READER.read(where)
    some = READER.resolve(where, manifest, np.array([1]))
    assert [bool(flag & ChunkFlag.UNRESOLVED) for flag in some.flags] == [True, False, True]
    before = len(calls(where))
    READER.resolve(where, manifest.replace(chunks=some), np.array([1, 1]))
    assert len(calls(where)) == before


def test_shape_against_metadata() -> None:
    """A chunk of other sizes than its stored tensor is refused, and found by check (R19)."""
    checkpoint = Checkpoint()
    checkpoint.shapes["w"], checkpoint.dtypes["w"] = Size((1571, 3)), Global("torch", "float32")
    checkpoint.stored("w", 0, Size((0, 0)), Size((1571, 3)), saved(torch.ones(1571)))
    where = source(checkpoint.files())
    message = r"chunk of 'w' at \[0, 0\] is float32\[1571, 3\] in the metadata, the stored tensor is float32\[1571\]"
    with pytest.raises(FormatError, match=message):
        resolved(where)
    (finding,) = READER.check(where, READER.read(where))
    assert (finding.kind, finding.fqn) == ("item-mismatch", "w")


def test_shape_that_pads_to_that_of_others() -> None:
    """A stored [4] is no [4, 1], also behind items of the same head whose sizes look the same in the columns."""
    checkpoint = Checkpoint()
    for name, shape in (("a", (4,)), ("b", (4,)), ("c", (4,)), ("wrong", (4, 1))):
        checkpoint.shapes[name], checkpoint.dtypes[name] = Size(shape), Global("torch", "float32")
        checkpoint.stored(name, 0, Size((0,) * len(shape)), Size(shape), saved(torch.ones(4)))
    where = source(checkpoint.files())
    message = r"chunk of 'wrong' at \[0, 0\] is float32\[4, 1\] in the metadata, the stored tensor is float32\[4\]"
    with pytest.raises(FormatError, match=message):
        resolved(where)
    (finding,) = READER.check(where, READER.read(where))
    assert (finding.kind, finding.fqn) == ("item-mismatch", "wrong")


def test_dtype_against_metadata() -> None:
    """A chunk of another type than its stored tensor is refused, however equal the width."""
    checkpoint = row_cut()
    checkpoint.dtypes["w"] = Global("torch", "int32")
    with pytest.raises(FormatError, match=r"is int32\[2, 3\] in the metadata, the stored tensor is float32"):
        resolved(source(checkpoint.files()))


def test_transposed_tensors() -> None:
    """A transposed view keeps its strides in the file, and they are honoured."""
    whole = torch.arange(24.0).reshape(4, 6)
    checkpoint = Checkpoint()
    checkpoint.tensor("w", (6, 4), [(0, (0, 0), whole.t())])
    checkpoint.tensor("plain", (2,), [(0, (0,), torch.ones(2))])
    where = source(checkpoint.files())
    manifest, chunks = resolved(where)
    assert chunks.record(0, manifest.tensors, manifest.files).strides == (1, 6)
    assert chunks.record(1, manifest.tensors, manifest.files).strides is None
    assert elements(where) == whole.t().contiguous().numpy().tobytes()


def test_views_of_larger_storages() -> None:
    """A slice keeps its whole storage; its elements start where the pickle says."""
    whole = torch.arange(48.0).reshape(6, 8)
    checkpoint = Checkpoint()
    checkpoint.tensor("w", (3, 2), [(0, (0, 0), whole[2:5, 3:5])])
    assert elements(source(checkpoint.files())) == whole[2:5, 3:5].contiguous().numpy().tobytes()


def test_lazy_conjugates() -> None:
    """A lazy conjugate is stored unconjugated, with a flag."""
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    checkpoint = Checkpoint()
    checkpoint.tensor("w", (2,), [(0, (0,), values.conj())])
    where = source(checkpoint.files())
    assert resolved(where)[1].flags.tolist() == [ChunkFlag.CONJUGATE]
    assert elements(where) == values.conj().resolve_conj().numpy().tobytes()


def test_items_of_other_programs() -> None:
    """A zip whose first bytes are not as torch writes them is read by its directory."""
    checkpoint = Checkpoint()
    values = torch.arange(6.0).reshape(2, 3)
    checkpoint.shapes["w"], checkpoint.dtypes["w"] = Size((2, 3)), Global("torch", "float32")
    checkpoint.stored("x", 0, None, None, saved("before"))
    checkpoint.stored("w", 0, Size((0, 0)), Size((2, 3)), rewritten(saved(values)))
    assert elements(source(checkpoint.files())) == values.numpy().tobytes()


def test_big_endian_items() -> None:
    """An item that says so has its bytes swapped."""
    values = torch.arange(6.0).reshape(2, 3)
    item = rewritten(saved(values), byteorder=b"big", **{"0": values.numpy().astype(">f4").tobytes()})
    checkpoint = Checkpoint()
    checkpoint.shapes["w"], checkpoint.dtypes["w"] = Size((2, 3)), Global("torch", "float32")
    checkpoint.stored("w", 0, Size((0, 0)), Size((2, 3)), item)
    where = source(checkpoint.files())
    assert resolved(where)[1].flags.tolist() == [ChunkFlag.BIG_ENDIAN]
    assert elements(where) == values.numpy().tobytes()


def test_compressed_members() -> None:
    """An item that was packed again with deflate has no bytes to point at, and the error says so."""
    checkpoint = Checkpoint()
    checkpoint.shapes["w"], checkpoint.dtypes["w"] = Size((50,)), Global("torch", "float32")
    item = rewritten(saved(torch.ones(50)), method=zipfile.ZIP_DEFLATED)
    checkpoint.stored("w", 0, Size((0,)), Size((50,)), item)
    with pytest.raises(Unsupported, match="compressed within the zip"):
        resolved(source(checkpoint.files()))


def test_something_that_is_no_tensor() -> None:
    """An item that holds an object where a tensor is listed is refused."""
    checkpoint = row_cut()
    checkpoint.content["__1_0.distcp"] = bytearray(saved({"a": 1}).ljust(checkpoint.items[1].length, b"\0"))
    with pytest.raises(CkptError):
        resolved(source(checkpoint.files()))


def blob_checkpoint(*, twice: bool) -> Checkpoint:
    """A file that ends in a safetensors blob, as ``SerializationFormat.SAFETENSORS`` writes it."""
    first, second = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 9.0).reshape(1, 3)
    checkpoint = Checkpoint(shapes={"w": Size((3, 3))}, dtypes={"w": Global("torch", "float32")})
    sharding = {"w": {"saved_offsets": [2, 0] if twice else [0, 0]}}
    blob = save({"w": second if twice else first}, metadata={"DCP_SHARDING_INFO": json.dumps(sharding)})
    checkpoint.content["__0_0.distcp"] = bytearray(saved("before")) + blob
    start = len(saved("before"))
    checkpoint.items = [Item("w", Size((0, 0)), Size((2, 3)), "__0_0.distcp", start, 24)]
    if twice:
        checkpoint.items.append(Item("w", Size((2, 0)), Size((1, 3)), "__0_0.distcp", start, 12))
    else:
        checkpoint.stored("w", 1, Size((2, 0)), Size((1, 3)), saved(second))
    return checkpoint


def test_safetensors_blobs() -> None:
    """A tensor in a safetensors blob is found by its header."""
    assert elements(source(blob_checkpoint(twice=False).files())) == torch.arange(9.0).numpy().tobytes()


def test_chunks_that_overwrote_each_other() -> None:
    """Of two chunks of a tensor in one blob only the last is there, and the reader does not take it for the first."""
    message = r"the chunk of 'w' at \[0, 0\] was overwritten by the one at \[2, 0\]"
    with pytest.raises(FormatError, match=message):
        resolved(source(blob_checkpoint(twice=True).files()))


def test_garbage() -> None:
    """Bytes that are no item are refused with their place."""
    checkpoint = row_cut()
    checkpoint.content["__1_0.distcp"] = bytearray(checkpoint.items[1].length)
    with pytest.raises(FormatError, match=r"__1_0\.distcp:0: expected a torch.save zip or a safetensors blob"):
        resolved(source(checkpoint.files()))


def test_cut_and_missing_files() -> None:
    """A cut file and a missing one are errors with numbers, and findings with the tensors they hold (R11)."""
    checkpoint = row_cut()
    files = checkpoint.files()
    nbytes = len(files["__1_0.distcp"])
    cut = source({**files, "__1_0.distcp": files["__1_0.distcp"][:-100]})
    with pytest.raises(
        FormatError, match=rf"__1_0.distcp: the item of 'w' ends at byte {nbytes:,}, .* \(100 missing\)"
    ):
        resolved(cut)
    (finding,) = READER.check(cut, READER.read(cut))
    assert (finding.kind, str(finding.where)) == ("cut-file", f"__1_0.distcp:{nbytes - 100}+100")
    del files["__2_0.distcp"]
    gone = source(files)
    with pytest.raises(NotFound, match=r"__2_0\.distcp: the file is missing; it holds a chunk of 'w'"):
        resolved(gone)
    (finding,) = READER.check(gone, READER.read(gone))
    assert (finding.kind, finding.message) == ("missing-file", "the file is missing; it holds parts of 1 entry: w")


def test_unknown_files() -> None:
    """Files that nothing refers to are worth a warning, unless they are empty."""
    where = source({**row_cut().files(), "__7_0.distcp": b"old", "__8_0.distcp": b""})
    (finding,) = READER.check(where, READER.read(where))
    assert (finding.kind, finding.where and finding.where.path) == ("unknown-file", "__7_0.distcp")


def test_missing_ranks() -> None:
    """Of per-rank metadata, a hole in the ranks is an error (R25)."""
    checkpoint = row_cut()
    files = checkpoint.files()
    del files[".metadata"]
    where = source({**files, "__0.metadata": checkpoint.metadata(), "__2.metadata": checkpoint.metadata()})
    (finding,) = READER.check(where, READER.read(where))
    assert (finding.kind, finding.message) == (
        "missing-metadata",
        "__1.metadata is missing: what rank 1 wrote is unknown",
    )


def test_checksums_that_were_not_taken() -> None:
    """A checksum of 0 beside a payload was not taken, so it is not reported; torch can be told to take none."""
    torch.serialization.set_crc32_options(False)
    try:
        checkpoint = row_cut()
    finally:
        torch.serialization.set_crc32_options(True)
    where = source(checkpoint.files())
    assert list(READER.checksums(where, READER.read(where))) == []
    where = source(row_cut().files())
    found = list(READER.checksums(where, READER.read(where)))
    assert [checksum.fqn for checksum in found].count("w") == 3
    assert [checksum.fqn for checksum in found].count(None) == 3


def test_objects() -> None:
    """Objects are loaded when asked for, together in one request, and come back as values."""
    checkpoint = row_cut()
    checkpoint.stored("step", 0, None, None, saved(7))
    checkpoint.stored("config", 0, None, None, saved({"a": [1, 2.5], "b": None}))
    where = source(checkpoint.files(), WIDE_GAP)
    manifest = READER.read(where)
    assert manifest.info["step_fqn"] == "step"
    assert [(blob.fqn, blob.is_loaded) for blob in manifest.blobs] == [("step", False), ("config", False)]
    blobs = READER.load_blobs(where, manifest, [0, 1])
    assert [blob.value for blob in blobs] == [7, {"a": [1, 2.5], "b": None}]
    assert len(calls(where)) == 2
