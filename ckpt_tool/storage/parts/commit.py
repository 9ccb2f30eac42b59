"""Steps of a commit in a place for parts, whoever commits. Knows neither a marker nor a journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_tool.errors import StorageError
from ckpt_tool.sizes import counted
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.parts.place import PartPlace
from ckpt_tool.storage.parts.uploads import N_UPLOADS
from ckpt_tool.storage.unfinished import COMMIT_NAMES, JOURNAL_NAME, MARKER_NAME
from ckpt_tool.storage.urls import join_url

__all__ = ["delete_old", "is_control", "measure"]


def is_control(path: str) -> bool:
    """Whether a file of a target is there only while it is unfinished."""
    return path == MARKER_NAME or path.startswith(f"{JOURNAL_NAME}/")


def delete_old(place: PartPlace, paths: Sequence[str]) -> None:
    """Delete files of an old target, first what makes it a checkpoint."""
    first = [path for path in paths if path.endswith(COMMIT_NAMES)]
    for path in first:
        place.delete(path)
    fetch_all(place.delete, sorted(set(paths) - set(first)), concurrency=N_UPLOADS)


def measure(place: PartPlace, sizes: Mapping[str, int]) -> None:
    """See that every joined file is there in its full size; the path ``""`` is the one file of the place's name.

    Raises:
        StorageError: one is not.
    """
    found = place.files() if sizes else {}
    for path, nbytes in sizes.items():
        got = found.get(path)
        if got != nbytes:
            text = (
                f"expected {counted(nbytes, 'byte')} after joining the parts, got "
                f"{'none' if got is None else f'{got:,}'}"
            )
            raise StorageError(text, where=join_url(place.url, path))
