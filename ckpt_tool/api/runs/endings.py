"""The end of a file says whether it was written to its end: a zip's directory, what a safetensors header promises.

Formats whose metadata list the extents of their files need no look at them; here are the others, and the files that lie
beside a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from ckpt_tool.formats._content import HEAD_NBYTES, is_stand_in, what_is
from ckpt_tool.formats.base import Source
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Listing

__all__ = ["INDEX", "PAYLOAD", "cut_files"]

PAYLOAD = re.compile(r"\.(?:safetensors|bin|pt|pth|ckpt|npz|npy)$")
_SINGLE = re.compile(r"(?:[a-z_]*model|consolidated|optimizer|state|checkpoint)\.(?:safetensors|bin|pt|pth|ckpt)")
INDEX = re.compile(r"[^/]*\.(?:safetensors|bin)\.index(?:\.[^/]*)?\.json")
_MAX_FAR = 4
_MAX_NEAR = 128
_EXAMPLES = 3
_TAIL_NBYTES = 64 << 10
_MAX_HEADER_NBYTES = 64 << 20


def cut_files(source: Source) -> Iterator[str]:
    """What is wrong with the ends of files, in a sentence for each of the first three.

    Costs two requests per file that is looked at: on disks up to 128 files, far away those at the top alone that are
    whole by themselves, where they are few, because objects appear there when they are whole.
    """
    n_more = 0
    for n, said in enumerate(said for path in _worth_a_look(source) for said in _by_ends(source, path)):
        if n < _EXAMPLES:
            yield said
        else:
            n_more += 1
    if n_more:
        yield f"{counted(n_more, 'more file')} like this"


def _worth_a_look(source: Source) -> Sequence[str]:
    listing = source.listing
    if listing.entry is not None:
        return (listing.entry,)
    if source.store.cost.read_ahead_bytes:
        return _whole_by_themselves(listing)
    return [path for path in listing.paths if PAYLOAD.search(path) and listing.sizes[path]][:_MAX_NEAR]


def _whole_by_themselves(listing: Listing) -> Sequence[str]:
    """A few files at the top without an index of them."""
    top = [path for path in listing.paths if "/" not in path]
    if any(INDEX.fullmatch(path) for path in top):
        return ()
    found = [path for path in top if _SINGLE.fullmatch(path) and listing.sizes[path]]
    return found if len(found) <= _MAX_FAR else ()


def _by_ends(source: Source, path: str) -> Iterator[str]:
    """Whether a file is another thing, or cut: a zip ends with its directory, safetensors where its header says."""
    nbytes = source.listing.sizes[path]
    head = source.head(path, min(nbytes, HEAD_NBYTES))
    if is_stand_in(head):
        yield f"{path} is {what_is(head)}"
    elif head.startswith(b"PK\x03\x04"):
        start = max(nbytes - _TAIL_NBYTES, 0)
        if b"PK\x05\x06" not in source.store.read(path, start, nbytes - start):
            yield f"{path} is cut: a zip file without its directory"
    elif path.endswith(".safetensors") and len(head) >= 8:
        length = int.from_bytes(head[:8], "little")
        if length > min(nbytes - 8, _MAX_HEADER_NBYTES):
            yield f"{path} is cut within its header"
            return
        try:
            header = json.loads(source.store.read(path, 8, length))
            ends = [int(each["data_offsets"][1]) for name, each in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError):
            yield f"{path} has no header of a safetensors file"
            return
        end = max(ends, default=0)
        if nbytes < 8 + length + end:
            yield f"{path} is cut: {counted(nbytes, 'byte')}, expected {8 + length + end:,}"
        elif nbytes > 8 + length + end:
            yield f"{path} has {counted(nbytes, 'byte')}, more than the {8 + length + end:,} that its header tells of"
