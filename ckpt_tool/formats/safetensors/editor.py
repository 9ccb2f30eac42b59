"""The editor of safetensors files: a new header before the old payload, and the index anew from the headers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ckpt_tool.errors import CoverageError, FormatError, Unsupported
from ckpt_tool.formats._hf_index import homes_of, parse_index, write_index
from ckpt_tool.formats._safetensors.header import Entry, Header, build_header
from ckpt_tool.formats._safetensors.stored import read_headers
from ckpt_tool.formats._split_names import split_name
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.edited import Edit, EditedFile, EditedFiles
from ckpt_tool.formats.safetensors.names import INDEX_SUFFIX
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.sizes import counted, shell_word

__all__ = ["EDITOR", "SafetensorsEditor"]


class SafetensorsEditor:
    """One file of whole tensors, or several with or without an index."""

    def lay_out(self, source: Source, manifest: Manifest, edit: Edit) -> EditedFiles:
        """A file that keeps all that it has under its names is linked; of the others the header is new.

        The index is written anew where there is one, or where several files have none.

        Raises:
            FormatError: names share bytes, and nothing was said about it.
            CoverageError: files are missing that the index names.
            Unsupported: an element type that the format's own names do not cover, in a file that must be rewritten.
        """
        _check(manifest)
        paths = manifest.files.paths
        headers = read_headers(source, paths)
        index = manifest.info.get("index")
        old = parse_index(source.read_whole(index), index) if isinstance(index, str) else None
        held = {p: {e.name: e.nbytes for e in h.entries} for p, h in zip(paths, headers, strict=True)}
        homes = homes_of(held, old.weight_map if old else {})
        files: list[EditedFile] = []
        weight_map: dict[str, str] = {}
        total = 0
        notes: list[str] = []
        for path, header in zip(paths, headers, strict=True):
            dropped = _aliases(header, path, edit, notes)
            kept = [
                entry
                for entry in header.entries
                if entry.name in edit.names and homes[entry.name] == path and entry.name not in dropped
            ]
            edited = _file(path, source.listing.nbytes(path), header, kept, edit)
            if edited is None:
                notes.append(f"{path} holds nothing any more and is left out")
                continue
            files.append(edited)
            weight_map |= {edit.names[entry.name]: path for entry in kept}
            total += sum(entry.nbytes for entry in kept)
        if manifest.format == "safetensors":
            return EditedFiles(tuple(files), paths, None, tuple(notes))
        index_path = index if isinstance(index, str) else _index_name(paths)
        files.append(EditedFile(index_path, (write_index(weight_map, total),)))
        return EditedFiles(tuple(files), (*paths, index_path), index_path, tuple(notes))


def _check(manifest: Manifest) -> None:
    missing = manifest.info.get("missing_files") or ()
    if missing:
        raise CoverageError(
            f"tensors of {counted(len(missing), 'missing file')} would be lost: {missing[0]}",
            where=manifest.where,
            hint=f'fetch them, or take what is here with "ckpt verify {shell_word(manifest.where)} --salvage OUT"',
        )


def _aliases(header: Header, path: str, edit: Edit, notes: list[str]) -> frozenset[str]:
    """Names to leave out because others have the same bytes."""
    if not header.aliases:
        return frozenset()
    first, second = header.aliases[0]
    said = f"{first!r} and {second!r} have the same bytes, which the format forbids"
    if edit.repair is None:
        hint = "--repair copy gives each bytes of its own, --repair drop keeps the first name"
        raise FormatError(said, where=path, hint=hint)
    what = "each has its own now" if edit.repair == "copy" else f"{second!r} was left out"
    more = f" ({len(header.aliases) - 1:,} more like this)" if len(header.aliases) > 1 else ""
    notes.append(f"{path}: {said}; {what}{more}")
    return frozenset(name for _, name in header.aliases) if edit.repair == "drop" else frozenset()


def _file(path: str, nbytes: int, header: Header, kept: Sequence[Entry], edit: Edit) -> EditedFile | None:
    """The file with these tensors; as it is where nothing changes, None where nothing is left."""
    metadata = _metadata(header.metadata, edit.metadata)
    is_same = len(kept) == len(header.entries) and all(edit.names[entry.name] == entry.name for entry in kept)
    if is_same and metadata == dict(header.metadata) and not header.aliases:
        return EditedFile(path, (FileRange(path, 0, nbytes),))
    if not kept and header.entries:
        return None
    opaque = [entry.name for entry in kept if entry.dtype.safetensors is None]
    if opaque:
        raise Unsupported(f"{opaque[0]!r} has an element type that this version cannot name", where=path)
    # With payload at the same place within a block, file systems that share blocks copy none of it.
    origins = {edit.names[entry.name]: header.data_start + entry.start for entry in kept}
    data, _ = build_header([(edit.names[entry.name], entry.dtype, entry.shape) for entry in kept], metadata, origins)
    ranges = _joined(FileRange(path, header.data_start + entry.start, entry.nbytes) for entry in kept)
    return EditedFile(path, (data, *ranges))


def _metadata(old: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**old, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def _joined(ranges: Iterable[FileRange]) -> list[FileRange]:
    """Neighbours put together."""
    found: list[FileRange] = []
    for each in ranges:
        if not each.length:
            continue
        if found and found[-1].end == each.offset:
            found[-1] = FileRange(each.path, found[-1].offset, found[-1].length + each.length)
        else:
            found.append(each)
    return found


def _index_name(paths: Sequence[str]) -> str:
    """What the index of numbered files is called."""
    stem = next((name.family[0] for path in paths if (name := split_name(path))), "model")
    return re.sub(r"[/\\]+$", "", stem) + INDEX_SUFFIX


EDITOR = SafetensorsEditor()
