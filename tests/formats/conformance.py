"""What every reader must do: subclass `ReaderTests`, name a reader and its cases, and the same tests run on it.

    class TestSafetensors(ReaderTests):
        reader = READER
        cases = (Case("hf_single", FIXTURES / "torch/hf_single/ckpt", truth_of(FIXTURES / "torch/hf_single")),)

A case is a real checkpoint and a function that returns what must come out of it, tensor by tensor.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from ckpt_tool.dtypes import DType, from_safetensors
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import Reader, Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.store import Store
from ckpt_tool.storage.virtual.decode import open_files
from tests.formats.recorded import checksums_of
from tests.storage.recording import RecordingStore

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
INERT_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.ndarray, np.generic)


@dataclass(frozen=True)
class Truth:
    """One whole tensor: its packed row-major bytes, with type and shape."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __repr__(self) -> str:
        """Short, so that a failing comparison can be read."""
        return f"{self.dtype}{list(self.shape)} crc {zlib.crc32(self.data):08x}"


@dataclass(frozen=True)
class Case:
    """A checkpoint that the reader must read."""

    name: str
    location: Path
    """Folder, or the single file where the checkpoint is one."""
    truth: Callable[[], Mapping[str, Truth]]
    """Every tensor of the manifest by fqn."""
    without_truth: tuple[str, ...] = ()
    """Globs of fqns that ``truth`` does not tell; these need only be complete."""
    max_read_requests: int = 4
    """Requests that ``read`` may make."""
    max_resolve_requests: int | None = None
    """Requests that ``resolve`` of all rows may make; None for two per chunk."""


def truth_of(folder: Path, rename: Callable[[str], str | None] = lambda fqn: fqn) -> Callable[[], dict[str, Truth]]:
    """Reads ``folder/truth.safetensors``, or ``folder`` where that is the file.

    ``rename`` gives the manifest's fqn for a name in it, None to leave it out.

    The file is parsed here, byte by byte, so that no reader is its own judge.
    """

    def read() -> dict[str, Truth]:
        raw = (folder / "truth.safetensors" if folder.is_dir() else folder).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        tensors = {}
        for name, entry in json.loads(raw[8:start]).items():
            fqn = rename(name) if name != "__metadata__" else None
            if fqn is not None:
                dtype = from_safetensors(entry["dtype"])
                assert dtype is not None, entry
                begin, end = entry["data_offsets"]
                tensors[fqn] = Truth(dtype.name, tuple(entry["shape"]), raw[start + begin : start + end])
        return tensors

    return read


def source_of(store: Store) -> Source:
    """A source over ``store``."""
    return Source(store, store.listing())


def chunk_bytes(store: Store, manifest: Manifest, chunks: ChunkTable, row: int) -> bytes:
    """The raw bytes of one resolved chunk, decoded where its file is the content of a compressed part."""
    entry = manifest.files.entries[chunks.file[row]]
    offset, length = int(chunks.offset[row]), int(chunks.length[row])
    if entry.codec is None:
        return store.read(entry.path, offset, length)
    assert entry.part is not None, entry
    encoded = store.read(entry.part.path, entry.part.offset, entry.part.length)
    return decode(entry.codec, encoded)[offset : offset + length]


