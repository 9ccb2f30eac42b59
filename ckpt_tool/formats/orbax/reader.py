"""The reader of Orbax checkpoints: one step, with one tree of arrays or several items.

Arrays lie in zarr 2 or 3, as files or in an OCDBT database. Names are the keys that lead to a leaf, joined by dots;
with several trees in a step, the item's name comes in front. No JAX, no TensorStore and no devices are needed: shapes,
chunks and bytes are in the files, and how arrays were sharded over devices is only told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._columns import Columns
from ckpt_tool.formats._json import read_json
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.orbax.arrays import DESCRIPTIONS
from ckpt_tool.formats.orbax.chunks import Filled, Stored, add_chunks, arrays_of, shard_indexes
from ckpt_tool.formats.orbax.location import Items, find_items
from ckpt_tool.formats.orbax.ocdbt import MANIFEST, Value, read_database
from ckpt_tool.formats.orbax.tree import STRINGS, Leaf, Tree, read_mesh, read_tree
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, KeyPath, Manifest
from ckpt_tool.sizes import counted

__all__ = ["READER", "OrbaxReader"]

_STEP = "_CHECKPOINT_METADATA"
_DOCUMENT = "metadata"
_EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": []}
_DATABASE = re.compile(r"(?:^|/)(?:d|ocdbt_data|ocdbt_meta)/[^/]+$|(?:^|/)manifest\.ocdbt$")
_VALUES = "checkpoint"  # before 0.4 Orbax kept the tree and what is no array in a file of Flax's
_MANY_FILES = 100_000
_MAX_PROCESSES_READ = 64
_MAX_CHUNKS_NAMED = 100


class OrbaxReader(ResolvedReader):
    """Reads one step.

    Requests: ``read`` makes one for each JSON file, and for a database its manifest and each node of its tree; arrays
    in files of their own cost one each for their description. Shards of several pieces cost one each for their index.
    """

    name = "orbax"

    def probe(self, source: Source) -> Probe:
        """By names of files."""
        if source.listing.entry is not None:
            return Probe(0.0, "a single file; Orbax writes folders")
        items = find_items(source.listing.paths)
        if items is None:
            return Probe(0.0, f"no {MANIFEST}, and no {_STEP} beside folders of arrays")
        return Probe(0.95 if items.is_sure else 0.6, items.evidence)

    def read(self, source: Source) -> Manifest:
        """The manifest, chunks resolved.

        Raises:
            NotFound: an item is unfinished, or files are missing.
            FormatError: a file is damaged.
            Unsupported: arrays are coded in a way that is not known here.
        """
        items = _items(source)
        columns, filled = Columns(), Filled()
        blobs: list[Blob] = []
        info: dict[str, Any] = {"items": list(items.arrays)} if items.arrays != ("",) else {}
        notes: list[str] = []
        meshes, partitions = [], {}
        for folder in items.arrays:
            prefix: KeyPath = (folder,) if len(items.arrays) > 1 else ()
            tree = read_tree(source, folder)
            _add_item(source, folder, prefix, tree, columns, filled)
            blobs += _values_of(tree, prefix)
            mesh, own = read_mesh(source, folder)
            meshes += [mesh] if mesh is not None else []
            partitions.update({_fqn(prefix, name): found for name, found in own.items()})
            notes += _unknown_tree_note(source, folder, tree)
            notes += [_written_over(_fqn(prefix, name)) for name in tree.written_over]
        for folder in items.json:
            path = f"{folder}/{_DOCUMENT}"
            where = FileRange(path, 0, source.listing.nbytes(path))
            blobs.append(Blob(folder, "json", where, read_json(source, path), (folder,), is_loaded=True))
        for path, nbytes in source.listing.sizes.items():
            if _DATABASE.search(path):  # nodes of the tree lie in them too, also such as no version refers to any more
                columns.add_file(FileEntry(path, nbytes))
        tensors, chunks, files = columns.tables()
        info |= _step_info(source) | _random_keys(source, items)
        if partitions:
            info["partitions"] = partitions
        if filled.zeros:
            count = sum(filled.zeros.values())
            info["zero_chunks"] = filled.zeros
            notes.append(
                f"{counted(count, 'chunk', 'are')} not stored, which stands for the fill value 0, in "
                f"{counted(len(filled.zeros), 'array')}"
            )
        if filled.missing:
            info["missing_chunks"] = filled.missing
            notes.append(
                f"{counted(sum(filled.missing.values()), 'chunk', 'are')} missing, in "
                f"{counted(len(filled.missing), 'array')}"
            )
        return Manifest(
            format=self.name,
            root=source.listing.url,
            tensors=tensors,
            chunks=chunks,
            files=files,
            blobs=tuple(blobs),
            mesh=meshes[0] if meshes else None,
            info=info,
            notes=tuple(notes),
        )

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Chunks and leaves that are missing, arrays that no tree tells, indexes of shards, very many files.

        Reads the store again, and the index of each shard.
        """
        n_files = len(source.listing.sizes)
        if n_files > _MANY_FILES:
            said = (
                f"{counted(n_files, 'file')}; Orbax with use_ocdbt=True writes a few, which is faster on most storages"
            )
            yield Finding("many-files", Severity.WARNING, said)
        items = _items(source)
        for folder in items.arrays:
            prefix: KeyPath = (folder,) if len(items.arrays) > 1 else ()
            tree = read_tree(source, folder)
            path = "/".join(filter(None, (folder, "_METADATA")))
            if path not in source.listing:
                said = f"{path} is missing: Orbax restores no tree without it, and kinds of keys are not known"
                yield Finding("missing-file", Severity.WARNING, said, where=FileRange(path, 0, 0))
            stored = arrays_of(source, _values(source, folder))
            names = {one.name for one in stored}
            for name in tree.written_over:
                fqn = _fqn(prefix, name)
                yield Finding("missing-tensor", Severity.ERROR, _written_over(fqn), fqn=fqn)
            for name, leaf in tree.leaves.items():
                if leaf.kind == "string" and name not in tree.strings:
                    path = "/".join(filter(None, (folder, STRINGS)))
                    said = f"the text {_fqn(prefix, name)!r} is in the tree and not in {path}"
                    yield Finding("missing-object", Severity.ERROR, said, where=FileRange(path, 0, 0))
                if name not in names and leaf.has_array:
                    fqn = _fqn(prefix, name)
                    said, where = f"{fqn!r} is in the tree and not stored", _place_of(source, folder, name)
                    yield Finding("missing-tensor", Severity.ERROR, said, fqn, where)
            for one in stored:
                if tree.leaves and one.name not in tree.leaves:
                    fqn = _fqn(prefix, one.name)
                    yield Finding("stray-tensor", Severity.WARNING, f"{fqn!r} is stored and not in the tree", fqn=fqn)
                n_lost = manifest.info.get("missing_chunks", {}).get(one.name, 0)
                if n_lost:
                    yield from _lost_findings(source, folder, _fqn(prefix, one.name), one, tree, n_lost)
                if one.array.is_sharded:
                    yield from _index_findings(source, prefix, one)


