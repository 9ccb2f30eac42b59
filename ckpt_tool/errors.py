"""Every error that the package raises on purpose, as one tree.

Grouped by what a handler would do about them, and each also the builtin that a caller would expect::

    CkptError
    ├── NotFound      (FileNotFoundError)    nothing is there, or nothing that is a checkpoint
    │   └── UnknownTensor (KeyError)         an open checkpoint has no tensor of that name
    ├── FormatError   (ValueError)           a file contradicts its own format: corrupt or hostile
    │   └── UnsafePickle                     a pickle asks for something that must never run
    ├── Unsupported   (NotImplementedError)  valid, but not readable or writable here
    ├── LayoutError   (ValueError)           mesh, rules or names do not fit these tensors
    ├── CoverageError (ValueError)           boxes leave holes or overlap
    ├── IntegrityError (ValueError)          a checksum or an extent does not match
    ├── TargetExists  (FileExistsError)      the target is there already
    ├── UsageError    (ValueError)           the call's arguments do not go together
    │   └── BadIndex  (IndexError)           no basic index, or one outside of the tensor
    └── StorageError  (OSError)              the storage failed, after retries

A message is written where it is raised: ``what is wrong, expected x, got y``. ``where`` is put in front of it, ``hint``
(what to type next) after it.
"""

from __future__ import annotations

__all__ = [
    "BadIndex",
    "CkptError",
    "CoverageError",
    "FormatError",
    "IntegrityError",
    "LayoutError",
    "NotFound",
    "StorageError",
    "TargetExists",
    "UnknownTensor",
    "UnsafePickle",
    "Unsupported",
    "UsageError",
]


class CkptError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        where: file (and byte offset) or tensor that is wrong, or None.
        hint: the next thing to do or to type, or None.
        files: files that are missing, relative to the checkpoint, where ``where`` names another place.
        exit_code: what the ``ckpt`` command returns for it.
    """

    exit_code: int = 3

    def __init__(
        self, message: str, *, where: str | None = None, hint: str | None = None, files: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint
        self.files = files
        if hint:
            self.__notes__ = [f"hint: {hint}"]  # tracebacks show it, from Python 3.11 on

    def __str__(self) -> str:
        """The message with its place in front, without the hint."""
        return f"{self.where}: {self.message}" if self.where else self.message


class NotFound(CkptError, FileNotFoundError):
    """Nothing is there, or nothing that reads as a checkpoint."""


class UnknownTensor(NotFound, KeyError):
    """An open checkpoint has no tensor of that name."""


class FormatError(CkptError, ValueError):
    """A file contradicts its own format."""


class UnsafePickle(FormatError):
    """A pickle asks for a callable that has no place in a checkpoint; it was neither imported nor called."""


class Unsupported(CkptError, NotImplementedError):
    """Valid input that cannot be handled here."""


class LayoutError(CkptError, ValueError):
    """Mesh, rules or names do not fit the tensors."""


class CoverageError(CkptError, ValueError):
    """The chunks of a tensor leave holes or overlap."""


class IntegrityError(CkptError, ValueError):
    """A checksum, an extent or a value does not match what was recorded."""


class TargetExists(CkptError, FileExistsError):
    """The target exists and overwriting was not asked for."""

    exit_code = 2


class UsageError(CkptError, ValueError):
    """Arguments that do not go together."""

    exit_code = 2


class BadIndex(UsageError, IndexError):
    """An index of a tensor that is no basic one, or lies outside of it."""


class StorageError(CkptError, OSError):
    """The storage failed, after retries; the original error is chained."""

    exit_code = 4
