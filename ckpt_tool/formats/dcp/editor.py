"""The editor of DCP checkpoints: a new ``.metadata`` over the old items, which know no names."""

from __future__ import annotations

from ckpt_tool.errors import CoverageError, Unsupported
from ckpt_tool.formats._dcp.metadata import METADATA_NAME, StorageInfo, load_metadata
from ckpt_tool.formats._dcp.metadata_pickle import WrittenChunk, WrittenChunks, WrittenItem, WrittenTensor
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.dcp.metadata_pickle import metadata_pickle
from ckpt_tool.formats.dcp.sidecar import SIDECAR_NAME
from ckpt_tool.formats.edited import Edit, EditedFile, EditedFiles
from ckpt_tool.manifest.model import FileRange, KeyPath, Manifest
from ckpt_tool.sizes import shell_word

__all__ = ["EDITOR", "DcpEditor"]

_Key = tuple[str, tuple[int, ...] | None]


class DcpEditor:
    """Files that keep all of their items are linked; of the others the kept items are put together again."""

    def lay_out(self, source: Source, manifest: Manifest, edit: Edit) -> EditedFiles:
        """The files; an item is a zip of its own, so that it may lie anywhere in any file.

        Raises:
            Unsupported: metadata of single ranks, compressed items, free metadata.
        """
        if edit.metadata or edit.repair:
            what = "metadata" if edit.metadata else "repair"
            raise Unsupported(f"DCP has nothing that --{what} could change", where=manifest.where)
        if METADATA_NAME not in source.listing:
            raise Unsupported(
                "saved without collectives, each rank with metadata of its own",
                where=manifest.where,
                hint="ckpt reshard SRC OUT --to dcp joins them",
            )
        found = load_metadata(source.read_whole(METADATA_NAME), METADATA_NAME)
        stored = found.storage.records()
        if any(transforms for *_, transforms in stored.values()):
            raise Unsupported(
                "compressed items are not edited", where=manifest.where, hint="ckpt reshard rewrites them"
            )
        kept = {
            key: info
            for key, info in stored.items()
            if (key[0] in edit.objects if key[1] is None else key[0] in edit.names)
        }
        files, places = _files(source, stored, kept)
        tensors: list[WrittenTensor] = []
        chunks: list[WrittenChunk] = []
        for old, new in edit.names.items():
            item = found.tensors[old]
            own = [
                WrittenChunk(offsets, sizes, places[old, offsets])
                for offsets, sizes in item.chunks
                if (old, offsets) in places or _is_needed(sizes, old, manifest.root)
            ]
            path = _path(found.paths.get(old, (old,)), old, new)
            tensors.append(WrittenTensor(new, item.dtype, item.shape, path, len(own)))
            chunks += own
        blobs = [
            (new, _path(found.paths.get(old, (old,)), old, new), places[old, None])
            for old, new in edit.objects.items()
            if (old, None) in places
        ]
        metadata = metadata_pickle(tensors, WrittenChunks.of(chunks), blobs, save_id=found.save_id or "").finished()
        replaced = {path for path, *_ in stored.values()} | {METADATA_NAME, SIDECAR_NAME}
        notes = [f"{name} of the metadata, which torch does not know, is left out" for name in found.extra]
        return EditedFiles(
            (*files, EditedFile(METADATA_NAME, (metadata,))), tuple(sorted(replaced)), METADATA_NAME, tuple(notes)
        )


def _files(
    source: Source, stored: dict[_Key, StorageInfo], kept: dict[_Key, StorageInfo]
) -> tuple[list[EditedFile], dict[_Key, WrittenItem]]:
    """The files that hold the kept items, and where each item is in them."""
    by_file: dict[str, list[tuple[int, int, _Key]]] = {}
    n_items: dict[str, int] = {}
    for key, (path, offset, length, _) in stored.items():
        n_items[path] = n_items.get(path, 0) + 1
        if key in kept:
            by_file.setdefault(path, []).append((offset, length, key))
    files: list[EditedFile] = []
    places: dict[_Key, WrittenItem] = {}
    for path, items in by_file.items():
        if len(items) == n_items[path]:
            files.append(EditedFile(path, (FileRange(path, 0, source.listing.nbytes(path)),)))
            places |= {key: WrittenItem(path, offset, length) for offset, length, key in items}
            continue
        parts: list[FileRange] = []
        at = 0
        for offset, length, key in sorted(items, key=lambda item: item[:2]):
            places[key] = WrittenItem(path, at, length)
            at += length
            if parts and parts[-1].end == offset:
                parts[-1] = FileRange(path, parts[-1].offset, parts[-1].length + length)
            else:
                parts.append(FileRange(path, offset, length))
        files.append(EditedFile(path, tuple(parts)))
    return files, places


def _is_needed(sizes: tuple[int, ...], fqn: str, where: str) -> bool:
    """False for a chunk without elements, which no item stands for.

    Raises:
        CoverageError: it has some.
    """
    if 0 in sizes:
        return False
    hint = f'"ckpt verify {shell_word(where)}" lists all'
    raise CoverageError(f"no item holds a chunk of {fqn!r}", where=where, hint=hint)


def _path(path: KeyPath, old: str, new: str) -> KeyPath:
    """Keys of a renamed tensor: the outer ones stay where the new name begins with them."""
    if old == new:
        return path
    outer = path[:-1]
    start = "".join(f"{key}." for key in outer)
    return (*outer, new[len(start) :]) if outer and new.startswith(start) and len(new) > len(start) else (new,)


EDITOR = DcpEditor()
