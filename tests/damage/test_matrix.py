"""Every kind of damage to every format: the finding that says so, or the reason why nothing can.

By default one case of each; all places of all files with ``make matrix``.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.formats.registry import readers
from tests.damage.matrix import (
    DAMAGES,
    EXPECTED,
    FORMATS,
    LIMITS,
    MADE,
    MORE,
    TOLD,
    UNKNOWABLE,
    UNTOLD,
    damaged,
    outcome,
    truth,
)

FAST = 2
"""Cases of each kind: of the first file, or the first two places in it."""


_OF_SIZE = frozenset({"missing", "empty", "truncated"})


def wrong_answers(name: str, base: Path, *, limit: int | None) -> list[str]:
    """Cases of which the verification says too little, or something else."""
    folder = damaged(name, base)
    before, whole = truth(folder), outcome(folder)
    assert whole.is_whole
    wrong: list[str] = []
    for damage, cases in DAMAGES.items():
        changes = cases(folder)
        for what in islice(changes, limit):
            found = outcome(folder)
            if found.error is not None:
                continue
            if not found.is_whole:
                if not found.errors & EXPECTED[damage]:
                    wrong.append(f"{damage}, {what}: {sorted(found.errors)}")
                continue
            if damage in TOLD and not found.others & TOLD[damage] and (name, damage) not in UNTOLD:
                wrong.append(f"{damage}, {what}: not told")
            is_told = found.others & {"not-covered", "crc-not-recorded"} and damage not in {
                "missing",
                "empty",
                "truncated",
            }
            if not is_told and (name, damage) not in UNKNOWABLE and truth(folder) != before:
                wrong.append(f"{damage}, {what}: called whole")
        for _ in changes:  # each case is undone by the next
            pass
    assert truth(folder) == before
    return wrong


@pytest.mark.parametrize("name", FORMATS[::2])
def test_a_few_places(name: str, tmp_path: Path) -> None:
    """One or two cases of each kind of damage."""
    assert wrong_answers(name, tmp_path, limit=FAST) == []


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*FORMATS, *MORE, *MADE])
def test_all_places(name: str, tmp_path: Path) -> None:
    """Each file missing, empty, cut at 20 places, swapped, with bits flipped in headers, metadata and payload."""
    assert wrong_answers(name, tmp_path, limit=LIMITS.get(name)) == []


@pytest.mark.matrix
def test_every_format(tmp_path: Path) -> None:
    """Each reader has a checkpoint that is damaged."""
    tried = set()
    for number, name in enumerate((*FORMATS, *MORE, *MADE)):
        with open_checkpoint(damaged(name, tmp_path / str(number))) as checkpoint:  # some are of the same fixture
            tried.add(checkpoint.manifest.format)
    assert {reader.name for reader in readers()} == tried
