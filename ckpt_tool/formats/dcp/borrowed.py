"""A lost ``.metadata``, made of that of another step: which names the items that are left have, by their order.

What a job saves has the same names, boxes and order at each step, and each item says its type and sizes. So the items
of a file are held against those that the other step has in the file of the same name, one after another; where one is
of another type or other sizes, nothing of that file gets a name. Two items that are alike in both are told apart by
their order alone, which is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._dcp.items import ItemHeads, Payload
from ckpt_tool.formats._dcp.metadata import MetadataFile, load_metadata
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.dcp.unnamed import SUFFIX, walked_items
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, counted_of

__all__ = ["BorrowedMetadata", "borrowed_metadata"]

_Key = tuple[str, tuple[int, ...] | None]
_Place = tuple[int, int]
_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True)
class BorrowedMetadata:
    """A metadata file for what is here, and why its names are thought to be right."""

    content: bytes
    notes: tuple[str, ...]


def borrowed_metadata(source: Source, lent: bytes, lender: str) -> BorrowedMetadata:
    """The lender's metadata with the places that items have here; items that are not here lie behind the end.

    Args:
        source: the folder that lacks its metadata.
        lent: the content of another step's.
        lender: names it in messages.

    Raises:
        FormatError: what is lent is damaged, or nothing here fits it.
    """
    metadata = load_metadata(lent, lender)
    by_file: dict[str, list[tuple[int, _Key]]] = {}
    for key, (path, offset, _, _) in metadata.storage.records().items():
        by_file.setdefault(path, []).append((offset, key))
    places: dict[_Key, _Place] = {}
    notes: list[str] = []
    n_alike = n_files = 0
    heads = ItemHeads()
    for path in source.listing.match(f"*{SUFFIX}"):
        keys = [key for _, key in sorted(by_file.get(path, []), key=lambda each: each[0])]
        nbytes = source.listing.nbytes(path)
        items = list(walked_items(source, path, nbytes, heads)) if nbytes else []
        unlike = _unlike(metadata, keys, items) if items else "no item can be told in it"
        if unlike is not None:
            if nbytes:
                notes.append(f"{path}: no names, {unlike}")
            continue
        n_files += 1
        if len(items) < len(keys):
            notes.append(f"{path}: {counted_of(len(items), len(keys), 'item', 'are')} left, the first ones")
        places |= {key: (start, end - start) for key, (start, end, _) in zip(keys, items, strict=False)}
        kinds = Counter(_kind(metadata, key) for key in keys)
        n_alike += sum(kinds[_kind(metadata, key)] > 1 for key in keys[: len(items)])
    if not places:
        said = "; ".join(notes[:_MAX_SHOWN]) or "no file is called as one of its"
        raise FormatError(f"nothing here has the structure of {lender}: {said}", where=source.listing.url)
    said = (
        f"names, whole shapes and places of {counted(len(places), 'item')} in {counted(n_files, 'file')} are those "
        f"of {lender}: type and "
        f"sizes of each agree with it, one after another; {n_alike:,} of them have a twin in their file, from which "
        "they are told by their order alone"
    )
    return BorrowedMetadata(_with_places(lent, places, lender, source.listing.sizes), (said, *notes))


def _unlike(metadata: MetadataFile, keys: list[_Key], items: list[tuple[int, int, Payload | None]]) -> str | None:
    """Where the items of a file are others than those of the lender's file; None where they are not."""
    if len(items) > len(keys):
        return f"it holds {counted(len(items), 'item')}, and there {len(keys):,}"
    for number, (key, (_, _, payload)) in enumerate(zip(keys, items, strict=False)):
        dtype, sizes = _kind(metadata, key)
        found = ("", ()) if payload is None else (payload.dtype.name, payload.shape)
        if (dtype, sizes) != found:
            here = f"{found[0]}{list(found[1])}" if found[0] else "an object"
            there = f"{dtype}{list(sizes)}" if dtype else "an object"
            return f"its item {number:,} is {here}, and there {there} of {key[0]!r}"
    return None


def _kind(metadata: MetadataFile, key: _Key) -> tuple[str, tuple[int, ...]]:
    """Element type and sizes of an item; nothing for an object."""
    fqn, offsets = key
    item = metadata.tensors.get(fqn)
    if item is None or offsets is None:
        return "", ()
    sizes = next((tuple(sizes) for at, sizes in item.chunks if tuple(at) == tuple(offsets)), ())
    return item.dtype.name, sizes


def _with_places(lent: bytes, places: Mapping[_Key, _Place], lender: str, nbytes_of: Mapping[str, int]) -> bytes:
    """The lender's metadata with other places; what has none is put behind the end of its file, where nothing is."""
    root = load_pickle(lent, where=lender)
    for index, info in root.state["storage_data"].items():
        behind = nbytes_of.get(info.state["relative_path"], 0), max(info.state["length"], 1)
        key = (index.state["fqn"], index.state.get("offset"))
        info.state["offset"], info.state["length"] = places.get(key, behind)
    return dump_pickle(root)
