"""Which tensors of each of two checkpoints take part in a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_tool.api.trust.pairing import is_noise
from ckpt_tool.errors import CoverageError, NotFound
from ckpt_tool.manifest.missing import needed_files
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.select import select
from ckpt_tool.sizes import counted, shell_word, some_of

__all__ = ["DiffRows", "select_rows"]


class DiffRows:
    """The tensors of one side that take part."""

    def __init__(self, manifest: Manifest, url: str, *, everything: bool) -> None:
        self.manifest, self.url = manifest, url
        fqns = self.manifest.tensors.fqns
        kept = [row for row, fqn in enumerate(fqns) if everything or not is_noise(fqn)]
        self.n_noise = len(fqns) - len(kept)
        self.taken: list[int] = kept
        self.n_unselected = 0

    def keep(self, rows: set[int]) -> None:
        """Take only those of ``rows``."""
        kept = [row for row in self.taken if row in rows]
        self.n_unselected = len(self.taken) - len(kept)
        self.taken = kept


def select_rows(
    sides: Sequence[DiffRows], *, include: Sequence[str], exclude: Sequence[str], section: str | None
) -> None:
    """Narrow both sides to what was asked for; a pattern must fit something on one of them.

    Raises:
        CoverageError: a side lacks files that may hold some of it.
    """
    for side in sides:
        sections = None if section is None else (section,)
        missing = needed_files(side.manifest, include=include, exclude=exclude, sections=sections)
        if missing:
            raise CoverageError(
                f"{counted(len(missing), 'file', 'are')} missing that may hold what is compared: "
                f"{some_of(list(missing))}",
                where=side.url,
                hint=f'fetch them; "ckpt verify {shell_word(side.url)}" lists all',
            )
    if not (include or exclude or section):
        return
    for side in sides:
        others = [each.manifest for each in sides if each is not side]
        fitting = [
            _fitting(kind, pattern, side.manifest, others)
            for kind, patterns in (("include", include), ("exclude", exclude))
            for pattern in patterns
        ]
        rows = set(range(len(side.manifest.tensors))) if not include else set[int]()
        rows = rows.union(*fitting[: len(include)]).difference(*fitting[len(include) :])
        if section is not None:
            rows &= _fitting("section", section, side.manifest, others)
        side.keep(rows)


def _fitting(kind: str, pattern: str, manifest: Manifest, others: Sequence[Manifest]) -> set[int]:
    """Rows that fit; none where another side has what fits."""
    asked: dict[str, Any] = {"include": (pattern,)} if kind != "section" else {"sections": (pattern,)}
    try:
        return set(select(manifest, **asked).tolist())
    except NotFound:
        for other in others:
            select(other, **asked)  # raises when nothing matches there either
        return set()
