"""The reader of nanotron's checkpoints: parameters whole, with masters and moments of its optimizers.

Every file of a parameter records where its part belongs. Optimizer files have no such record: the parts are those of
the same parameter and tensor-parallel rank, and with ZeRO a data-parallel rank has a range of the part's elements in
row-major order, which ``optimizer_config.json`` tells, or the rule by which they are cut. Source: nanotron 0.4,
``serialize/`` and ``optim/zero.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._columns import Columns
from ckpt_tool.formats._dcp.objects import load_blobs
from ckpt_tool.formats._json import read_json_object
from ckpt_tool.formats._missing import missing_text
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._safetensors.stored import read_headers
from ckpt_tool.formats._torch_file import headers
from ckpt_tool.formats._torch_file.archive import TorchFile, open_torch_files
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.formats.nanotron.location import (
    METADATA,
    ModelFile,
    OptimizerFile,
    lacking_files,
    model_file,
    optimizer_file,
    step_folder,
)
from ckpt_tool.formats.nanotron.slices import Part, parse_part, whole_part
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.flat import flat_boxes
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, Manifest, MeshInfo
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, IntArray
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["READER", "NanotronReader"]

_ENTRY = "data"
_CONFIG = "optimizer/optimizer_config.json"
_MASTERS = "gradient_accumulator"
_MASTER = "fp32_param"


class NanotronReader:
    """Requests: one per file of a parameter, three per file of the optimizer, and a few small JSON files."""

    name = "nanotron"

    def probe(self, source: Source) -> Probe:
        """By names; a run by its tracker."""
        folder = step_folder(source)
        if folder is None:
            return Probe(0.0, f"no {METADATA} beside model/, here or in the folder that latest.txt names")
        return Probe(0.97, f"{METADATA} beside model/")

    def read(self, source: Source) -> Manifest:
        """See the module.

        Raises:
            NotFound: no such checkpoint.
            FormatError: files contradict each other or themselves.
            Unsupported: files of a version that does not record where parts belong.
        """
        folder = step_folder(source)
        if folder is None:
            raise NotFound(f"no {METADATA} beside model/", where=source.listing.url)
        prefix = f"{folder}/" if folder else ""
        building = _Building(source, prefix)
        paths = [path[len(prefix) :] for path in source.listing.sizes if path.startswith(prefix)]
        building.missing += [prefix + path for path in lacking_files(paths)]
        building.add_model([found for path in paths if (found := model_file(path))])
        building.add_optimizer([own for path in paths if (own := optimizer_file(path))])
        said = read_json_object(source, prefix + METADATA)
        tensors, chunks, files = building.columns.tables()
        cut = [name for name, parts in building.parts.items() if None not in parts]
        missing = list(dict.fromkeys(building.missing)) or None
        info: dict[str, Any] = {
            "metadata": said, "folder": folder or None, "cut_parameters": cut, "missing_files": missing,
        }  # fmt: skip
        step = said.get("metas", {}).get("last_train_step") if isinstance(said.get("metas"), dict) else None
        if type(step) is int:
            info["step"] = step
        others = [p for p in paths if p.startswith(("random/", "lr_scheduler/")) and p.endswith(".pt")]
        for path in others:
            where = FileRange(prefix + path, 0, source.listing.nbytes(prefix + path))
            name = path.removesuffix(".pt").replace("/", ".")
            building.blobs.append(Blob(name, "torch_save", where, path=tuple(name.split("."))))
        notes = (f"step {folder}, which latest.txt names",) if folder else ()
        return Manifest(
            self.name,
            source.listing.url,
            tensors,
            chunks,
            files,
            blobs=tuple(building.blobs),
            mesh=_mesh(said),
            info={key: value for key, value in info.items() if value is not None},
            notes=(*notes, *building.notes),
        )

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
        """Parameters as they are; the optimizer's by local headers."""
        return headers.resolve(source, manifest, rows)

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """States of generators and schedules are torch files of their own: one request each."""
        return load_blobs(source, manifest, rows)

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """Those of the optimizer's files; safetensors has none."""
        return headers.checksums(source, manifest)

    def lacking(self, source: Source) -> tuple[str, ...]:
        """What names tell; one small request where there is a tracker."""
        folder = step_folder(source)
        prefix = f"{folder}/" if folder else ""
        missing = lacking_files(path[len(prefix) :] for path in source.listing.sizes if path.startswith(prefix))
        return (missing_text(missing),) if missing else ()

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Nothing: what could contradict was refused by ``read``, and coverage is compared for every format."""
        del source, manifest
        yield from ()


READER = NanotronReader()


def _mesh(said: Mapping[str, Any]) -> MeshInfo | None:
    axes = [axis for axis in ("dp", "cp", "tp") if type(said.get(axis)) is int and said[axis] > 0]
    return MeshInfo(tuple(axes), tuple(said[axis] for axis in axes), METADATA) if axes else None


@dataclass(slots=True)
class _Building:
    """Columns and objects of one step."""

    source: Source
    prefix: str
    columns: Columns = field(default_factory=Columns)
    blobs: list[Blob] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parts: dict[str, dict[tuple[int, int] | None, Part]] = field(default_factory=dict)
    """By parameter, by tensor and expert rank (None: all)."""
    missing: list[str] = field(default_factory=list)
    """Files that others tell of, a star for what they do not tell of a name."""

    def add_model(self, files: Sequence[ModelFile]) -> None:
        """A tensor per parameter, a chunk per pair of slices."""
        paths = [self.prefix + file.path for file in files]
        for file, path, header in zip(files, paths, read_headers(self.source, paths), strict=True):
            entry = next((one for one in header.entries if one.name == _ENTRY), None)
            if entry is None or len(header.entries) != 1:
                raise FormatError(f"expected one tensor {_ENTRY!r}, got {len(header.entries):,}", where=path)
            part = whole_part(entry.shape) if file.ranks is None else parse_part(header.metadata, entry.shape, path)
            self.parts.setdefault(file.name, {})[None if file.ranks is None else file.ranks[1:]] = part
            tensor = self.columns.add_tensor(file.name, entry.dtype, part.shape, section="model")
            row = self.columns.add_file(FileEntry(path, self.source.listing.nbytes(path)))
            start = header.data_start + entry.start
            for local, whole in part.joined(Box.whole(entry.shape)):
                self._add(tensor, row, start, 0, part, local, whole, rank=None, flags=0)

    def add_optimizer(self, files: Sequence[OptimizerFile]) -> None:
        """Masters and moments of all ranks, but for those of parameters whose files are missing.

        Raises:
            FormatError: a state does not have the elements that its range says.
        """
        if not files:
            self.notes.append("no optimizer's files")
            return
        config: dict[str, Any] = {}
        if self.prefix + _CONFIG in self.source.listing:
            config = read_json_object(self.source, self.prefix + _CONFIG)
        elif any(file.dp is not None for file in files):  # which elements a rank has is not known then
            self.missing.append(self.prefix + _CONFIG)
            return
        opened = open_torch_files(self.source, [self.prefix + file.path for file in files])
        for number, (file, torch_file) in enumerate(zip(files, opened, strict=True)):
            root = torch_file.root
            if not isinstance(root, Mapping) or not isinstance(root.get("names"), Mapping):
                raise FormatError("no optimizer's state with names", where=torch_file.path)
            for key, states in (root.get("state") or {}).items():
                name = root["names"].get(key)
                if not isinstance(name, str) or not isinstance(states, Mapping):
                    raise FormatError(f"the state of {key!r} has no name", where=torch_file.path)
                for state, value in states.items():
                    self._add_state(file, torch_file, name, str(state), value, config)
            for name, value in (root.get(_MASTERS) or {}).items():
                self._add_state(file, torch_file, str(name), _MASTER, value, config)
            if number == 0:
                groups = root.get("param_groups")
                path = ("optimizer", "param_groups")
                self.blobs.append(Blob("optimizer.param_groups", "value", None, groups, path, is_loaded=True))

    def _add_state(
        self, file: OptimizerFile, opened: TorchFile, name: str, state: str, value: Any, config: Mapping[str, Any]
    ) -> None:
        fqn = f"optimizer.state.{name}.{state}"
        where = f"{opened.path}: {fqn}"
        path = ("optimizer", "state", name, state)
        if not isinstance(value, TensorRef):
            if file.dp in (None, 0) and file.tp == 0:
                self.blobs.append(Blob(fqn, "value", None, value, path, is_loaded=True))
            return
        owned = self.parts.get(name)
        part = None if owned is None else owned.get((file.tp, file.exp)) or owned.get(None)
        if part is None:  # without it the state has no place
            module, _, leaf = name.rpartition(".")
            if owned is None:
                self.missing.append(f"{self.prefix}model/{module.replace('.', '/')}/model_{leaf}*.safetensors")
            return
        is_scalar = not value.shape
        low, high = (0, 1) if is_scalar else _range(config, file, name, prod(part.local_shape), where)
        numel = prod(value.shape)
        if numel != high - low or value.strides != contiguous_strides(value.shape):
            raise FormatError(f"{counted(numel, 'element')} for the range {low:,} to {high:,}", where=where)
        shape = () if is_scalar else part.shape
        tensor = self.columns.add_tensor(fqn, value.dtype, shape, path=path, section="optimizer")
        place = opened.storages.get(value.storage.key)
        end = (value.offset + numel) * value.dtype.itemsize
        if place is None or place.file.path != opened.path or end > place.nbytes or opened.big_endian:
            raise FormatError("its storage is not in the file as plain bytes", where=where)
        row = self.columns.add_file(place.file)
        start = place.offset + value.offset * value.dtype.itemsize
        flags = 0 if place.is_exact else int(ChunkFlag.UNRESOLVED)
        rank = (file.pp * file.n_dp + (file.dp or 0)) * file.n_tp + file.tp
        if is_scalar:
            self.columns.add_chunks(
                tensor, offsets=[()], sizes=[()], file=row, offset=[start], length=value.dtype.itemsize, rank=rank,
                flags=flags,
            )  # fmt: skip
            return
        for box in flat_boxes(low, high, part.local_shape):
            for local, whole in part.joined(box):
                self._add(tensor, row, start, low, part, local, whole, rank=rank, flags=flags)

    def _add(  # noqa: PLR0913 - a place has as many numbers
        self,
        tensor: int,
        file: int,
        start: int,
        first: int,
        part: Part,
        local: Box,
        whole: Box,
        *,
        rank: int | None,
        flags: int,
    ) -> None:
        """One box: element ``first`` of the part lies at byte ``start``."""
        width = self.columns.metas[tensor].dtype.itemsize
        strides = contiguous_strides(part.local_shape)
        at = sum(o * s for o, s in zip(local.offsets, strides, strict=True)) - first
        span = 1 + sum((n - 1) * s for n, s in zip(local.sizes, strides, strict=True))
        packed = contiguous_strides(local.sizes)
        own = tuple(p if n == 1 else s for p, n, s in zip(packed, local.sizes, strides, strict=True))
        self.columns.add_chunks(
            tensor,
            offsets=[whole.offsets],
            sizes=[whole.sizes],
            file=[file],
            offset=[start + at * width],
            length=span * width,
            rank=-1 if rank is None else rank,
            flags=flags,
            strides=None if own == packed else [own],
        )


def _range(config: Mapping[str, Any], file: OptimizerFile, name: str, numel: int, where: str) -> tuple[int, int]:
    """Which elements of a part a data-parallel rank has; all without ZeRO.

    The first rank tells the ranges of its own pipeline stage; other stages cut by the same rule.
    """
    if file.dp is None:
        return 0, numel
    try:
        known = config["configs"]["param_name_to_dp_rank_offsets"]
        if file.pp > 0 and name not in known:
            low, high = (rank * (numel // file.n_dp) + min(rank, numel % file.n_dp) for rank in (file.dp, file.dp + 1))
        else:
            low, high = (int(number) for number in known[name][str(file.dp)])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{_CONFIG} has no range of data rank {file.dp}: {error!r}"[:200], where=where) from error
    if not 0 <= low <= high <= numel:
        raise FormatError(f"the range {low:,} to {high:,} of {counted(numel, 'element')}", where=where)
    return low, high