READER = OrbaxReader()


def _items(source: Source) -> Items:
    """The items of a step.

    Raises:
        NotFound: there are none, or they are unfinished.
    """
    items = find_items(source.listing.paths)
    if items is None:
        raise NotFound(f"no {MANIFEST}, and no {_STEP} beside folders of arrays", where=source.listing.url)
    if items.unfinished:
        named = ", ".join(folder or "the folder itself" for folder in items.unfinished)
        raise NotFound(
            f"the save did not finish: {named}: what processes wrote was never put together",
            where=source.listing.url,
            hint='take another step: "ckpt ls" lists those that are complete',
        )
    return items


def _values(source: Source, folder: str) -> dict[str, Value]:
    """Keys and values of an item's store: of its database, else its files."""
    prefix = f"{folder}/" if folder else ""
    if prefix + MANIFEST in source.listing:
        return read_database(source, folder)
    return {
        path[len(prefix) :]: FileRange(path, 0, nbytes)
        for path, nbytes in source.listing.sizes.items()
        if path.startswith(prefix)
    }


def _add_item(source: Source, folder: str, prefix: KeyPath, tree: Tree, columns: Columns, filled: Filled) -> None:
    for one in arrays_of(source, _values(source, folder)):
        leaf = tree.leaves.get(one.name)
        path = (*prefix, *(leaf.path if leaf is not None else (one.name,)))
        tensor = columns.add_tensor(_fqn(prefix, one.name), one.array.dtype, one.array.shape, path=path)
        lost = tree.keeps_fill_values or not one.array.is_filled_with_zeros
        add_chunks(source, columns, tensor, one, filled, zeros_are_left_out=not lost)


def _fqn(prefix: KeyPath, name: str) -> str:
    return ".".join([*map(str, prefix), name])


def _values_of(tree: Tree, prefix: KeyPath) -> Iterator[Blob]:
    """Leaves that are no arrays: text, and what is empty."""
    for name, leaf in tree.leaves.items():
        if leaf.kind in _EMPTY:
            yield _value(prefix, leaf, _EMPTY[leaf.kind])
        elif leaf.kind == "string" and name in tree.strings:
            yield _value(prefix, leaf, tree.strings[name])


def _value(prefix: KeyPath, leaf: Leaf, value: Any) -> Blob:
    return Blob(_fqn(prefix, leaf.name), "value", None, value, (*prefix, *leaf.path), is_loaded=True)


