"""The reader of GGUF: one file, or the files of a split model.

Tensors of plain numbers are what they are. Quantised ones are listed by the name of their blocks (``Q4_K``), one opaque
element a block; no format of training takes them, and nothing here turns them into numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._columns import Columns
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.gguf.header import MAGIC, Header, parse_header
from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.manifest.items import ItemTable
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.sizes import counted
from ckpt_tool.storage.fetch import fetch_all

__all__ = ["READER", "GgufReader"]

_SUFFIX = ".gguf"
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")  # llama.cpp's gguf-split
_INLINE_VALUES = 16
# llama.cpp's conversion puts the two halves of each rotary pair beside each other in these.
_PERMUTED = frozenset({"llama", "mistral", "baichuan", "internlm2"})


class GgufReader(ResolvedReader):
    """Requests: one of 1 MiB for each file, more where a vocabulary makes its header longer."""

    name = "gguf"

    def probe(self, source: Source) -> Probe:
        """By first bytes."""
        try:
            paths = _paths(source)
        except NotFound as error:
            has_some = any(path.endswith(_SUFFIX) for path in source.listing.paths)
            return Probe(0.1 if has_some else 0.0, error.message)
        if not source.head(paths[0], 4).startswith(MAGIC):
            return Probe(0.0, f"{paths[0]} does not begin with GGUF")
        return Probe(0.95, f"{paths[0]} begins with GGUF")

    def read(self, source: Source) -> Manifest:
        """The manifest; ``info["metadata"]`` has the pairs that are single values, longer ones are objects.

        Raises:
            FormatError: a file is damaged, or files of different splits are mixed.
            Unsupported: a version or an element type that is not known here.
        """
        paths = _paths(source)
        headers = fetch_all(lambda path: _header(source, path), paths, concurrency=source.store.cost.concurrency)
        columns = Columns()
        heads = []
        for path, header in zip(paths, headers, strict=True):
            file = columns.add_file(FileEntry(path, source.listing.nbytes(path)))
            heads.append(FileRange(path, 0, header.nbytes))
            for entry in header.entries:
                if entry.name in columns:
                    raise FormatError(f"{entry.name!r} is there twice", where=path)
                tensor = columns.add_tensor(entry.name, entry.type.dtype, entry.shape)
                is_big = header.is_big_endian and entry.type.dtype.kind != "opaque"
                flags = int(ChunkFlag.BIG_ENDIAN) if is_big and entry.type.dtype.component_bytes > 1 else 0
                columns.add_whole(tensor, file, entry.offset, flags=flags)
        tensors, chunks, files = columns.tables()
        pairs = {key: value for header in reversed(headers) for key, value in header.pairs.items()}
        short = {key: value for key, value in pairs.items() if not isinstance(value, list) or _is_short(value)}
        blobs = tuple(
            Blob(key, "value", None, value, (key,), is_loaded=True) for key, value in pairs.items() if key not in short
        )
        missing = _missing(source, paths)
        info: dict[str, Any] = {"metadata": short, "version": headers[0].version}
        if missing:
            info["missing_files"] = missing
        return Manifest(
            self.name,
            source.listing.url,
            tensors,
            chunks,
            files,
            blobs=blobs,
            info=info,
            notes=tuple(_notes(paths, headers, pairs, missing)),
            items=ItemTable.of_full(len(files)).with_ranges(heads, files),
        )


READER = GgufReader()


def _paths(source: Source) -> list[str]:
    """The file named, or the only one of the folder, or all of the only split.

    Raises:
        NotFound: none, or several to choose from.
    """
    if source.listing.entry is not None:
        return [source.listing.entry]
    found = list(source.listing.match("*" + _SUFFIX))
    splits = {(m["stem"], m["count"]) for path in found if (m := _SPLIT.fullmatch(path))}
    if len(found) == 1 or (len(splits) == 1 and all(_SPLIT.fullmatch(path) for path in found)):
        return found
    raise NotFound(f"{len(found):,} .gguf files at the top, expected one, or those of one split model: name one")


def _header(source: Source, path: str) -> Header:
    return parse_header(
        lambda offset, length: source.store.read(path, offset, length),
        source.listing.nbytes(path),
        path,
        is_cut=source.is_salvage,
    )


def _is_short(value: Sequence[Any]) -> bool:
    return len(value) <= _INLINE_VALUES and not any(isinstance(one, list) for one in value)


def _missing(source: Source, paths: Sequence[str]) -> list[str]:
    """Files of a split that are not here; nothing where one file was named."""
    split = _SPLIT.fullmatch(paths[0])
    if split is None or source.listing.entry is not None:
        return []
    present = [int(found["number"]) for path in paths if (found := _SPLIT.fullmatch(path)) is not None]
    lacking = absent_numbers(present, int(split["count"]), first=1)
    return [f"{split['stem']}-{number:05d}-of-{split['count']}.gguf" for number in lacking]


def _notes(paths: Sequence[str], headers: Sequence[Header], pairs: dict[str, Any], missing: Sequence[str]) -> list[str]:
    notes = []
    blocks = Counter(entry.type.name for header in headers for entry in header.entries if entry.type.block > 1)
    if blocks:
        listed = ", ".join(f"{count:,} {name}" for name, count in blocks.most_common())
        patterns = " ".join(f"--exclude dtype:{name}" for name, _ in blocks.most_common())
        notes.append(
            f"{counted(sum(blocks.values()), 'tensor', 'are')} quantised ({listed}): one element here is one block. "
            f"Exporting the others takes {patterns}"
        )
    architecture = pairs.get("general.architecture")
    if architecture in _PERMUTED:
        notes.append(
            f"llama.cpp interleaves the rows of attn_q and attn_k of {architecture} models: they are not in the order "
            "that transformers has them in"
        )
    split = _SPLIT.fullmatch(paths[0])
    if len(paths) == 1 and split is not None and int(split["count"]) > 1 and not missing:
        notes.append(f"{paths[0]} is one of {counted(int(split['count']), 'file')}: open the folder for all of them")
    if missing:
        notes.append(f"{counted(len(missing), 'file of the split', 'are')} missing: {', '.join(missing[:3])}")
    return notes
