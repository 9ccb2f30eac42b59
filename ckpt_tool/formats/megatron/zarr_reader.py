"""The reader of mcore's zarr checkpoints, 0.8 to 0.15: a folder of chunk files per tensor, zarr version 2.

mcore wrote them uncompressed, in C order, with its own element type name ``bfloat16``; the optimizer's state has the
shape of the weights. ``<key>.sync`` folders hold locks and are no data. Source: mcore 0.12
``dist_checkpointing/strategies/zarr.py``; https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DType, dtype
from ckpt_tool.errors import FormatError, NotFound, Unsupported
from ckpt_tool.formats._dcp import checks, objects
from ckpt_tool.formats._torch_file import headers
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.formats.megatron.common_state import COMMON_FILE, common_checksums, common_findings, read_common
from ckpt_tool.formats.megatron.config import CONFIG_NAME, sharded_config
from ckpt_tool.formats.megatron.joined import joined, with_folder
from ckpt_tool.formats.megatron.keys import common_prefix, named
from ckpt_tool.formats.megatron.location import Location, locate, within
from ckpt_tool.geometry.absent import absent_places
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.missing import missing_facts
from ckpt_tool.manifest.model import Blob, Chunk, FileEntry, FileRange, Manifest, TensorMeta
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import ChunkTable, FileTable, IntArray, TensorTable
from ckpt_tool.numerals import numeral
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, shell_word
from ckpt_tool.storage.virtual.subfolder import places_below

__all__ = ["READER", "MegatronZarrReader"]

_ARRAY = "/.zarray"
_NUMBERS = rf"{numeral()}(?:\.{numeral()})*"
_OBJECT = re.compile(rf"shard_({_NUMBERS})_({_NUMBERS})\.pt")
_MAX_NAMED = 100
_STATE = re.compile(r"(?P<before>.*optimizer\.state\.)(?P<slot>\w+)\.(?P<parameter>.+)")
_LOCKS = ".sync"
_CHUNK = re.compile(_NUMBERS)
_MAX_ARRAY_NBYTES = 64 << 10
_DTYPES = {
    "bfloat16": "bfloat16", "<f2": "float16", "<f4": "float32", "<f8": "float64", "|i1": "int8", "|u1": "uint8",
    "<i2": "int16", "<i4": "int32", "<i8": "int64", "|b1": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Array:
    """One ``.zarray``."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[int, ...]

    @property
    def n_chunks(self) -> int:
        """Chunk files that the whole array has."""
        count = 1
        for size, chunk in zip(self.shape, self.chunks, strict=True):
            count *= -(-size // chunk)
        return count

    def lacking(self, offsets: Collection[tuple[int, ...]]) -> list[str]:
        """Names of files of chunks that begin at none of ``offsets``; the first hundred."""
        grid = [-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        present = [tuple(o // c for o, c in zip(each, self.chunks, strict=True)) for each in offsets]
        return [".".join(map(str, i)) or "0" for i in absent_places(present, grid, at_most=_MAX_NAMED).first]


class MegatronZarrReader:
    """``zarr``; the run's folder with its tracker, or one iteration's."""

    name = "megatron-zarr"

    def probe(self, source: Source) -> Probe:
        """By file names and ``metadata.json``; one request for it, one for a tracker."""
        try:
            location = locate(source, _is_complete, lambda path: path.endswith(_ARRAY))
        except (FormatError, NotFound) as error:
            return Probe(0.95, str(error))
        if location is None and _lacks_config(source):
            return Probe(0.96, f"{COMMON_FILE} beside folders with .zarray, without {CONFIG_NAME}")
        if location is None:
            return Probe(0.0, f"no {CONFIG_NAME} beside folders with .zarray, here or in an iteration's folder")
        backend = sharded_config(within(source, location.folder)).get("sharded_backend")
        if backend != "zarr":
            return Probe(0.0, f"{CONFIG_NAME} says sharded_backend {backend!r}, not 'zarr'")
        return Probe(0.98, f"{CONFIG_NAME} says sharded_backend 'zarr'")

    def read(self, source: Source) -> Manifest:
        """The manifest, chunks resolved.

        Requests: the tracker where there is one, ``metadata.json``, one for each tensor's ``.zarray``, and three for
        ``common.pt``.

        Raises:
            NotFound: nothing complete here; the message lists what is.
            FormatError: a ``.zarray`` is damaged, or a chunk file has another size than its array says.
            Unsupported: compressed arrays, or other element types.
        """
        location = locate(source, _is_complete, lambda path: path.endswith(_ARRAY))
        if location is None:
            raise NotFound(
                f"{CONFIG_NAME} is missing beside folders with .zarray: mcore writes it last, so the save did not end, "
                "or not all was copied",
                where=source.listing.url,
                hint=f"fetch it; else ckpt verify {shell_word(source.listing.url)} --salvage OUT --like ANOTHER_STEP",
            )
        with places_below(location.folder):
            return self._read(source, location)

    def _read(self, source: Source, location: Location) -> Manifest:
        inner = within(source, location.folder)
        keys = _keys(inner)
        prefix = common_prefix(keys)
        arrays = _arrays(inner, keys)
        files_of: dict[str, list[str]] = {}
        for file in inner.listing.match("*/*"):
            files_of.setdefault(file.partition("/")[0], []).append(file)
        metas, records, entries, missing = [], [], [], {}
        below = f"{location.folder}/" if location.folder else ""
        bare = [key for key, own in files_of.items() if key not in arrays and _are_chunks(own)]
        lost = {
            f"{below}{key}{_ARRAY}": [named(key, prefix)[0]]
            for key in [*bare, *_lost_arrays(keys, inner.listing.paths)]
        }
        for key, array in arrays.items():
            fqn, path = named(key, prefix)
            metas.append(TensorMeta(fqn, array.dtype, array.shape, section_of(path, fqn), path))
            found = list(_chunks(inner, files_of.get(key, ()), fqn, array))
            records += [chunk for chunk in found if chunk.box.volume]
            entries += [FileEntry(chunk.where.path, inner.listing.nbytes(chunk.where.path)) for chunk in found]
            if len(found) != array.n_chunks:
                missing[fqn] = [f"{below}{key}/{name}" for name in array.lacking({c.box.offsets for c in found})]
        tensors, files = TensorTable.from_records(metas), FileTable(tuple(entries))
        common = read_common(inner, ())
        bulk = (tensors, ChunkTable.from_records(records, tensors, files), files)
        tensors, chunks, files = joined(bulk, common.assembly.rows.tables())
        facts = common.facts
        known = {
            "step": common.iteration,
            "world_size": facts.world_size,
            "folder": location.folder or None,
            "optimizer_form": "fully_sharded_model_space" if any("optimizer.state." in k for k in keys) else None,
            "sharding_type": common.sharding_type,
            "args": facts.described() or None,
            "common_state": common.where or None,
            "key_prefix": prefix or None,
            "int_keyed_dicts": list(common.int_keyed) or None,
            "missing_chunks": missing or None,
            **missing_facts(list(lost), names=lost),
            "metadata_json": dict(sharded_config(inner)) or None,
        }
        return Manifest(
            format=self.name,
            root=source.listing.url,
            tensors=tensors,
            chunks=chunks,
            files=with_folder(files, location.folder),
            blobs=(*_objects(inner, prefix, location.folder), *common.assembly.blobs),
            mesh=facts.mesh(),
            info={key: value for key, value in known.items() if value is not None},
            notes=(*location.notes, *common.notes(source.listing.url, location.folder)),
        )

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
        """The chunks as they are; those of ``common.pt`` by its local headers."""
        return headers.resolve(source, manifest, rows)

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """All objects, those of ``rows`` loaded; one request per object."""
        return objects.load_blobs(source, manifest, rows)

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """Of the common state and the objects, which are zips; zarr 2 records none."""
        yield from checks.checksums(source, manifest.replace(chunks=manifest.chunks.take([])))
        yield from common_checksums(source, manifest)

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """See ``check_metadata``: there is nothing else."""
        yield from self.check_metadata(source, manifest)

    def check_metadata(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Arrays, chunk files and pieces of objects that are missing, and a missing common state."""
        yield from common_findings(manifest)
        for path in manifest.info.get("missing_files", ()):
            said = f"{path} is missing, an array that others of this checkpoint tell of"
            yield Finding("missing-file", Severity.ERROR, said, where=FileRange(path, 0, 0))
        for path in _absent_pieces(source.listing.paths):
            said = f"{path} is missing, a piece of an object of which others are here"
            yield Finding("missing-file", Severity.ERROR, said, where=FileRange(path, 0, 0))
        for fqn, paths in manifest.info.get("missing_chunks", {}).items():
            for path in paths:
                yield Finding(
                    "missing-file", Severity.ERROR, f"{path} is missing, a chunk of {fqn!r}", fqn, FileRange(path, 0, 0)
                )


READER = MegatronZarrReader()


def _is_complete(names: Iterable[str]) -> bool:
    """Whether an iteration's folder has ``metadata.json``, which is written last, and arrays."""
    found = set(names)
    return CONFIG_NAME in found and any(name.endswith(_ARRAY) and name.count("/") == 1 for name in found)


def _lacks_config(source: Source) -> bool:
    """Whether everything else of such a checkpoint is here."""
    listing = source.listing
    is_there = listing.entry is None and COMMON_FILE in listing and CONFIG_NAME not in listing
    return is_there and bool(listing.match("*" + _ARRAY))


def _are_chunks(paths: Sequence[str]) -> bool:
    """Whether files of a folder are called as chunks of an array are."""
    return all(_CHUNK.fullmatch(path.rpartition("/")[2]) for path in paths)


def _keys(source: Source) -> list[str]:
    """Keys of arrays; lock folders, whose ``.zarray`` is empty, are none."""
    paths = source.listing.match("*" + _ARRAY)
    return [path.removesuffix(_ARRAY) for path in paths if not path.endswith(_LOCKS + _ARRAY)]


def _lost_arrays(keys: Sequence[str], paths: Iterable[str]) -> Iterator[str]:
    """Keys that others tell of: state that most parameters have, the weight that state is of, what a lock was for.

    A weight without any state may be a frozen one.
    """
    here = set(keys)
    slots: dict[tuple[str, str], set[str]] = {}
    for match in filter(None, map(_STATE.fullmatch, keys)):
        slots.setdefault((match["before"], match["parameter"]), set()).add(match["slot"])
    counts = Counter(slot for own in slots.values() for slot in own)
    usual = {slot for slot, n in counts.items() if 2 * n > len(slots)}
    has_weights = 2 * sum(parameter in here for _, parameter in slots) > len(slots)
    for (before, parameter), own in slots.items():
        yield from (f"{before}{slot}.{parameter}" for slot in sorted(usual - own))
        if has_weights and parameter not in here:
            yield parameter
    folders = {path.partition("/")[0] for path in paths}
    yield from sorted(f for f in (f.removesuffix(_LOCKS) for f in folders if f.endswith(_LOCKS)) if f not in folders)


def _arrays(source: Source, keys: Sequence[str]) -> dict[str, _Array]:
    places = []
    for key in keys:
        path = key + _ARRAY
        nbytes = source.listing.nbytes(path)
        if not 0 < nbytes <= _MAX_ARRAY_NBYTES:
            raise FormatError(f"{counted(nbytes, 'byte')}, expected a small JSON document", where=path)
        places.append(FileRange(path, 0, nbytes))
    data = source.store.fetch(places)
    return {key: _array(text, place.path) for key, text, place in zip(keys, data, places, strict=True)}


def _array(text: bytes, where: str) -> _Array:
    try:
        fields: Mapping[str, Any] = json.loads(text)
        version, name = fields["zarr_format"], fields["dtype"]
        shape, chunks = tuple(fields["shape"]), tuple(fields["chunks"])
        oddities = [fields.get("compressor"), fields.get("filters"), None if fields.get("order") == "C" else "order"]
        separator = fields.get("dimension_separator", ".")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"no description of an array: {error}", where=where) from error
    sizes_fit = len(shape) == len(chunks) and all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, *chunks))
    if not sizes_fit or 0 in chunks:
        raise FormatError(f"shape {list(shape)} with chunks of {list(chunks)}", where=where)
    if version != 2 or separator != "." or any(oddity is not None for oddity in oddities) or name not in _DTYPES:
        raise Unsupported(
            f"zarr_format {version}, dtype {name!r}, compressor {oddities[0]}, filters {oddities[1]}: expected what "
            "mcore wrote, version 2 in C order without compression",
            where=where,
        )
    return _Array(dtype(_DTYPES[name]), shape, chunks)


def _chunks(source: Source, paths: Sequence[str], fqn: str, array: _Array) -> Iterator[Chunk]:
    """Chunks that have a file; files are whole chunks also where the array ends within them."""
    strides = contiguous_strides(array.chunks)
    whole_nbytes = array.dtype.itemsize * int(np.prod(array.chunks, dtype=np.int64))
    for path in paths:
        name = path.rpartition("/")[2]
        if _CHUNK.fullmatch(name) is None:
            continue
        index = [int(part) for part in name.split(".")] if array.shape else []
        offsets = tuple(i * chunk for i, chunk in zip(index, array.chunks, strict=False))
        if len(offsets) != len(array.shape) or any(o >= n for o, n in zip(offsets, array.shape, strict=True)):
            raise FormatError(f"no chunk of an array of shape {list(array.shape)} in {list(array.chunks)}", where=path)
        sizes = tuple(min(c, n - o) for o, c, n in zip(offsets, array.chunks, array.shape, strict=True))
        nbytes = source.listing.nbytes(path)
        if nbytes != whole_nbytes:
            raise FormatError(f"the file has {counted(nbytes, 'byte')}, expected {whole_nbytes:,}", where=path)
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        length = array.dtype.itemsize * (last + 1)
        kept = None if sizes == array.chunks else strides
        yield Chunk(fqn, Box(offsets, sizes), FileRange(path, 0, length), kept, 0, None)


def _absent_pieces(paths: Iterable[str]) -> Iterator[str]:
    """Files of objects in pieces that are not here, by those of the same object that are, which say how many it has."""
    found: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        match = _OBJECT.fullmatch(name)
        if match is not None:
            found.setdefault((folder, match[2]), []).append(_numbers(match[1]))
    for (folder, grid), here in found.items():
        sizes = _numbers(grid)
        present = [each for each in here if len(each) == len(sizes)]
        for index in absent_places(present, sizes, at_most=_MAX_NAMED).first:
            yield f"{folder}/shard_{'.'.join(map(str, index))}_{grid}.pt"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(".") if number)


def _objects(source: Source, prefix: str, folder: str) -> Iterator[Blob]:
    """Objects in pieces: one torch file each."""
    for path in source.listing.match("*/*.pt"):
        key, _, name = path.rpartition("/")
        if _OBJECT.fullmatch(name):
            fqn, keys = named(f"{key}/{name.removesuffix('.pt')}", prefix)
            where = FileRange(f"{folder}/{path}".lstrip("/"), 0, source.listing.nbytes(path))
            yield Blob(fqn, "torch_save", where, path=keys)
