"""Manifests made at random: odd dtypes, nested paths, strides, replicas, encoded files, loaded and unloaded objects."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.manifest.model import Blob, Chunk, FileEntry, FileRange, KeyPath, Manifest, MeshInfo, TensorMeta
from ckpt_tool.manifest.tables import SECTIONS, ChunkTable, FileTable, TensorTable
from tests.strategies import boxes, shapes

text = st.text(max_size=8)
words = st.text(min_size=1, max_size=8)
counts = st.integers(0, 1 << 50)
dtypes = st.sampled_from([*DTYPES.values(), DType("X9", 12, "opaque", "X9"), DType("F4", 4, "opaque", "F4")])
paths = st.lists(st.one_of(words, st.integers(-5, 1 << 40)), min_size=1, max_size=4).map(tuple)
ranges = st.builds(FileRange, words, counts, counts)

plain_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.binary(max_size=4) | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(text | st.integers() | st.tuples(st.integers(), text), inner, max_size=3)
    ),
    max_leaves=8,
)


def tensors() -> st.SearchStrategy[TensorMeta]:
    """A tensor, its path sometimes only its name."""

    def made(fqn: str, dtype: DType, shape: tuple[int, ...], section: str, path: KeyPath | None) -> TensorMeta:
        return TensorMeta(fqn, dtype, shape, section, path or (fqn,))

    return st.builds(made, words, dtypes, shapes(4, 6), st.sampled_from(SECTIONS), st.none() | paths)


def files() -> st.SearchStrategy[FileEntry]:
    """A plain file, or the content of a compressed part of one."""
    plain = st.builds(FileEntry, words, st.integers(-1, 1 << 50))
    encoded = st.builds(FileEntry, words, counts, st.sampled_from(["deflate", "zstd"]), ranges)
    return plain | encoded


def blobs() -> st.SearchStrategy[Blob]:
    """An object, loaded or not."""
    rank = st.none() | st.integers(0, 9)
    where = st.none() | ranges
    unloaded = st.builds(Blob, words, st.sampled_from(["pickle", "json"]), where, st.none(), paths, rank)
    loaded = st.builds(Blob, words, st.just("value"), where, plain_values, paths | st.just(()), rank, st.just(True))
    return unloaded | loaded


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """A manifest whose columns agree; bytes are of no real file."""
    table = TensorTable.from_records(draw(st.lists(tensors(), max_size=4, unique_by=lambda t: t.fqn)))
    file_table = FileTable(tuple(draw(st.lists(files(), min_size=1, max_size=3, unique_by=lambda f: f.path))))
    is_strided = draw(st.booleans())
    rows = []
    for meta in table:
        for _ in range(draw(st.integers(0, 3))):
            where = FileRange(draw(st.sampled_from(file_table.paths)), draw(counts), draw(counts))
            strides = tuple(draw(st.integers(-9, 99)) for _ in meta.shape) if is_strided else None
            rank = draw(st.none() | st.integers(0, 99_999))
            rows.append(Chunk(meta.fqn, draw(boxes(meta.shape)), where, strides, draw(st.integers(0, 15)), rank))
    json_able = st.dictionaries(text, st.none() | st.booleans() | st.integers() | text | st.lists(text), max_size=3)
    mesh = st.builds(MeshInfo, st.just(("tp", "dp")), st.just((2, 3)), text)
    return Manifest(
        format=draw(words),
        root=draw(text),
        tensors=table,
        chunks=ChunkTable.from_records(rows, table, file_table),
        files=file_table,
        blobs=tuple(draw(st.lists(blobs(), max_size=3))),
        mesh=draw(st.none() | mesh),
        info=draw(json_able),
        notes=tuple(draw(st.lists(text, max_size=2))),
    )


def described(manifest: Manifest) -> dict[str, Any]:
    """Everything a manifest says, to compare two of them; NaN in objects equals NaN."""
    chunks = manifest.chunks
    names = ("tensor", "offsets", "sizes", "file", "offset", "length", "rank", "flags", "strides")
    columns = {
        name: None if (c := getattr(chunks, name)) is None else (c.dtype.name, c.shape, c.tolist()) for name in names
    }
    return {
        "columns": columns,
        "tensors": list(manifest.tensors),
        "shape": manifest.tensors.shape.tolist(),
        "files": list(manifest.files),
        "blobs": [(b.fqn, b.kind, b.where, repr(b.value), b.path, b.rank, b.is_loaded) for b in manifest.blobs],
        "rest": (manifest.format, manifest.root, manifest.mesh, dict(manifest.info), manifest.notes),
    }
