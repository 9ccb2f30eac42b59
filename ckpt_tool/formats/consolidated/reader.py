"""The reader of ``consolidated.NN.pth``: a file for each tensor-parallel rank, joined to whole weights.

Where a weight was cut is proven by sizes: of the ways to join its parts only one fits ``params.json`` and the length of
the norms. Where two fit (a vocabulary whose size no file tells), parts that are equal by their checksums are replicas,
others are rows. What no size decides is taken for a replica in every file, which ``check`` compares.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.errors import LayoutError, NotFound
from ckpt_tool.formats._json import read_json_object
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.archive import HEAD_NBYTES, is_torch_head, open_torch_files
from ckpt_tool.formats._torch_file.assemble import Part, assemble, by_itself
from ckpt_tool.formats._torch_file.described import manifest_of, part_of, section_by_root
from ckpt_tool.formats._torch_file.entries import Entry, entries_of
from ckpt_tool.formats._torch_file.findings import archive_findings
from ckpt_tool.formats._torch_file.placed import Piece, Placed
from ckpt_tool.formats._torch_file.reading import TorchFilesReader
from ckpt_tool.formats._torch_file.replicas import replica_findings
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.consolidated.sizes import Cut, Sizes, cuts_of, dims_of, sizes_of
from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import KeyPath, Manifest, MeshInfo
from ckpt_tool.numerals import numeral
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["READER", "ConsolidatedReader"]

_FILE = re.compile(rf"consolidated\.({numeral(2, most=5)})\.pth")
_PARAMS = "params.json"
_NORM = re.compile(r"(?:.*\.)?norm\.weight")
_MAX_PARAMS_NBYTES = 1 << 20
_SHOWN = 5


class ConsolidatedReader(TorchFilesReader):
    """Requests: ``read`` makes one for ``params.json`` and three per file, ``resolve`` as for any torch file."""

    name = "consolidated"

    def probe(self, source: Source) -> Probe:
        """By names, and by the first bytes of the first file that is one of torch.save."""
        if source.listing.entry is not None:
            return Probe(0.0, "a single file; consolidated files are read together, from their folder")
        paths = _paths(source)
        if not paths:
            return Probe(0.0, "no consolidated.NN.pth")
        if not any(is_torch_head(source.head(path, HEAD_NBYTES)) for path in paths):
            return Probe(0.2, f"{paths[0]} is no torch.save file")
        return Probe(0.95, f"{counted(len(paths), 'file')} consolidated.NN.pth")

    def read(self, source: Source) -> Manifest:
        """See the module for how weights are joined.

        Raises:
            NotFound: there are none, or files are missing among them.
            LayoutError: sizes of ``params.json`` contradict the weights.
            FormatError: a file is damaged.
        """
        paths = _paths(source)
        if not paths:
            raise NotFound("no consolidated.NN.pth", where=source.listing.url)
        params, notes = _params(source)
        opened = open_torch_files(source, paths)
        entries = [entries_of(file.root) for file in opened]
        parts = [part_of(file, own, rank) for rank, (file, own) in enumerate(zip(opened, entries, strict=True))]
        joiner = _Joiner(parts, sizes_of(params, _norm_length(parts)))
        found = assemble(parts, section_by_root([file.root for file in opened]), joiner.placed)
        found.notes += [*notes, *joiner.notes()]
        missing = [f"consolidated.{number:02d}.pth" for number in range(1, joiner.parts_in_all())]
        if missing:
            found.notes.append(f"one of {counted(len(missing) + 1, 'part')}: {joiner.sizes.evidence}")
        if len(parts) > 1:
            found.mesh = MeshInfo(("tp",), (len(parts),), f"{counted(len(parts), 'file')} consolidated.NN.pth")
        info: dict[str, Any] = {"world_size": len(parts), "params": dict(params), "config": _config(params)}
        names = {
            "replicated_by_assumption": joiner.assumed(found.replicated),
            "kept_apart": found.kept_apart,
            "replicas": sorted(joiner.replicas),
            "missing_files": missing,
        }
        info |= {key: fqns for key, fqns in names.items() if fqns}
        return manifest_of(self.name, source.listing.url, opened, entries, found, info)

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Replicas that are none, tensors whose parts have different shapes, missing checksums."""
        fqns = [*manifest.info.get("replicated_by_assumption", ()), *manifest.info.get("replicas", ())]
        for fqn in manifest.info.get("kept_apart", ()):
            message = f"{fqn!r}: same key, different shapes, and no rule of how its parts join"
            yield Finding("different-shapes", Severity.ERROR, message, fqn=fqn)
        yield from replica_findings(source, manifest, fqns)
        yield from archive_findings(source, manifest)


READER = ConsolidatedReader()


def _paths(source: Source) -> list[str]:
    """The files in the order of their numbers.

    Raises:
        NotFound: one is missing.
    """
    found = {int(match[1]): path for path in source.listing.sizes if (match := _FILE.fullmatch(path))}
    if not found:
        return []
    missing = absent_numbers(found, max(found) + 1, at_most=_SHOWN)
    if missing:
        names = tuple(f"consolidated.{number:02d}.pth" for number in missing)
        said = f"{', '.join(names)} missing beside {counted(len(found), 'file')}"
        raise NotFound(said, where=source.listing.url, hint="fetch what is missing", files=names)
    return [found[number] for number in sorted(found)]


def _params(source: Source) -> tuple[Mapping[str, Any], list[str]]:
    if _PARAMS not in source.listing:
        return {}, [f"no {_PARAMS}: sizes are known from the weights alone"]
    params = read_json_object(source, _PARAMS, max_nbytes=_MAX_PARAMS_NBYTES)
    inner = params.get("model")
    return (inner if isinstance(inner, dict) and "dim" not in params else params), []


