"""A JSON file that a format has beside its tensors: read as a whole, where its size is one that a description can have.

Knows no keys; what a document must say is for its format.
"""

from __future__ import annotations

import json
from typing import Any

from ckpt_tool.errors import FormatError
from ckpt_tool.formats.base import Source
from ckpt_tool.sizes import counted

__all__ = ["read_json", "read_json_object"]

_MAX_NBYTES = 256 << 20


def read_json(source: Source, path: str, *, max_nbytes: int = _MAX_NBYTES) -> Any:
    """The document in a file: one request.

    Raises:
        FormatError: it is none, or longer than ``max_nbytes``.
    """
    nbytes = source.listing.nbytes(path)
    if nbytes > max_nbytes:
        raise FormatError(f"{counted(nbytes, 'byte', 'are')} no description", where=path)
    try:
        return json.loads(source.read_whole(path))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {str(error)[:200]}", where=path) from error


def read_json_object(source: Source, path: str, *, max_nbytes: int = _MAX_NBYTES) -> dict[str, Any]:
    """As `read_json`, of a document that is one object.

    Raises:
        FormatError: it is none, or longer than ``max_nbytes``.
    """
    found = read_json(source, path, max_nbytes=max_nbytes)
    if not isinstance(found, dict):
        raise FormatError(f"expected a JSON object, got {type(found).__name__}", where=path)
    return found
