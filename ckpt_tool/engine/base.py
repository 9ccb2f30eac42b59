"""What it means to run a plan: options that go in, events that come out."""

from __future__ import annotations

from typing import Protocol

from ckpt_tool.manifest.digest import ContentDigest
from ckpt_tool.manifest.model import TensorMeta
from ckpt_tool.records import dataclass

__all__ = ["CastReport", "EngineOptions", "Guard", "Progress", "RunReport", "TakenDigests"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a plan is executed."""

    memory_budget_bytes: int
    """Upper bound for all buffers together."""
    n_workers: int
    """Threads that move bytes."""
    durable: bool = True
    """fsync before the target gets its name."""
    digests: bool = False
    """Take the digest of each tensor on the way."""


class Guard(Protocol):
    """Watches over the files that a plan reads: they must be the same from its first byte to its last."""

    def check(self) -> None:
        """See that they are; a ``StorageError`` where they are not."""
        ...

    def stamp(self) -> str:
        """Text that is another when they are: a run that goes on with an earlier one reads what that one read."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """Payload bytes written so far."""

    done_nbytes: int
    total_nbytes: int


@dataclass(frozen=True, slots=True)
class CastEffect:
    """What a cast did to some values."""

    n_changed: int = 0
    max_abs_error: float = 0.0
    n_overflowed: int = 0
    max_rel_error: float = 0.0

    def merged(self, other: CastEffect) -> CastEffect:
        """The effect on both."""
        return CastEffect(
            self.n_changed + other.n_changed,
            max(self.max_abs_error, other.max_abs_error),
            self.n_overflowed + other.n_overflowed,
            max(self.max_rel_error, other.max_rel_error),
        )


@dataclass(frozen=True, slots=True)
class CastReport:
    """What a cast did to the values of one tensor."""

    fqn: str
    source: str
    target: str
    n_changed: int
    """Elements whose value is not the same after the cast."""
    max_abs_error: float
    """Largest difference among values that stayed finite."""
    n_overflowed: int
    """Finite values that became infinite or NaN, for the type cannot hold them; counted as changed too."""
    max_rel_error: float
    """Largest difference in proportion to the value before, among values that stayed finite; 1 where one became 0."""


@dataclass(frozen=True)
class TakenDigests:
    """What a run found its tensors to hold."""

    tensors: dict[int, ContentDigest]
    """By row of the target's tensor table; those whose bytes did not pass whole and once are not here."""
    originals: tuple[tuple[TensorMeta, ContentDigest], ...]
    """Of the tensors that the target's are views of."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run did; the last event."""

    read_nbytes: int
    written_nbytes: int
    """Payload of this run, without what was resumed."""
    resumed_nbytes: int
    seconds: float
    casts: tuple[CastReport, ...]
    digests: TakenDigests | None = None
    """Where they were asked for."""
    shared_nbytes: int = 0
    """Bytes of the target that are blocks of the source's files, which a file system shared instead of copying."""
    proven_nbytes: int = 0
    """Bytes of the target's tensors that are what checksums in the source's files say; with digests only."""