def _config(params: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes under the names of transformers, where rules of other names look for them."""
    words = {
        "hidden_size": params.get("dim"),
        "num_hidden_layers": params.get("n_layers"),
        "num_attention_heads": params.get("n_heads"),
        "num_key_value_heads": params.get("n_kv_heads") or params.get("n_heads"),
    }
    return {name: value for name, value in words.items() if type(value) is int and value > 0}


def _norm_length(parts: Sequence[Part]) -> int | None:
    for entry in parts[0].entries:
        if isinstance(entry.value, TensorRef) and _NORM.fullmatch(entry.fqn) and len(entry.value.shape) == 1:
            return entry.value.shape[0]
    return None


@dataclass(slots=True)
class _Joiner:
    """Decides for each weight how its parts join, and remembers why."""

    parts: Sequence[Part]
    sizes: Sizes
    cuts: dict[str, Cut | None] = field(default_factory=dict)
    replicas: list[str] = field(default_factory=list)
    by_bytes: list[str] = field(default_factory=list)
    """Weights where two ways fit and the parts' checksums decided."""
    held: dict[str, list[TensorRef]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Collect the parts of each weight."""
        for part in self.parts:
            for entry in part.entries:
                if isinstance(entry.value, TensorRef):
                    self.held.setdefault(entry.fqn, []).append(entry.value)

    def placed(self, part: Part, entry: Entry) -> list[tuple[str, KeyPath, Placed]] | None:
        """Where the tensor of one file belongs."""
        tensor = entry.value
        if not isinstance(tensor, TensorRef):
            return by_itself(part, entry)
        if entry.fqn not in self.cuts:
            self.cuts[entry.fqn] = self._cut(entry.fqn)
        cut = self.cuts[entry.fqn]
        if cut is None or part.rank is None:
            return by_itself(part, entry)
        offsets = [0] * len(tensor.shape)
        if cut.dim is not None:
            offsets[cut.dim] = part.rank * tensor.shape[cut.dim]
        box = Box(tuple(offsets), tensor.shape)
        pieces = (Piece(box, Box.whole(tensor.shape), tensor),) if box.volume else ()
        return [(entry.fqn, entry.path, Placed(tensor.dtype, cut.shape, pieces, "layout", None, part.rank))]

    def _cut(self, fqn: str) -> Cut | None:
        """How the parts of one weight join; None where no size decides.

        Raises:
            LayoutError: sizes that are known fit no way.
        """
        dims, parts = dims_of(fqn), self.held[fqn]
        n_files = len(self.parts)
        if n_files == 1 or dims is None or len(parts) != n_files:
            return None
        shapes = {part.shape for part in parts}
        if len(shapes) > 1:
            return None
        (shape,) = shapes
        ways = cuts_of(dims, shape, n_files, self.sizes)
        if not ways:
            said = {name: self.sizes.known[name] for name in dims if name in self.sizes.known}
            raise LayoutError(
                f"{counted(n_files, 'part')} {list(shape)} of {' x '.join(dims)} fit no whole: {self.sizes.evidence}; "
                f"here {said}",
                where=fqn,
                hint="params.json belongs to another model, or these files do",
            )
        if len(ways) > 1:
            self.by_bytes.append(fqn)
            is_same = self._are_equal(fqn)
            ways = [way for way in ways if (way.dim is None) == is_same]
        if ways[0].dim is None:
            self.replicas.append(fqn)
        return ways[0]

    def _are_equal(self, fqn: str) -> bool:
        """Whether the recorded checksums of all parts are the same."""
        sums = set()
        for part, tensor in zip(self.parts, self.held[fqn], strict=True):
            place = part.storages.get(tensor.storage.key)
            sums.add(None if place is None else place.crc32)
        return len(sums) == 1 and None not in sums

    def parts_in_all(self) -> int:
        """How many parts there must be, where one is here and all its weights are the same fraction of known sizes."""
        if len(self.parts) > 1:
            return 1
        fractions: set[int] = set()
        for fqn, (tensor, *_) in self.held.items():
            for name, n in zip(dims_of(fqn) or (), tensor.shape, strict=False):
                whole = self.sizes.known.get(name, n)
                if n and whole != n:
                    fractions.add(whole // n if whole % n == 0 else 0)
        return max(fractions) if len(fractions) == 1 else 1

    def assumed(self, replicated: Sequence[str]) -> list[str]:
        """Of the tensors that are the same in all files, those that no size proves to be."""
        return [fqn for fqn in replicated if self.cuts.get(fqn) is None]

    def notes(self) -> list[str]:
        """What was decided, and by what."""
        if len(self.parts) == 1:
            return []
        dims = Counter("whole in each" if c.dim is None else f"cut along {c.dim}" for c in self.cuts.values() if c)
        listed = ", ".join(f"{count:,} {what}" for what, count in dims.most_common())
        notes = [f"parts of {counted(len(self.parts), 'file')} joined by sizes ({listed}); {self.sizes.evidence}"]
        if self.by_bytes:
            notes.append(
                f"{', '.join(self.by_bytes[:_SHOWN])}: no size tells how many rows there are; parts with different "
                "checksums are rows one behind another"
            )
        unknown = [fqn for fqn, cut in self.cuts.items() if cut is None]
        if unknown:
            shown = ", ".join(unknown[:_SHOWN])
            notes.append(
                f"{counted(len(unknown), 'tensor', 'have')} names without a rule ({shown}): taken for replicas"
            )
        return notes
