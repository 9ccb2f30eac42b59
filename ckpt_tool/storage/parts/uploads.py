"""Part uploads cut files into parts and send them in the background, within a budget of memory.

Knows neither a marker nor a commit.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count, takewhile
from typing import Any

from ckpt_tool.errors import StorageError, TargetExists, UsageError
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted, format_bytes
from ckpt_tool.storage.parts.place import Begun, Part, PartPlace

__all__ = ["N_UPLOADS", "PartFile", "PartUploads", "Receipt"]

N_UPLOADS = 8
"""Parts on their way at once."""
_LEAST_MEMORY_BYTES = 256 << 20
"""What the parts of many files may take in the end, however small the budget: object stores take no small ones."""


Receipt = list[Any] | None
"""As JSON: a file's token, and size and tag of each part that the storage has, from the first on."""


@dataclass(slots=True, eq=False)
class PartFile:
    """One file under way."""

    path: str
    where: str
    nbytes: int
    is_last: bool
    start: int = 0
    """Bytes that an earlier run has sent."""
    position: int = 0
    held: bytearray | None = None
    """Content of a file that is written at once, in the end."""
    is_joined: bool = False
    is_put_whole: bool = False
    """Whether it gets its name as soon as it is sent, where it fits one part."""
    token: str | None = None
    part_bytes: int = 0
    parts: dict[int, Part] = field(default_factory=dict)
    buffer: bytearray | None = None
    filled: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_up(self, begun: Begun) -> None:
        """Go on behind the parts that are there; what comes after a gap, or is cut otherwise, is sent again."""
        self.token = begun.token
        self.start, self.parts = 0, {}
        first = begun.parts.get(1)
        if first is None or not first.nbytes:
            return
        self.part_bytes = first.nbytes
        for number in range(1, len(begun.parts) + 1):
            part = begun.parts.get(number)
            if part is None or part.nbytes != min(self.part_bytes, self.nbytes - self.start):
                break
            self.parts[number] = part
            self.start += part.nbytes
        self.position = self.start

    def receipt(self) -> list[Any]:
        """What another process needs to join what this one has sent; in what is under way, up to the first gap."""
        numbers = takewhile(self.parts.__contains__, count(1))
        return [self.token, [[self.parts[n].nbytes, self.parts[n].tag] for n in numbers]]

    def take_receipt(self, receipt: Receipt) -> None:
        """Go on behind what another process has sent; None says that it was joined already."""
        if receipt is None:
            self.is_joined = True
            self.start = self.position = self.nbytes
        else:
            token, parts = receipt
            self.take_up(Begun(token, {n: Part(nbytes, tag) for n, (nbytes, tag) in enumerate(parts, 1)}))


