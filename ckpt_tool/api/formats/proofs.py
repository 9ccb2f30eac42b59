"""A proof is one thing that a program of others did with a format, and where the repository shows it."""

from __future__ import annotations

from typing import Literal

from ckpt_tool.records import dataclass

__all__ = ["Proof", "read", "written"]


@dataclass(frozen=True, slots=True)
class Proof:
    """One thing that a program did with the format."""

    direction: Literal["reads", "writes for"]
    program: str
    """Name and version of the program."""
    what: str
    """What it saved, or how it loads; empty where there is only one way."""
    evidence: str
    """Path in the repository: a checkpoint (``archive!folder`` for one inside of an archive), or a test."""


def read(program: str, **fixtures: str) -> tuple[Proof, ...]:
    """Proofs of reading: what was saved, with spaces for underscores, and the fixture that holds it."""
    return tuple(
        Proof("reads", program, what.replace("_", " ").strip(), f"fixtures/{path}") for what, path in fixtures.items()
    )


def written(program: str, what: str, test: str) -> Proof:
    """Proof of writing, by a test below ``tests/formats``."""
    return Proof("writes for", program, what, f"tests/formats/{test}")
