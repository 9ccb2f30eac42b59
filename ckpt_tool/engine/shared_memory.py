"""A segment is memory of one process that others of the same host map as well, without a name that could be left over.

It is an anonymous file (memfd), found through ``/proc/<pid>/fd``: nothing stays behind when processes are killed, and
the size of ``/dev/shm`` is no limit. Where the system has neither, every process is a host of its own. Knows no torch.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import StorageError
from ckpt_tool.sizes import counted

__all__ = ["Segment", "allocate", "has_ended", "host_key", "meet_pages"]

_ZEROS_BYTES = 256 << 10


class Segment:
    """``nbytes`` of shared memory, mapped here; zeros at first."""

    def __init__(self, fd: int, nbytes: int, *, is_writable: bool) -> None:
        self.fd = fd
        self.nbytes = nbytes
        kind = mmap.PROT_READ | mmap.PROT_WRITE if is_writable else mmap.PROT_READ
        self._map = mmap.mmap(fd, max(nbytes, 1), mmap.MAP_SHARED, kind)
        meet_pages(self._map)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8, count=nbytes)
        """uint8[nbytes]; keeps the memory mapped for as long as it, or a view of it, is in use."""

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """A segment of this process.

        Raises:
            StorageError: there is no memory for it.
        """
        available = _available_bytes()
        if nbytes > available:  # nobody says no to an anonymous file: the system would end processes instead
            raise StorageError(f"no shared memory of {counted(nbytes, 'byte')}: {available:,} are available")
        try:
            fd = os.memfd_create("ckpt-tool", os.MFD_CLOEXEC)
            try:
                allocate(fd, max(nbytes, 1))
                return cls(fd, nbytes, is_writable=True)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise StorageError(f"no shared memory of {counted(nbytes, 'byte')}: {error.strerror or error}") from error

    @classmethod
    def holding(cls, parts: Sequence[bytes | memoryview | npt.NDArray[np.uint8]]) -> Segment:
        """A segment of this process with ``parts`` laid end to end."""
        arrays = [np.frombuffer(part, dtype=np.uint8) for part in parts if len(part)]
        segment = cls.create(sum(len(array) for array in arrays))
        at = 0
        for array in arrays:
            segment.bytes[at : at + len(array)] = array
            at += len(array)
        return segment

    @classmethod
    def of_process(cls, pid: int, fd: int, nbytes: int) -> Segment:
        """The segment that process ``pid`` has open as ``fd``; it must have it open still.

        Raises:
            StorageError: that process cannot be looked into.
        """
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                return cls(own, nbytes, is_writable=True)
            finally:
                os.close(own)  # the mapping stays
        except (OSError, ValueError) as error:
            raise StorageError(
                f"the shared memory of process {pid} cannot be opened: {error}", hint='pass exchange="none"'
            ) from error

    def close(self) -> None:
        """Close the descriptor of a segment made here, once all others have it mapped; the memory stays in use."""
        if self.fd >= 0:
            with suppress(OSError):
                os.close(self.fd)
            self.fd = -1


def allocate(fd: int, nbytes: int) -> None:
    """Have all pages of an anonymous file, filled with zeros: memory that is missing later would kill the process.

    Reserved pages are filled when they are first met, one by one; what is written fills them four times as fast.

    Raises:
        OSError: there is no memory for it.
    """
    os.ftruncate(fd, nbytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    zeros = memoryview(bytes(min(nbytes, _ZEROS_BYTES)))
    at = 0
    while at < nbytes:
        at += os.pwrite(fd, zeros[: nbytes - at], at)


def meet_pages(memory: mmap.mmap) -> None:
    """Have all pages of shared memory mapped, which are there: to meet one in writing costs more than filling it.

    Whoever reads a page gets those around it as well. MAP_POPULATE asks for each, and takes five times as long.
    """
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE].max(initial=0)


def _available_bytes() -> int:
    """Memory that this host can give without taking it from anyone; a large number where it does not tell."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    return 1 << 40


def host_key() -> int:
    """A number that is equal in processes that can open each other's segments; one's own where none can."""
    parts = [os.urandom(16)]
    if hasattr(os, "memfd_create"):
        with suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as file:
            parts = [file.read().strip(), os.readlink("/proc/self/ns/pid").encode(), str(os.geteuid()).encode()]
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def has_ended(pid: int) -> bool:
    """Whether process ``pid`` of this host is gone, or a zombie that nobody has waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] in ([b"Z"], [b"X"])
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