class PartUploads:
    """Sends parts of any number of files to one place. Files are appended to by one thread each."""

    def __init__(self, place: PartPlace, *, memory_bytes: int) -> None:
        self._place = place
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._running: set[Future[None]] = set()
        self._failure: BaseException | None = None
        self._spare: list[bytearray] = []
        self._held_bytes = 0

    def append(self, file: PartFile, view: memoryview, *, n_files: int) -> None:
        """Add bytes; a part that is full, or ends its file, leaves in the background.

        Raises:
            StorageError: some part was refused, maybe an earlier one.
            UsageError: the parts of all files under way do not fit the memory.
        """
        self._raise_failure()
        if not file.part_bytes:
            file.part_bytes = self._part_bytes(file.nbytes, n_files)
        done = 0
        while done < len(view):
            if file.buffer is None:
                file.buffer, file.filled = self._take_buffer(min(file.part_bytes, file.nbytes)), 0
            n = min(file.part_bytes - file.filled, len(view) - done)
            file.buffer[file.filled : file.filled + n] = view[done : done + n]
            file.filled += n
            file.position += n
            done += n
            if file.filled == file.part_bytes or file.position == file.nbytes:
                self._submit(file, -(-file.position // file.part_bytes), file.buffer, file.filled)
                file.buffer = None

    def fits_one_part(self, nbytes: int) -> bool:
        """Whether a file that is the only one goes in one part."""
        return nbytes <= self._part_bytes(nbytes, 1)

    def flush(self) -> None:
        """Wait until all parts that have left are in the storage.

        Raises:
            StorageError: one was refused.
        """
        with self._lock:
            running = set(self._running)
        wait(running)
        with self._lock:
            self._running -= running
        self._raise_failure()

    def join(self, file: PartFile, *, is_new: bool) -> bool:
        """Make one file of its parts, or write the held one; False: one is there, and it is not this one."""
        if file.held is not None or not file.nbytes:
            data = bytes(file.held or b"")
            is_written = self._place.put(file.path, data, is_new=is_new) or self._place.get(file.path) == data
        elif file.token is None:
            raise StorageError("no part of it was sent", where=file.where)
        else:
            is_written = self._place.join(file.path, file.token, _in_order(file), is_new=is_new)
        file.is_joined = is_written
        return is_written

    def stop(self) -> None:
        """Wait for what is on its way; nothing else leaves."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _part_bytes(self, nbytes: int, n_files: int) -> int:
        """As large as memory allows when all files are under way, within what the storage takes."""
        limits = self._place.limits
        share = self._memory_bytes // (n_files + N_UPLOADS)
        part_bytes = max(min(share, limits.usual_bytes), limits.min_bytes, -(-nbytes // (limits.max_parts - 1)))
        return -(-part_bytes // limits.multiple) * limits.multiple

    def _take_buffer(self, nbytes: int) -> bytearray:
        """A buffer at least that long, once the budget has room: parts on their way are waited for first."""
        while True:
            with self._lock:
                for at, spare in enumerate(self._spare):
                    if len(spare) >= nbytes:
                        return self._spare.pop(at)
                is_over = self._held_bytes + nbytes > self._memory_bytes
                if is_over and self._spare:
                    self._held_bytes -= len(self._spare.pop())
                    continue
                if not is_over or not self._running:
                    self._held_bytes += nbytes
                    break
            self._wait_for_one()
        if self._held_bytes > max(self._memory_bytes, _LEAST_MEMORY_BYTES):
            raise UsageError(
                f"so many files are under way at once that their parts need more than "
                f"{format_bytes(self._memory_bytes)} of memory",
                where=self._place.url,
                hint="allow more with --memory, or write to a local folder first",
            )
        return bytearray(nbytes)

    def _wait_for_one(self) -> None:
        """Wait until some part has arrived."""
        with self._lock:
            running = set(self._running)
        wait(running, return_when=FIRST_COMPLETED)
        with self._lock:
            self._running = {future for future in self._running if not future.done()}
        self._raise_failure()

    def _submit(self, file: PartFile, number: int, buffer: bytearray, nbytes: int) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(N_UPLOADS, thread_name_prefix="ckpt-upload")
        if len(self._running) >= 2 * N_UPLOADS:
            self._wait_for_one()
        future = self._pool.submit(self._upload, file, number, buffer, nbytes)
        with self._lock:
            self._running.add(future)

    def _upload(self, file: PartFile, number: int, buffer: bytearray, nbytes: int) -> None:
        try:
            self._send(file, number, memoryview(buffer)[:nbytes])
        except BaseException as error:
            self._failure = self._failure or error
            raise
        with self._lock:
            self._spare.append(buffer)

    def _send(self, file: PartFile, number: int, data: memoryview) -> None:
        """Send one part, or the file that it is, which takes the place of nothing."""
        if file.is_put_whole and file.token is None and len(data) == file.nbytes:
            if not self._place.put(file.path, data, is_new=True) and self._place.get(file.path) != bytes(data):
                raise TargetExists("another process has written it in the meantime", where=file.where)
            file.is_joined = True
            return
        with file.lock:
            if file.token is None:
                file.token = self._place.begin(file.path)
        file.parts[number] = Part(len(data), self._place.put_part(file.path, file.token, number, data))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _in_order(file: PartFile) -> Mapping[int, Part]:
    sent = sum(part.nbytes for part in file.parts.values())
    if sent != file.nbytes:
        raise StorageError(f"expected parts of {counted(file.nbytes, 'byte')}, {sent:,} were sent", where=file.where)
    return {number: file.parts[number] for number in sorted(file.parts)}
