"""A part of a step is what a reader takes: the step itself, folders in it, or files that are one checkpoint each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpt_tool.api.runs.endings import PAYLOAD
from ckpt_tool.api.runs.names import StepFiles
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.formats.base import SURE, TAKEN_ABOVE, Reader, Source
from ckpt_tool.formats.registry import iter_readers
from ckpt_tool.storage.store import Listing, Store
from ckpt_tool.storage.urls import join_url
from ckpt_tool.storage.virtual.subfolder import Subfolder

__all__ = ["folder_source", "own_and_below", "parts_of"]

_MAX_PARTS = 16


def parts_of(step: StepFiles, store: Store, url: str) -> list[tuple[str, Source, Reader]]:
    """(folder or file, files, reader) of the checkpoints that a step is made of; an empty name for the step itself.

    Others are folders in it (verl's actor and critic) and files beside these (a model's, an optimizer's); the first 16.

    Args:
        step: the files.
        store: of the run.
        url: of the run.
    """
    if step.is_file:
        folder, _, name = step.path.rpartition("/")
        source = folder_source({name: step.sizes[name]}, store, folder, url, entry=name)
        reader = _reader(source)
        return [] if reader is None else [("", source, reader)]
    whole = folder_source(step.sizes, store, step.path, url)
    reader = _reader(whole)
    if reader is not None:
        return [("", whole, reader)]
    found: list[tuple[str, Source, Reader]] = []
    for part, source in _candidates(step, store, url):
        reader = _reader(source) if len(found) < _MAX_PARTS else None
        if reader is not None:
            found.append((part, source, reader))
    return found


def own_and_below(step: StepFiles, store: Store, url: str) -> tuple[StepFiles, list[str]]:
    """A checkpoint without what lies below it, and which folders there are checkpoints of their own.

    All of ``step`` where its own files are no checkpoint by themselves, or no folder is one.
    """
    own = {path: nbytes for path, nbytes in step.sizes.items() if "/" not in path}
    below = {path: nbytes for path, nbytes in step.sizes.items() if "/" in path}
    parts = parts_of(replace(step, sizes=below), store, url) if below else ()
    folders = [part for part, _, _ in parts if part]
    alone = replace(step, sizes=own)
    if not folders or [part for part, _, _ in parts_of(alone, store, url)] != [""]:
        return step, []
    return alone, folders


def folder_source(
    sizes: Mapping[str, int], store: Store, folder: str, url: str, *, entry: str | None = None
) -> Source:  # fmt: skip
    """The files of a folder of the run, by their paths below it; with ``entry`` as when one of them is named."""
    inner: Store = Subfolder(store, folder) if folder else store
    return Source(inner, Listing(join_url(url, folder) if folder else url, dict(sizes), entry))


def _candidates(step: StepFiles, store: Store, url: str) -> Iterator[tuple[str, Source]]:
    """The first folders of a step, then the first of its files that are called like one with tensors."""
    grouped: dict[str, dict[str, int]] = {}
    files: dict[str, int] = {}
    for path, nbytes in step.sizes.items():
        folder, slash, rest = path.partition("/")
        if slash:
            grouped.setdefault(folder, {})[rest] = nbytes
        elif nbytes and PAYLOAD.search(path):
            files[path] = nbytes
    for folder in sorted(grouped)[:_MAX_PARTS]:
        yield folder, folder_source(grouped[folder], store, f"{step.path}/{folder}" if step.path else folder, url)
    for name in sorted(files)[:_MAX_PARTS]:
        yield name, folder_source({name: files[name]}, store, step.path, url, entry=name)


def _reader(source: Source) -> Reader | None:
    """The reader that knows a source, without a word on why others do not."""
    best: tuple[float, Reader | None] = (TAKEN_ABOVE, None)
    for reader in iter_readers(source.listing.paths):
        try:
            confidence = reader.probe(source).confidence
        except StorageError:
            raise
        except CkptError:
            continue
        if confidence >= SURE:
            return reader
        if confidence > best[0]:
            best = confidence, reader
    return best[1]
