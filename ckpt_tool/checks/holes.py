"""A hole is blocks of a file that read as zeros in the midst of a tensor: what a lost power or a sparse copy leaves.

Weights that were trained have no such stretch: its ends are those of blocks of the file system, not of rows. Formats
that record checksums tell it without; safetensors record none. Knows no file; runs count elements of packed chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np
import numpy.typing as npt

from ckpt_tool.checks.zeros import Run
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.sizes import counted

__all__ = ["hole_findings", "shortest_holes"]

_BLOCK = 4096
"""Bytes: file systems and disks lose no less."""
_SECTOR = 512
"""Bytes: where a hole may begin and end."""
_SHORTEST = 4096
"""Elements."""


def shortest_holes(manifest: Manifest) -> npt.NDArray[np.int64]:
    """int64[n_tensors]: elements of the shortest hole that is looked for, 0 in all but floating weights.

    Shorter ones are seen at the end of a chunk only: to look for them in the midst would take another pass.
    """
    tensors = manifest.tensors
    is_float = np.array([dtype.kind == "float" for dtype in tensors.dtypes], dtype=np.bool_)
    is_weight = is_float & (tensors.section == SECTIONS.index("model"))
    return np.where(is_weight, _SHORTEST, 0)


def hole_findings(manifest: Manifest, zeros: Mapping[int, tuple[Run, ...]]) -> Iterator[Finding]:
    """Weights with zeros in whole blocks of their file, from block to block, which are no whole rows (padding).

    Args:
        manifest: resolved.
        zeros: by row of its chunks, runs of elements that are exactly zero.
    """
    chunks, tensors = manifest.chunks, manifest.tensors
    for row, runs in zeros.items():
        tensor = int(chunks.tensor[row])
        if SECTIONS[tensors.section[tensor]] != "model":
            continue
        sizes = chunks.box(row, int(tensors.ndim[tensor])).sizes
        width, numel = int(tensors.bits[tensor]) // 8, prod(sizes)
        for start, stop in runs:
            begin, end = (int(chunks.offset[row]) + at * width for at in (start, stop))
            is_part = stop - start < numel and not _is_rows(start, stop, prod(sizes[1:]), len(sizes))
            is_aligned = (not start or not begin % _SECTOR) and (stop == numel or not end % _SECTOR)
            n_whole = end // _BLOCK - -(-begin // _BLOCK)
            if not is_part or not is_aligned or n_whole < 1:
                continue
            said = (
                f"{counted(end - begin, 'byte')} in the midst of it are zero, {counted(n_whole, 'block')} of the file: "
                "what a lost power, a full disk or a sparse copy leaves"
            )
            where = FileRange(manifest.files.paths[chunks.file[row]], begin, end - begin)
            yield Finding("zero-blocks", Severity.WARNING, said, tensors.fqns[tensor], where)


def _is_rows(start: int, stop: int, row_numel: int, ndim: int) -> bool:
    """Whether a run is whole rows of its chunk, as padding of a vocabulary is."""
    return ndim > 1 and bool(row_numel) and not start % row_numel and not stop % row_numel
