"""A part target writes files front to back into a place that takes parts, and can go on after it was killed.

States: marked (the marker file says that this is unfinished) -> parts -> all parts there -> the old target gone ->
joining (the marker says so) -> joined and measured -> the file that makes it a checkpoint -> the marker gone. Until the
last but one nothing reads as a checkpoint. Where nothing lies under the name yet (the marker says that too), a file
that fits one part is put there at once: one request in place of three. Knows nothing of what the files mean.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from ckpt_tool.errors import CkptError, StorageError, TargetExists, UsageError
from ckpt_tool.sizes import counted
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.parts.commit import delete_old, is_control, measure
from ckpt_tool.storage.parts.log import PartLog, PartNotes
from ckpt_tool.storage.parts.place import Begun, PartPlace
from ckpt_tool.storage.parts.uploads import N_UPLOADS, PartFile, PartUploads, Receipt
from ckpt_tool.storage.target import Bytes
from ckpt_tool.storage.unfinished import JOURNAL_NAME, MARKER_NAME
from ckpt_tool.storage.urls import check_path, join_url

__all__ = ["PartTarget", "is_all_of_target"]

HELD_BYTES = 64 << 20
"""A last file up to this size is held back in memory and written at once; a larger one is joined last. A target that is
one file is held if it fits one part."""

_WRITING = b"Unfinished output of ckpt: not a checkpoint. Run the same command with --resume, or with --overwrite.\n"
_ALONE = b"All that lies here is of it.\n"
_JOINING = b"Unfinished output of ckpt, all bytes are there: run the same command with --resume.\n"
_HINT = 'the same command with "--resume" goes on where this one stopped'


def is_all_of_target(marker: bytes) -> bool:
    """Whether all that lies where a marker is belongs to the unfinished target: nothing was there, or it is gone."""
    return marker == _JOINING or _ALONE in marker


class PartTarget:
    """A folder, or with ``single_file`` one file.

    Args:
        place: where parts go.
        overwrite: replace what is under the final name, once all bytes of the new target are there.
        resume: go on with an unfinished target.
        single_file: the final name is that of one file; exactly one may be created.
        memory_bytes: what part buffers may take together.
        joins: another process owns the target and commits; this one sends files of its own to it.

    Raises:
        TargetExists: something is there, and nothing was said about it, or another process has just begun.
        UsageError: a whole bucket to be overwritten.
    """

    is_sequential = True
    is_alone: bool
    """Whether nothing but this target can be where its files go."""

    def __init__(
        self,
        place: PartPlace,
        *,
        overwrite: bool,
        resume: bool,
        single_file: bool,
        memory_bytes: int,
        joins: bool = False,
    ) -> None:
        self.url = place.url
        self._place = place
        self._overwrite = overwrite
        self._single_file = single_file
        self._files: dict[str, PartFile] = {}
        self._lock = threading.Lock()
        self._uploads = PartUploads(place, memory_bytes=memory_bytes)
        self.notes = PartNotes(place)
        self._is_shared = False
        self._old: Sequence[str] = ()
        self._begun: dict[str, Begun] = {}
        self._received: dict[str, Receipt] = {}
        self._found: dict[str, int] = {}
        self._is_joining = self.is_resumed = self.is_alone = False
        self.journal = PartLog(place, JOURNAL_NAME, ())
        if not joins:
            self._claim(resume=resume)

    def _claim(self, *, resume: bool) -> None:
        """Own the name: mark it as unfinished, or take up what an earlier run has left."""
        place = self._place
        self._old, self._found = place.look()
        marker = place.get(MARKER_NAME) if MARKER_NAME in self._found else None
        self.is_resumed = marker is not None and resume
        self._is_joining = self.is_resumed and marker == _JOINING
        is_own = is_all_of_target(marker) if marker is not None else not self._old
        self.is_alone = place.is_named_last or (is_own and not self._single_file and not self._is_joining)
        if not place.is_named_last and marker is not None and is_own and (resume or self.is_alone):
            self._old = ()  # what is there is what this target has put or joined
        self._check(is_unfinished=marker is not None, resume=resume)
        self.journal = PartLog(place, JOURNAL_NAME, self._found)
        self._begun = place.begun() if marker is not None else {}
        if not (self.is_resumed and self.journal.read()):
            self._forget()
        if marker is None:
            own = self._marker() + f"run {uuid.uuid4().hex}\n".encode()  # that of a first try whose answer is lost
            if not place.put(MARKER_NAME, own, is_new=True) and place.get(MARKER_NAME) != own:
                raise TargetExists("another process has just started to write", where=self.url)
        elif not self._is_joining:
            place.put(MARKER_NAME, self._marker())

    def _marker(self) -> bytes:
        return _WRITING + (_ALONE if self.is_alone else b"")

    def create(self, path: str, nbytes: int, *, is_last: bool = False) -> None:
        """Announce a file of ``nbytes``; what an earlier run has sent of it counts as written, see ``start_of``.

        Raises:
            FormatError: the path leaves the target.
            StorageError: announced twice.
        """
        check_path(path, root=self.url)
        name, where = ("", self.url) if self._single_file else (path, join_url(self.url, path))
        with self._lock:
            if path in self._files:
                raise StorageError("created twice", where=where)
            if self._single_file and self._files:
                raise UsageError(f"expected one file, got {path!r} beside {next(iter(self._files))!r}", where=self.url)
            file = self._files[path] = PartFile(name, where, nbytes, is_last=is_last or self._single_file)
            file.is_put_whole = self.is_alone and not file.is_last
        if file.is_last and (self._uploads.fits_one_part(nbytes) if self._single_file else nbytes <= HELD_BYTES):
            file.held = bytearray()
        elif (self._is_joining or file.is_put_whole) and self._found.get(name) == nbytes:
            file.is_joined = True
            file.start = file.position = nbytes
        elif path in self._received:
            file.take_receipt(self._received.pop(path))
        elif name in self._begun:
            file.take_up(self._begun.pop(name))

    def start_of(self, path: str) -> int:
        """Bytes of a created file that need not be written again."""
        return self._files[path].start

    def write(self, path: str, offset: int, buffer: Bytes) -> None:
        """Append ``buffer``, which must begin where the file ends now; full parts leave in the background.

        Raises:
            StorageError: not created, out of order, beyond the announced size, or a part was refused.
            UsageError: so many files are under way that their parts do not fit the memory.
        """
        file = self._files.get(path)
        if file is None:
            raise StorageError("written to before it was created", where=join_url(self.url, path))
        view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
        end = offset + len(view)
        if offset != file.position:
            message = f"remote files are written front to back: expected offset {file.position:,}, got {offset:,}"
            raise StorageError(message, where=file.where)
        if end > file.nbytes:
            message = f"a write from {offset:,} to {end:,} does not fit the {counted(file.nbytes, 'byte')} of the file"
            raise StorageError(message, where=file.where)
        if file.held is not None:
            file.held += view
            file.position = end
            return
        with _resumable():
            self._uploads.append(file, view, n_files=len(self._files))

    def flush(self) -> None:
        """Wait until all parts that were full are in the storage."""
        with _resumable():
            self._uploads.flush()

    def log_of(self, process: int) -> PartLog:
        """The journal of another process than the one that commits."""
        folder = f"{JOURNAL_NAME}/process-{process}"
        return PartLog(self._place, folder, self._place.files())

    def receipts(self) -> dict[str, Receipt]:
        """What was sent of each file, for another process to take up."""
        self._is_shared = True
        begun = {path: None if file.is_joined else file.receipt() for path, file in self._files.items()}
        return {path: receipt for path, receipt in begun.items() if receipt is None or receipt[0] is not None}

    def begin_from(self, receipts: Mapping[str, Receipt], *, is_alone: bool) -> None:
        """Take files for begun, before they are created; None says that one was joined."""
        self._received = dict(receipts)
        self.is_alone = is_alone

    def adopt(self, path: str, receipt: Receipt) -> None:
        """Take a created file for sent by another process, to the end.

        Raises:
            StorageError: parts are missing.
        """
        file = self._files[path]
        if not file.is_joined:
            file.take_receipt(receipt)

    def free_bytes(self) -> int | None:
        """None: such storage does not tell."""
        return None

    def commit(self, last_path: str | None) -> None:
        """Join all files, see that they are whole, and make the target a checkpoint.

        Raises:
            StorageError: a file is missing bytes, ``last_path`` was not created with ``is_last``, or refused.
            TargetExists: another process has made a checkpoint of that name in the meantime.
        """
        last = [file for file in self._files.values() if file.is_last]
        if last_path is not None and not any(file is self._files.get(last_path) for file in last):
            message = f"the file that makes it a checkpoint, {last_path!r}, was not created as the last one"
            raise StorageError(message, where=self.url)
        for file in self._files.values():
            if file.position != file.nbytes:
                message = f"expected {counted(file.nbytes, 'byte')} before the commit, got {file.position:,}"
                raise StorageError(message, where=file.where)
        with _resumable():
            self._uploads.flush()
            if not (self._single_file or self._place.is_named_last):
                delete_old(self._place, self._old)
                self._old = ()
            if not self._is_joining and not (self.is_alone and self._is_all_put()):
                self._place.put(MARKER_NAME, _JOINING)
            others = [file for file in self._files.values() if not (file.is_last or file.is_joined)]
            fetch_all(lambda file: self._uploads.join(file, is_new=False), others, concurrency=N_UPLOADS)
            measure(self._place, {file.path: file.nbytes for file in self._files.values() if not file.is_last})
            is_new = not (self._single_file and self._overwrite)
            for file in last:
                if not (file.is_joined or self._uploads.join(file, is_new=is_new)):
                    raise TargetExists("another process has written a checkpoint of this name", where=self.url)
            # Where names come first, the journal's first line still tells whose target it is, should this be the end.
            self.journal.delete(keep=0 if self._place.is_named_last else 1)
            if self._is_shared:
                own = f"{JOURNAL_NAME}/{0:08d}"
                self._delete_notes([path for path in self._place.files() if path != own])
            self._place.delete(MARKER_NAME)
            self.journal.delete()
            self._place.finish(replace=self._overwrite)
        self._uploads.stop()
        self._place.close()

    def _is_all_put(self) -> bool:
        """Whether no file has parts, so that each is whole or not there."""
        return all(file.token is None for file in self._files.values())

    def abandon(self, *, discard: bool = False) -> None:
        """Stop; the parts stay for ``resume`` unless ``discard``."""
        self._uploads.stop()
        if discard:
            for file in self._files.values():
                if file.token is not None and not file.is_joined:
                    self._begun[file.path] = Begun(file.token)
                elif file.is_put_whole:
                    self._found[file.path] = file.nbytes
            with suppress(CkptError):
                self.journal.delete()
                self._forget()
                self._place.delete(MARKER_NAME)
                self._place.clear()
        self._place.close()

    def _check(self, *, is_unfinished: bool, resume: bool) -> None:
        """Raise when what is there must not be touched."""
        if is_unfinished and not (resume or self._overwrite):
            hint = 'continue it with "--resume", or start anew with "--overwrite"'
            raise TargetExists("an earlier run was interrupted here", where=self.url, hint=hint)
        if self._single_file and any(self._old):
            raise TargetExists("is a folder, expected to write a file", where=self.url, hint="name the file in it")
        is_complete = not is_unfinished and self._place.is_named_last and self._found
        if is_complete:
            message = f"has no {MARKER_NAME} file in it, and is neither resumed nor replaced"
            hint = "look at it: a run killed at its very end leaves a complete checkpoint here; rename or delete it"
            raise TargetExists(message, where=f"{self.url.rstrip('/')}.partial", hint=hint)
        if not self._single_file and "" in self._old:
            raise TargetExists("is a file, expected to write a folder", where=self.url, hint="choose another name")
        if self._old and not self._overwrite:
            hint = 'choose another name, or replace it with "--overwrite" (it stays until the new bytes are all there)'
            raise TargetExists(f"is there already, with {counted(len(self._old), 'file')}", where=self.url, hint=hint)

    def _forget(self) -> None:
        """Let go of what an earlier run has left."""
        for path, begun in self._begun.items():
            self._place.drop(path, begun.token)
        self._begun = {}
        self._is_joining = False
        self._delete_notes(self._found)
        if self.is_alone:
            delete_old(self._place, [path for path in self._found if not is_control(path)])
        self._found = {}
        self.journal = PartLog(self._place, JOURNAL_NAME, ())

    def _delete_notes(self, paths: Iterable[str]) -> None:
        notes = [path for path in paths if path.startswith(f"{JOURNAL_NAME}/")]
        fetch_all(self._place.delete, notes, concurrency=N_UPLOADS)


@contextmanager
def _resumable() -> Iterator[None]:
    """A block whose storage errors say how to go on."""
    try:
        yield
    except StorageError as error:
        error.hint = error.hint or _HINT
        raise
