"""Repeats are stretches of a weight or a moment that stand at a second place too.

A buffer that was written twice, or a part that was uploaded twice, leaves them; training does not. Looked for by
samples at even distances, from the start of each chunk and of each file: a stretch that is as long as the distance,
and was displaced by a multiple of it, is met by some. What samples suggest is then compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ckpt_tool.checks.places import global_indices
from ckpt_tool.errors import CkptError
from ckpt_tool.geometry.columns import BoolArray, Int64Array
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.manifest.vocabulary import embedding_and_head
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Store

__all__ = ["Samples", "repeat_findings", "sample_step", "sampled_chunks", "take_samples"]

_SAMPLE_NBYTES = 32
_MIN_CHUNK_NBYTES = 16 << 10
_MIN_STEP = 4 << 10
_MAX_SAMPLES = 1 << 15
_MAX_PLACES = 256
"""Suspected places that are compared; one is enough to tell."""
_MAX_COMPARED = 64 << 10
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93], dtype=np.uint64)

Samples = tuple[int, int, npt.NDArray[np.uint64]]
"""Row of the chunk, byte of it at which the first sample stands, and uint64[n, 4], what each consists of."""


def sampled_chunks(manifest: Manifest, rows: Int64Array, packed: BoolArray) -> BoolArray:
    """bool[n]: chunks of ``rows`` that hold floating numbers of training, in a row and enough of them."""
    chunks, tensors = manifest.chunks, manifest.tensors
    dtypes, of_tensor = tensors.kinds
    is_float = np.array([dtype.kind == "float" and dtype.bits >= 8 for dtype in dtypes], dtype=np.bool_)
    is_trained = is_float[of_tensor] & (tensors.section != SECTIONS.index("other"))
    wanted: BoolArray = packed & is_trained[chunks.tensor[rows]] & (chunks.length[rows] >= _MIN_CHUNK_NBYTES)
    return wanted


def sample_step(nbytes: int) -> int:
    """Bytes from one sample to the next, for so many bytes in all.

    >>> sample_step(1 << 20), sample_step(8 << 30)
    (4096, 262144)
    """
    step = _MIN_STEP
    while step * _MAX_SAMPLES < nbytes:
        step *= 2
    return step


def take_samples(row: int, data: npt.NDArray[np.uint8], start: int, offset: int, step: int) -> Iterator[Samples]:
    """Samples of the part of a chunk that begins ``start`` bytes in it; the chunk begins at ``offset`` of its file.

    They are only copied here, in the pass over all bytes: what they say is worked out once for all of them.
    """
    for first in {-start % step, -(offset + start) % step}:
        n = (len(data) - first - _SAMPLE_NBYTES) // step + 1
        if n > 0:
            words: npt.NDArray[np.uint64] = np.ndarray((n, 4), np.uint64, data.data, first, (step, 8))
            yield row, start + first, words.copy()


@dataclass(frozen=True, slots=True)
class _Suspect:
    """Samples that agree between two chunks, all displaced alike."""

    row: int
    other: int
    first: int
    """Position of the first of them in ``row``."""
    displacement: int
    """How much later, in bytes of the other chunk, it stands there."""
    nbytes: int
    """From the first sample to the last without a gap."""


def repeat_findings(manifest: Manifest, samples: list[Samples], step: int, store: Store) -> Iterator[Finding]:
    """One finding for each tensor that repeats itself or another; each is confirmed by reading both places.

    Args:
        manifest: its chunks are resolved.
        samples: of all chunks that are sampled.
        step: the distance of samples.
        store: reads what is compared.
    """
    names = manifest.tensors.fqns
    vocabulary = set(embedding_and_head(names))
    told: set[int] = set()
    for suspect in _suspects(samples, step):
        tensor = int(manifest.chunks.tensor[suspect.row])
        nbytes = _confirmed(manifest, suspect, step, store) if tensor not in told else 0
        if not nbytes:
            continue
        told.add(tensor)
        here, there = (_where(manifest, row, at, nbytes) for row, at in _ends(suspect))
        first, second = (_index(manifest, row, at) for row, at in _ends(suspect))
        other = int(manifest.chunks.tensor[suspect.other])
        said = (
            f"at least {counted(nbytes, 'byte')} from index {first} on stand a second time, from index {second} "
            f"{'on' if other == tensor else f'of {names[other]!r} on'} (bytes {here.offset:,} of {here.path} and "
            f"{there.offset:,} of {there.path})"
        )
        if names[tensor] in vocabulary:
            said += ": rows of tokens that were never trained may be alike"
            yield Finding("repeated-block", Severity.INFO, said, names[tensor], here)
        else:
            said += ": no training leaves that, a part that was written twice does"
            yield Finding("repeated-block", Severity.WARNING, said, names[tensor], here)


def _ends(suspect: _Suspect) -> tuple[tuple[int, int], tuple[int, int]]:
    return (suspect.row, suspect.first), (suspect.other, suspect.first + suspect.displacement)


def _suspects(samples: list[Samples], step: int) -> list[_Suspect]:
    """What equal samples suggest, the longest first.

    Left out is what consists of one repeated number of eight bytes, such as zeros or ones.
    """
    if not samples:
        return []
    words = np.concatenate([each[2] for each in samples])
    lengths = np.array([len(each[2]) for each in samples])
    within = np.arange(len(words)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows, positions = (np.repeat([each[column] for each in samples], lengths) for column in range(2))
    kept = np.flatnonzero((words[:, 1:] != words[:, :1]).any(axis=1))
    rows, positions = rows[kept], (positions + step * within)[kept]
    mixed = (words[kept] * _FACTORS).sum(axis=1, dtype=np.uint64)
    ordered = np.sort(mixed)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    is_again = np.isin(mixed, again)
    rows, positions, mixed = rows[is_again], positions[is_again], mixed[is_again]
    order = np.lexsort((positions, rows, mixed))
    second = np.flatnonzero(mixed[order][1:] == mixed[order][:-1]) + 1
    before, after = order[second - 1], order[second]
    is_other = (rows[before] != rows[after]) | (positions[before] != positions[after])
    before, after = before[is_other], after[is_other]
    kinds = np.stack([rows[before], rows[after], positions[after] - positions[before]], axis=1)
    unique, inverse, counts = np.unique(kinds, axis=0, return_inverse=True, return_counts=True)
    inverse = inverse.reshape(-1)
    found = []
    for kind in np.argsort(-counts, kind="stable")[:_MAX_PLACES].tolist():
        at = np.sort(positions[before[inverse == kind]])
        ends = np.flatnonzero(np.append(np.diff(at) > step, True))
        starts = np.append(0, ends[:-1] + 1)
        longest = int(np.argmax(at[ends] - at[starts]))
        row, other, displacement = unique[kind].tolist()
        first, last = int(at[starts[longest]]), int(at[ends[longest]])
        found.append(_Suspect(row, other, first, displacement, last - first))
    return found


def _confirmed(manifest: Manifest, suspect: _Suspect, step: int, store: Store) -> int:
    """How many bytes stand at both places, from the first sample on; 0 where that is no repeat, or means nothing."""
    if _is_copy(manifest, suspect):
        return 0
    chunks = manifest.chunks
    (row, at), (other, there) = _ends(suspect)
    length = min(
        max(suspect.nbytes, step), _MAX_COMPARED, int(chunks.length[row]) - at, int(chunks.length[other]) - there
    )
    try:
        one, two = store.fetch([_where(manifest, row, at, length), _where(manifest, other, there, length)])
    except CkptError:  # what cannot be read is told by the pass over all bytes
        return 0
    if one != two or _is_periodic(one, _row_nbytes(manifest, row)):
        return 0
    is_within = int(chunks.tensor[row]) == int(chunks.tensor[other])
    whole = min(int(chunks.length[row]), int(chunks.length[other]))
    # A tensor that holds another, as a fused one holds q, k and v, repeats all of it.
    return 0 if not is_within and suspect.nbytes + 2 * step > whole else length


def _is_copy(manifest: Manifest, suspect: _Suspect) -> bool:
    """Whether both places are one: the same bytes, a replica, or the same element of a tensor of the same shape."""
    chunks, tensors = manifest.chunks, manifest.tensors
    (row, at), (other, there) = _ends(suspect)
    if chunks.file[row] == chunks.file[other] and chunks.offset[row] + at == chunks.offset[other] + there:
        return True
    if tensors.shape_of(int(chunks.tensor[row])) != tensors.shape_of(int(chunks.tensor[other])):
        return False
    return _index(manifest, row, at) == _index(manifest, other, there)


def _is_periodic(data: bytes, row_nbytes: int) -> bool:
    """Whether these are equal rows, or one number again and again."""
    return any(data[period:] == data[:-period] for period in {8, row_nbytes} if 0 < period < len(data))


def _row_nbytes(manifest: Manifest, row: int) -> int:
    tensor = int(manifest.chunks.tensor[row])
    ndim = int(manifest.tensors.ndim[tensor])
    sizes = manifest.chunks.sizes[row, 1:ndim].tolist()
    return manifest.tensors.dtypes[tensor].nbytes(int(np.prod(sizes, dtype=np.int64))) if ndim > 1 else 0


def _index(manifest: Manifest, row: int, position: int) -> list[int]:
    tensor = int(manifest.chunks.tensor[row])
    element = position // (manifest.tensors.dtypes[tensor].bits // 8)
    index, _ = global_indices(manifest.chunks, row, int(manifest.tensors.ndim[tensor]), np.array([element]))
    found: list[int] = index[0].tolist()
    return found


def _where(manifest: Manifest, row: int, position: int, length: int = 1) -> FileRange:
    chunks = manifest.chunks
    return FileRange(manifest.files.paths[chunks.file[row]], int(chunks.offset[row]) + position, length)
