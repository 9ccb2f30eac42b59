"""Edit: other names, fewer tensors, a right index; headers are written anew, payload is linked or copied as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from ckpt_tool.api.checkpoint import DEFAULT_MEMORY_BYTES, Checkpoint, open_checkpoint
from ckpt_tool.api.convert.adapter import with_adapter
from ckpt_tool.api.convert.conversion import (
    Dropped,
    Execution,
    build_conversion,
    whole_boxes,
)
from ckpt_tool.api.convert.edit_names import NameChanges, NewNames, new_names
from ckpt_tool.api.convert.names import renamed
from ckpt_tool.api.workers import moving_workers
from ckpt_tool.engine.edited_files import TakenOver, write_edited
from ckpt_tool.errors import Unsupported, UsageError
from ckpt_tool.formats.base import WriterOptions
from ckpt_tool.formats.edited import Edit, EditedFile, EditedFiles
from ckpt_tool.formats.editors import editor, editor_names
from ckpt_tool.formats.registry import writer as writer_named
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.records import dataclass, field
from ckpt_tool.storage.apart import check_apart
from ckpt_tool.storage.local.take_over import LINKS
from ckpt_tool.storage.target import open_target
from ckpt_tool.storage.urls import is_local, local_path

__all__ = ["EditResult", "NameChanges", "edit"]

_REWRITTEN = frozenset({"torch-save"})
"""Formats whose names lie among the payload, so that the file is written anew."""


@dataclass(frozen=True)
class EditResult:
    """What an edit made."""

    target_url: str
    format: str
    n_tensors: int
    n_files: int
    nbytes: int
    renamed: tuple[tuple[str, str], ...]
    """(old, new) name."""
    dropped: tuple[Dropped, ...]
    taken_over: TakenOver
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Schema ``ckpt-tool/edit/1``: the fields of this record."""
        return {"schema": "ckpt-tool/edit/1", **asdict(self)}


def edit(  # noqa: PLR0913 - one argument per option of the command
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    changes: NameChanges | None = None,
    fix_index: bool = False,
    metadata: Mapping[str, str | None] | None = None,
    repair: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    link: str = "auto",
    in_place: bool = False,
    overwrite: bool = False,
    durable: bool = True,
    memory_budget_bytes: int = DEFAULT_MEMORY_BYTES,
) -> EditResult:
    """Write an edited copy of a checkpoint, or put it in the old one's place.

    Nothing is there under the target's name before all of it is. Files that do not belong to the tensors (a config, a
    tokenizer) are taken over.

    Args:
        source: a checkpoint of whole tensors in safetensors, of DCP, or a torch.save file.
        target: where the result goes; None with ``in_place``.
        changes: names and what is dropped.
        fix_index: write index and total_size anew from the headers.
        metadata: free text of safetensors headers to set, None to remove.
        repair: ``copy`` or ``drop`` tensors of safetensors files that share bytes.
        adapter: folder of a PEFT adapter, put beside the tensors of ``source`` under its own names; the other changes
            are made to both.
        link: how unchanged files are taken over, one of ``LINKS``.
        in_place: replace the source.
        overwrite: replace what is at the target.
        durable: fsync before the target gets its name.
        memory_budget_bytes: what buffers may take together.

    Raises:
        UsageError: nothing to do, names that collide, arguments that do not go together.
        Unsupported: the format cannot be edited.
        LayoutError: the adapter is one of another model.
    """
    changes = changes or NameChanges()
    url = _target_url(source, target, in_place=in_place)
    if link not in LINKS:
        raise UsageError(f"{link!r} is not a way to take files over", hint="one of: " + " ".join(LINKS))
    if changes.is_empty and not (fix_index or metadata or repair or adapter):
        raise UsageError("nothing to change was asked for", hint="ckpt edit --help lists what can be")
    if adapter is not None and target is not None:
        check_apart(adapter, target)
    with ExitStack() as opened:
        checkpoint = opened.enter_context(open_checkpoint(source, memory_budget_bytes=memory_budget_bytes))
        notes: tuple[str, ...] = ()
        if adapter is not None:
            beside = opened.enter_context(open_checkpoint(adapter, memory_budget_bytes=memory_budget_bytes))
            checkpoint, notes = with_adapter(checkpoint, beside, memory_budget_bytes)
        names = new_names(checkpoint.manifest, changes)
        if checkpoint.format in _REWRITTEN:
            if fix_index or metadata or repair:
                raise UsageError(f"{checkpoint.format} has no index and no free metadata", where=checkpoint.url)
            execution = Execution(
                memory_budget_bytes, moving_workers(), overwrite or in_place, resume=False, durable=durable
            )
            return _rewritten(checkpoint, url, names, execution)
        found = editor(checkpoint.format)
        if found is None:
            raise Unsupported(
                f"{checkpoint.format} is not edited: names are part of more than its headers",
                where=checkpoint.url,
                hint=f"ckpt edit takes {', '.join(editor_names())} and torch-save; ckpt reshard converts",
            )
        laid_out = found.lay_out(
            checkpoint.source, checkpoint.manifest, Edit(names.tensors, names.objects, metadata or {}, repair)
        )
        done = _written(checkpoint, url, names, laid_out, link=link, overwrite=overwrite or in_place, durable=durable)
        return replace(done, notes=(*notes, *done.notes))