def _written_over(fqn: str) -> str:
    return f"several leaves of the tree are called {fqn!r}, of which Orbax stored one array: the others are lost"


def _unknown_tree_note(source: Source, folder: str, tree: Tree) -> list[str]:
    if tree.leaves:
        return []
    where = folder or source.listing.url
    notes = [f"{where} has no _METADATA: names are those of the arrays, and which dots part keys is not known"]
    values = f"{folder}/{_VALUES}" if folder else _VALUES
    if values in source.listing:
        notes.append(f"{values} holds the tree and its small values, in MessagePack: name it to read them")
    return notes


def _step_info(source: Source) -> dict[str, Any]:
    """What the step says of itself; its number is only in the folder's name."""
    said = read_json(source, _STEP) if _STEP in source.listing else None
    if not isinstance(said, dict):
        return {}
    return {key: said[key] for key in ("item_handlers", "custom_metadata") if said.get(key)}


def _random_keys(source: Source, items: Items) -> dict[str, Any]:
    """Arrays that are states of random generators, with the generator's name. A request per process that wrote."""
    found = {}
    for folder in items.arrays:
        prefix = f"{folder}/array_metadatas/" if folder else "array_metadatas/"
        paths = [path for path in source.listing.paths if path.startswith(prefix)]
        for path in paths[:_MAX_PROCESSES_READ]:
            own: KeyPath = (folder,) if len(items.arrays) > 1 else ()
            found.update({_fqn(own, name): kind for name, kind in _generators(source, path).items()})
    return {"random_keys": found} if found else {}


def _generators(source: Source, path: str) -> dict[str, str]:
    """Random generators by the name of the array with their state; nothing where the file is damaged."""
    try:
        rows = [row["array_metadata"] for row in read_json(source, path)["array_metadatas"]]
        kinds = {str(row["param_name"]): (row.get("ext_metadata") or {}).get("random_key_impl") for row in rows}
    except (AttributeError, KeyError, TypeError, FormatError):
        return {}
    return {name: str(kind) for name, kind in kinds.items() if kind is not None}


def _place_of(source: Source, folder: str, name: str) -> FileRange | None:
    """What to fetch of an array that is not there: its description, or all of it; None in a database."""
    prefix = f"{folder}/" if folder else ""
    if prefix + MANIFEST in source.listing:
        return None
    paths = source.listing.paths
    if not any(path.startswith(f"{prefix}{name}/") for path in paths):
        return FileRange(f"{prefix}{name}/*", 0, 0)
    here = (each for each in DESCRIPTIONS if any(path.endswith(f"/{each}") for path in paths))
    return FileRange(f"{prefix}{name}/{next(here, DESCRIPTIONS[0])}", 0, 0)


def _lost_findings(source: Source, folder: str, fqn: str, stored: Stored, tree: Tree, n_lost: int) -> Iterator[Finding]:
    """Chunks that are not there, each with its file where the store is files; very many are a number."""
    prefix = f"{folder}/" if folder else ""
    zeros_are_left_out = stored.array.is_filled_with_zeros and not tree.keeps_fill_values
    lost = list(islice(stored.lost(zeros_are_left_out=zeros_are_left_out), _MAX_CHUNKS_NAMED))
    if prefix + MANIFEST in source.listing:
        lost = []
    for index in lost:
        path = f"{prefix}{stored.name}/{stored.array.chunk_key(index)}"
        what = "is cut" if path in source.listing else "is missing"
        yield Finding("missing-chunk", Severity.ERROR, f"{path} {what}, a chunk of {fqn!r}", fqn, FileRange(path, 0, 0))
    if n_lost > len(lost):
        more = "more " if lost else ""
        said = f"{counted(n_lost - len(lost), f'{more}chunk of {fqn!r}', 'are')} not stored"
        yield Finding("missing-chunk", Severity.ERROR, said, fqn=fqn)


def _index_findings(source: Source, prefix: KeyPath, stored: Stored) -> Iterator[Finding]:
    """Shards whose index does not say that its one piece fills what is in front of it."""
    fqn = _fqn(prefix, stored.name)
    try:
        indexes = shard_indexes(source, stored)
    except FormatError as error:
        yield Finding("shard-index", Severity.ERROR, str(error), fqn=fqn)
        return
    if stored.array.n_inner > 1:
        return
    for index, [(offset, nbytes)] in indexes.items():
        value = stored.values[index]
        whole = (value.length if isinstance(value, FileRange) else len(value.data)) - stored.array.index_nbytes
        if (offset, nbytes) not in ((0, whole), (-1, 0)):
            said = f"{fqn!r}: the piece of shard {list(index)} is at {offset}+{nbytes}, expected 0+{whole}"
            yield Finding("shard-index", Severity.ERROR, said, fqn=fqn)