def decode(codec: str, encoded: bytes) -> bytes:
    """The content of a compressed part, step by step."""
    for step in codec.split("|"):
        name, *numbers = step.split(":")
        if name == "zeros":
            encoded = bytes(int(numbers[0]))
        elif name == "slice":
            encoded = encoded[int(numbers[0]) :][: int(numbers[1])]
        elif name == "shuffle":
            planes = [encoded[i * len(encoded) // int(numbers[0]) :] for i in range(int(numbers[0]))]
            encoded = bytes(b for row in zip(*planes, strict=False) for b in row)
        elif name == "zstd":
            with pa.CompressedInputStream(pa.BufferReader(encoded), name) as stream:
                encoded = bytes(stream.read())
        else:
            encoded = zlib.decompress(encoded, -zlib.MAX_WBITS if name == "deflate" else zlib.MAX_WBITS | 32)
    return encoded


def box_elements(data: bytes, sizes: tuple[int, ...], strides: tuple[int, ...] | None, dtype: DType, flags: int) -> Any:
    """``uint8[*sizes, itemsize]``: elements of a box in the tensor's order, byte order and sign, from its raw bytes."""
    width = dtype.itemsize
    raw = np.frombuffer(data, dtype=np.uint8)
    if strides is None:
        elements = raw.reshape(*sizes, width)
    else:
        start = -sum((n - 1) * s for n, s in zip(sizes, strides, strict=True) if s < 0 < n) * width
        byte_strides = (*(s * width for s in strides), 1)
        elements = np.lib.stride_tricks.as_strided(raw[start:], (*sizes, width), byte_strides)
    if flags & ChunkFlag.BIG_ENDIAN:
        elements = elements.reshape(*sizes, -1, dtype.component_bytes)[..., ::-1].reshape(*sizes, width)
    if flags & (ChunkFlag.CONJUGATE | ChunkFlag.NEGATE):
        values = np.ascontiguousarray(elements).view(dtype.as_numpy())[..., 0]
        values = np.conj(values) if flags & ChunkFlag.CONJUGATE else values
        values = np.negative(values) if flags & ChunkFlag.NEGATE else values
        elements = np.ascontiguousarray(values)[..., None].view(np.uint8)
    return elements


def assemble(store: Store, manifest: Manifest, chunks: ChunkTable, fqn: str) -> Truth:
    """The whole tensor, every element written by at least one chunk; replicas must agree."""
    meta = manifest.tensor(fqn)
    width = meta.dtype.itemsize
    canvas = np.zeros((*meta.shape, width), dtype=np.uint8)
    written = np.zeros(meta.shape, dtype=np.bool_)
    for row in chunks.rows_of(manifest.tensor_id(fqn)):
        record = chunks.record(int(row), manifest.tensors, manifest.files)
        data = chunk_bytes(store, manifest, chunks, int(row))
        elements = box_elements(data, record.box.sizes, record.strides, meta.dtype, record.flags)
        where = record.box.slices
        twice = written[where]
        assert np.array_equal(canvas[where][twice], elements[twice]), f"replicas of {fqn} differ at {record.box}"
        canvas[where] = elements
        written[where] = True
    assert bool(written.all()), f"{fqn}: {int((~written).sum()):,} of {written.size:,} elements are in no chunk"
    return Truth(meta.dtype.name, meta.shape, canvas.tobytes())


def all_rows(manifest: Manifest) -> npt.NDArray[np.int64]:
    """Every chunk row."""
    return np.arange(len(manifest.chunks), dtype=np.int64)


def columns_of(chunks: ChunkTable) -> dict[str, Any]:
    """The columns as lists, to compare tables."""
    names = ("tensor", "offsets", "sizes", "file", "offset", "length", "rank", "flags", "strides")
    return {name: None if (c := getattr(chunks, name)) is None else c.tolist() for name in names}


def describe(manifest: Manifest) -> dict[str, Any]:
    """Everything that a manifest says, to compare two of them."""
    return {
        "tensors": list(manifest.tensors),
        "chunks": columns_of(manifest.chunks),
        "files": list(manifest.files),
        "blobs": [(b.fqn, b.kind, b.where, b.path) for b in manifest.blobs],
        "info": dict(manifest.info),
    }


def stored_bytes(location: Path) -> dict[str, bytes]:
    """Every file of a case by its path below the root; a single file stands in its folder alone."""
    if location.is_file():
        return {location.name: location.read_bytes()}
    return {p.relative_to(location).as_posix(): p.read_bytes() for p in sorted(location.rglob("*")) if p.is_file()}


def assert_inert(value: object) -> None:
    """``value`` is plain data, or a placeholder of this package: nothing of torch or the writer's own classes."""
    if isinstance(value, INERT_ATOMS):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            assert_inert(key)
            assert_inert(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            assert_inert(item)
    else:
        module = type(value).__module__
        assert module.startswith("ckpt_tool.") or module in sys.stdlib_module_names, type(value)


class ReaderTests:
    """The contract of ``formats.base.Reader``, on every case of a subclass."""

    reader: ClassVar[Reader]
    reader_import: ClassVar[str]
    """``module:attribute`` of the reader, for the test that imports it in a fresh process."""
    cases: ClassVar[tuple[Case, ...]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test that asks for ``case`` once per case."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=[c.name for c in self.cases])

    @pytest.fixture
    def store(self, case: Case) -> Iterator[RecordingStore]:
        """The case's files, recording every request."""
        store = RecordingStore(open_store(case.location)[0])
        yield store
        store.close()

    def test_probe_takes_its_own(self, case: Case, store: RecordingStore) -> None:
        """A checkpoint of this format is recognised, and the probe says by what."""
        probe = self.reader.probe(source_of(store))
        assert probe.confidence > 0.5, probe
        assert probe.why

    @pytest.mark.parametrize(
        "files",
        [
            {},
            {"README.md": b"# hello\n", "notes.txt": b"nothing here"},
            {"model.bin": b"<!DOCTYPE html><html>not found</html>"},
            {"weights.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n"},
        ],
        ids=["empty", "text", "html", "numpy"],
    )
    def test_probe_leaves_strangers_alone(self, files: dict[str, bytes]) -> None:
        """What is no checkpoint of this format is not taken for one, and the probe says why."""
        probe = self.reader.probe(source_of(MemoryStore(files)))
        assert probe.confidence <= 0.5, probe
        assert probe.why

    def test_columns_agree(self, case: Case, store: RecordingStore) -> None:
        """Ids name rows, boxes lie inside their tensors, and bytes inside their files."""
        manifest = self.reader.read(source_of(store))
        assert manifest.format == self.reader.name
        chunks = self.reader.resolve(source_of(store), manifest, all_rows(manifest))
        for table in (manifest.chunks, chunks):
            assert set(table.tensor.tolist()) <= set(range(len(manifest.tensors)))
            assert set(table.file.tolist()) <= set(range(len(manifest.files)))
            assert bool((table.offsets >= 0).all())
            assert bool((table.volume > 0).all())
            assert bool((table.offsets + table.sizes <= manifest.tensors.shape[table.tensor]).all())
            nbytes = manifest.files.nbytes[table.file]
            assert bool(((table.offset >= 0) & ((table.offset + table.length <= nbytes) | (nbytes < 0))).all())
        assert not bool((chunks.flags & ChunkFlag.UNRESOLVED).any())
        listing = store.listing()
        for blob in manifest.blobs:
            assert blob.where is None or blob.where.end <= listing.nbytes(blob.where.path), blob

    def test_every_tensor_is_bit_for_bit_the_truth(self, case: Case, store: RecordingStore) -> None:
        """Names, types, shapes and every bit are what the framework saved."""
        manifest = self.reader.read(source_of(store))
        chunks = self.reader.resolve(source_of(store), manifest, all_rows(manifest))
        actual = {fqn: assemble(store, manifest, chunks, fqn) for fqn in manifest.tensors.fqns}
        untold = {fqn for fqn in actual if any(fnmatchcase(fqn, pattern) for pattern in case.without_truth)}
        assert {fqn: tensor for fqn, tensor in actual.items() if fqn not in untold} == dict(case.truth())

    def test_resolve_is_idempotent(self, case: Case, store: RecordingStore) -> None:
        """Resolving again changes nothing, and resolving some rows changes no other."""
        source = source_of(store)
        manifest = self.reader.read(source)
        everything = all_rows(manifest)
        once = self.reader.resolve(source, manifest, everything)
        twice = self.reader.resolve(source, manifest.replace(chunks=once), everything)
        assert columns_of(twice) == columns_of(once)
        if not len(everything):
            return
        part = self.reader.resolve(source, manifest, everything[::2])
        assert columns_of(part.take(everything[::2])) == {
            **columns_of(once.take(everything[::2])),
            **({"strides": part.take(everything[::2]).strides} if part.strides is None else {}),
        }
        assert columns_of(part.take(everything[1::2]).replace(strides=None)) == columns_of(
            manifest.chunks.take(everything[1::2]).replace(strides=None)
        )

    def test_read_takes_no_payload(self, case: Case, store: RecordingStore) -> None:
        """With every payload byte inverted the manifest stays the same: reading interprets none of them."""
        source = source_of(store)
        manifest = self.reader.read(source)
        chunks = self.reader.resolve(source, manifest, all_rows(manifest))
        files = {path: bytearray(data) for path, data in stored_bytes(case.location).items()}
        for row in range(len(chunks)):
            entry = manifest.files.entries[chunks.file[row]]
            if "slice:" in (entry.codec or ""):  # a small value inside of what describes it
                continue
            where = entry.part or FileRange(entry.path, int(chunks.offset[row]), int(chunks.length[row]))
            inverted = bytes(255 - b for b in stored_bytes_of(store, where))
            files[where.path][where.offset : where.end] = inverted
        other = self.reader.read(source_of(MemoryStore({path: bytes(data) for path, data in files.items()})))
        assert describe(other) == describe(manifest)

    def test_requests_are_counted(self, case: Case, store: RecordingStore) -> None:
        """Reading and resolving make no more requests than the case allows."""
        source = source_of(store)
        store.clear()
        manifest = self.reader.read(source)
        assert len(store.calls) <= case.max_read_requests
        store.clear()
        self.reader.resolve(source, manifest, all_rows(manifest))
        limit = case.max_resolve_requests
        assert len(store.calls) <= (2 * len(manifest.chunks) if limit is None else limit)

    def test_manifest_is_stable(self, case: Case, store: RecordingStore) -> None:
        """Two readings say the same, and what they say beyond the tables can be written as JSON."""
        first, second = self.reader.read(source_of(store)), self.reader.read(source_of(store))
        assert describe(first) == describe(second)
        assert json.loads(json.dumps(dict(first.info))) == dict(first.info)
        assert all(first.notes)

    def test_no_framework_is_imported(self) -> None:
        """Reading, resolving and loading objects leaves torch and its friends unimported, in one process for all."""
        module, attribute = self.reader_import.split(":")
        script = f"""
import sys, numpy as np
from {module} import {attribute} as reader
from ckpt_tool.formats.base import Source
from ckpt_tool.storage.open import open_store
for location in sys.argv[1:]:
    source = Source(*open_store(location))
    manifest = reader.read(source)
    reader.resolve(source, manifest, np.arange(len(manifest.chunks)))
    reader.load_blobs(source, manifest, range(len(manifest.blobs)))
    print(location, sorted({{"torch", "deepspeed", "megatron", "transformers", "jax"}} & set(sys.modules)))
"""
        locations = [str(case.location) for case in self.cases]
        done = subprocess.run([sys.executable, "-c", script, *locations], capture_output=True, text=True, check=False)
        assert (done.stdout.splitlines(), done.stderr) == ([f"{location} []" for location in locations], "")

    def test_blobs_load_inert(self, case: Case, store: RecordingStore) -> None:
        """Objects come out as plain data or placeholders; only those asked for are loaded."""
        source = source_of(store)
        manifest = self.reader.read(source)
        blobs = self.reader.load_blobs(source, manifest, range(len(manifest.blobs)))
        assert [(b.fqn, b.is_loaded) for b in blobs] == [(b.fqn, True) for b in manifest.blobs]
        for blob in blobs:
            assert_inert(blob.value)
        if len(blobs) > 1:
            first = self.reader.load_blobs(source, manifest, [0])
            assert [b.is_loaded for b in first[1:]] == [b.is_loaded for b in manifest.blobs[1:]]

    def test_checksums_hold(self, case: Case, store: RecordingStore) -> None:
        """Every checksum that the reader finds is that of the bytes it names, and nothing around them is odd."""
        source = source_of(store)
        manifest = self.reader.read(source)
        for checksum in checksums_of(self.reader, source, manifest):
            content = open_files(store, manifest.files, 1 << 26)
            assert zlib.crc32(stored_bytes_of(content, checksum.where)) == checksum.crc32, checksum
        assert [f for f in self.reader.checksums(source, manifest) if isinstance(f, Finding)] == []

    def test_a_sound_checkpoint_has_no_errors(self, case: Case, store: RecordingStore) -> None:
        """``check`` finds nothing wrong with what a framework wrote."""
        source = source_of(store)
        findings = list(self.reader.check(source, self.reader.read(source)))
        assert [f for f in findings if f.severity is Severity.ERROR] == []

    def test_damage_is_reported_as_such(self, case: Case) -> None:
        """Files cut in half give findings or errors of this package, never a stray exception."""
        files = stored_bytes(case.location)
        for path in list(files)[:6]:
            source = source_of(MemoryStore({**files, path: files[path][: len(files[path]) // 2]}))
            try:
                self.reader.probe(source)
                manifest = self.reader.read(source)
                list(self.reader.check(source, manifest))
                self.reader.resolve(source, manifest, all_rows(manifest))
            except CkptError as error:
                assert error.message  # noqa: PT017 - whether it raises depends on the file that was cut


def stored_bytes_of(store: Store, where: FileRange) -> bytes:
    """The bytes as they lie in the file."""
    return store.read(where.path, where.offset, where.length)