def _target_url(source: str | os.PathLike[str], target: str | os.PathLike[str] | None, *, in_place: bool) -> str:
    """Where the result goes."""
    if in_place and target is not None:
        raise UsageError(
            "a target and --in-place exclude each other",
            where=os.fspath(target),
            hint="leave out --in-place to keep SRC as it is",
        )
    if not in_place and target is None:
        raise UsageError(
            "name where the result goes, or add --in-place", hint="ckpt edit SRC OUT ... leaves SRC as it is"
        )
    if target is None:
        if not is_local(source):
            raise UsageError("only what lies on this machine is edited in place", where=os.fspath(source))
        return local_path(source).rstrip("/" + os.sep)
    check_apart(source, target, when_equal="add --in-place if that is meant")
    return os.fspath(target)


def _written(
    checkpoint: Checkpoint,
    url: str,
    names: NewNames,
    laid_out: EditedFiles,
    *,
    link: str,
    overwrite: bool,
    durable: bool,
) -> EditResult:
    listing = checkpoint.source.listing
    single = listing.entry is not None and len(laid_out.files) == 1
    gone = {*laid_out.replaced, *(file.path for file in laid_out.files)}
    files = list(laid_out.files)
    if not single:
        files += [
            EditedFile(path, (FileRange(path, 0, nbytes),))
            for path, nbytes in listing.sizes.items()
            if path not in gone and listing.entry is None
        ]
    target = open_target(url, overwrite=overwrite, resume=False, durable=durable, single_file=single)
    try:
        taken = write_edited(files, checkpoint.source, target, link=link, commit_path=laid_out.commit_path)
        target.commit(laid_out.commit_path)
    except BaseException:
        target.abandon(discard=True)
        raise
    notes = (*checkpoint.manifest.notes, *laid_out.notes)
    return EditResult(
        target_url=url,
        format=checkpoint.format,
        n_tensors=len(names.tensors),
        n_files=len(files),
        nbytes=sum(file.nbytes for file in files),
        renamed=names.renamed,
        dropped=names.dropped,
        taken_over=taken,
        notes=notes,
    )


def _rewritten(checkpoint: Checkpoint, url: str, names: NewNames, execution: Execution) -> EditResult:
    """A file whose names lie among its payload: written anew by the engine."""
    manifest = checkpoint.resolve()
    rows = [row for row, fqn in enumerate(manifest.tensors.fqns) if fqn in names.tensors]
    manifest = renamed(only_tensors(manifest, rows), names.tensors)
    blobs = tuple(blob for blob in checkpoint.load_blobs() if blob.fqn in names.objects)
    moved = [(old, new) for old, new in names.objects.items() if old != new]
    if moved:
        raise Unsupported(f"{moved[0][0]!r} is no tensor, and objects of this format keep their names", where=url)
    conversion = build_conversion(
        checkpoint,
        manifest,
        url,
        writer=writer_named(checkpoint.format),
        tensors=manifest.tensors,
        boxes=whole_boxes(manifest.tensors),
        mesh=None,
        blobs=blobs,
        dropped=names.dropped,
        notes=(),
        options=WriterOptions(),
        execution=execution,
    )
    result = conversion.run()
    taken = TakenOver(copied_nbytes=result.report.written_nbytes)
    return EditResult(
        url, result.format, result.n_tensors, result.n_files, result.nbytes, names.renamed, names.dropped, taken,
        result.notes,
    )  # fmt: skip
