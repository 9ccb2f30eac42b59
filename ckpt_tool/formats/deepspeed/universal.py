"""The reader of universal checkpoints: each parameter's states in files of their own, whole and not partitioned.

``deepspeed.checkpoint.ds_to_universal`` writes ``zero/<name>/{fp32,exp_avg,exp_avg_sq,step}.pt`` beside copies of the
model states: from stages 1 and 2 a dict with the whole tensor as ``param``, from stage 3 a bare flat tensor. Names are
those of the reader of DeepSpeed's own checkpoints. A ``fp32.pt`` alone is a copy of something that has no optimizer
state (frozen, a second name, or a buffer, whatever its dtype was); the model state's own is taken where it is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._missing import missing_text
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.archive import TorchFile, open_torch_files
from ckpt_tool.formats._torch_file.assemble import Part
from ckpt_tool.formats._torch_file.described import manifest_of
from ckpt_tool.formats._torch_file.entries import Entries, Entry, entries_of
from ckpt_tool.formats._torch_file.findings import archive_findings
from ckpt_tool.formats._torch_file.reading import TorchFilesReader
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.deepspeed.build import build, optimizer_values, state_name, weight_name
from ckpt_tool.formats.deepspeed.experts import is_expert, is_packed
from ckpt_tool.formats.deepspeed.facts import add_notes, facts_of, mesh_of, placement_of
from ckpt_tool.formats.deepspeed.findings import checkpoint_findings
from ckpt_tool.formats.deepspeed.locate import Located, locate, refuse_single_file, single_file_text
from ckpt_tool.formats.deepspeed.modules import Weights, weights_of
from ckpt_tool.formats.deepspeed.names import LATEST, LATEST_UNIVERSAL, TagFiles, tag_files
from ckpt_tool.formats.deepspeed.opened import Checkpoint, ModelState, mapping, number_of, open_checkpoint
from ckpt_tool.formats.deepspeed.placement import Placement
from ckpt_tool.formats.deepspeed.vectors import MASTER
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Blob, FileRange, Manifest
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["READER", "UniversalReader"]

_FOLDER = "zero/"
_OPTIMIZER_STATE = "optimizer_state.pt"
_STEP = "step"


class UniversalReader(TorchFilesReader):
    """A universal tag folder, or its parent with ``latest_universal``.

    Requests: ``read`` makes two per file of at most 64 KiB, three per larger one, and one for ``latest_universal``;
    ``resolve`` one per larger file and the local headers of the rows asked for.
    """

    name = "deepspeed-universal"

    def probe(self, source: Source) -> Probe:
        """By names alone."""
        entry = source.listing.entry
        if entry is not None:
            text = single_file_text(source) if entry == LATEST_UNIVERSAL else None
            return Probe(0.0, "a single file, not a folder") if text is None else Probe(0.95, f"{entry} is {text}")
        if _state_files(source.listing.sizes, ""):
            return Probe(0.95, "zero/<parameter>/fp32.pt")
        if LATEST_UNIVERSAL in source.listing:
            is_second = LATEST in source.listing
            return Probe(0.6 if is_second else 0.95, f"{LATEST_UNIVERSAL}" + (f", beside {LATEST}" * is_second))
        return Probe(0.0, "no zero/<parameter>/fp32.pt")

    def read(self, source: Source) -> Manifest:
        """See the class for its cost.

        Raises:
            NotFound: ``latest_universal`` names a folder that is not here, or the model states are missing.
            FormatError: a file holds no tensor, or shapes contradict each other.
        """
        located = _located(source)
        found = _opened(source, tag_files(source.listing.sizes, located.folder))
        weights = weights_of(found)
        placement = placement_of(found, weights)
        if placement.rules is None and found.tp_world_size > 1:  # shards that nothing joins: masters are whole
            weights.files.clear()
            placement.tp_world_size = 1
        states = _States(found, weights, placement)
        by_name = _state_files(source.listing.sizes, located.folder)
        wanted = [(name, state, path) for name, own in by_name.items() for state, path in own.items()]
        opened = open_torch_files(source, [path for _, _, path in wanted])
        for (name, state, _), file in zip(wanted, opened, strict=True):
            states.add(name, state, file, is_trained=states.is_trained(name, by_name[name]))
        extra = located.folder + _FOLDER + _OPTIMIZER_STATE
        if extra in source.listing:
            (file,) = open_torch_files(source, [extra])
            opened.append(file)
            states.add_values(file)
        built = build(found, placement, weights, whole_parts=states.parts, lent=states.lent)
        built.entries += states.entries
        built.assembly.blobs += states.blobs
        built.assembly.mesh = mesh_of(found)
        add_notes(found, built, weights, placement, (), has_states=True)
        if states.n_copies:
            built.assembly.notes.append(
                f"{counted(states.n_copies, 'file')} fp32.pt are copies of what the model states hold (frozen "
                "weights, second names, buffers), and left out"
            )
        if states.lent:
            built.assembly.notes.append(
                f"{counted(len(states.lent), 'weight', 'are')} stored as their fp32 masters only: module.* are these"
            )
        placement.copies.clear()  # of weights in the model states, which no loader of this form reads
        lost = _lost(found, by_name)
        info = facts_of(found, located, built, weights, placement, lost, stage=states.stage)
        files = [*found.opened, *opened]
        manifest = manifest_of(self.name, source.listing.url, files, built.entries, built.assembly, info)
        return manifest.replace(chunks=built.chunks.joined(manifest.tensors, manifest.chunks))

    def lacking(self, source: Source) -> tuple[str, ...]:
        """Files of states that parameters lack, and of parameters that the model states name.

        Cost: three requests for a model state of each model-parallel rank; one more where there is a tracker.
        """
        folder = _located(source).folder
        files = tag_files(source.listing.sizes, folder)
        firsts = {file.mp: file for file in reversed(files.models)}
        told = _opened(source, replace(files, models=tuple(firsts.values()), layers=(), experts=()))
        found = _lacking(_all_state_files(source.listing.sizes, folder))
        paths = [finding.where.path for finding in found if finding.where]
        paths += _lost(told, _state_files(source.listing.sizes, folder))
        return (missing_text(list(dict.fromkeys(paths))),) if paths else ()

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Absent weights, files of states that parameters lack, and what zips can have."""
        yield from checkpoint_findings(manifest)
        yield from _lacking(_all_state_files(source.listing.sizes, _located(source).folder))
        held = set(manifest.tensors.fqns)
        for name in manifest.info.get("buffers", ()):
            if weight_name(name)[0] not in held:
                said = f"{name!r}: the model states name this buffer, and none here has it: was a file of theirs lost?"
                yield Finding("absent-weight", Severity.ERROR, said, fqn=weight_name(name)[0])
        yield from archive_findings(source, manifest)


def _located(source: Source) -> Located:
    refuse_single_file(source)
    located = Located("", None) if _state_files(source.listing.sizes, "") else locate(source, LATEST_UNIVERSAL)
    if not _state_files(source.listing.sizes, located.folder):
        raise NotFound("no zero/<parameter>/fp32.pt", where=f"{source.listing.url.rstrip('/')}/{located.folder}")
    return located


def _opened(source: Source, files: TagFiles) -> Checkpoint:
    """The model states, and layers and experts beside them."""
    found = open_checkpoint(source, replace(files, optims=()))
    return replace(found, models=tuple(map(_without_packed, found.models)))


def _lost(found: Checkpoint, by_name: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Paths of the values of parameters that were trained by what the model states say, and that are not here."""
    groups = [group for model in found.models for group in model.groups or ()]
    return [
        f"{found.files.folder}{_FOLDER}{name}/{MASTER}.pt"
        for name, shape in {name: shape for group in groups for name, shape in group.items()}.items()
        if name not in by_name and 0 not in shape and not is_expert(name)  # whose numbers are a rank's own there
    ]


def _lacking(by_name: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Parameters that have a part of the files that more of the others have; a frozen weight has its values alone."""
    kinds = Counter(frozenset(own) for own in by_name.values())
    for name, own in by_name.items():
        held = frozenset(own)
        fuller = [kind for kind, count in kinds.items() if held < kind and count > kinds[held]]
        if held == {MASTER} or not fuller:
            continue
        folder = next(iter(own.values())).rpartition("/")[0]
        for state in sorted(max(fuller, key=lambda kind: kinds[kind]) - held):
            path = f"{folder}/{state}.pt"
            said = f"{path} is missing: most other parameters have this file beside what {name!r} has"
            yield Finding("missing-file", Severity.ERROR, said, where=FileRange(path, 0, 0))


def _state_files(paths: Mapping[str, int], folder: str) -> dict[str, dict[str, str]]:
    """By parameter and state: path of the file; of parameters that have their values."""
    return {name: own for name, own in _all_state_files(paths, folder).items() if MASTER in own}


def _all_state_files(paths: Mapping[str, int], folder: str) -> dict[str, dict[str, str]]:
    """By parameter and state: path of the file."""
    found: dict[str, dict[str, str]] = {}
    prefix = folder + _FOLDER
    for path in sorted(paths):
        name, _, file = path[len(prefix) :].rpartition("/") if path.startswith(prefix) else ("", "", "")
        if name and file.endswith(".pt"):
            found.setdefault(name, {})[file.removesuffix(".pt")] = path
    return found


def _without_packed(model: ModelState) -> ModelState:
    """Without one rank's experts, whose tensors hold those of all ranks here."""
    if not any(is_packed(name) for group in model.groups or () for name in group):
        return model
    groups = ({name: shape for name, shape in group.items() if not is_packed(name)} for group in model.groups or ())
    return replace(model, groups=tuple(groups))


@dataclass
class _States:
    """Entries of the states' files."""

    found: Checkpoint
    weights: Weights
    placement: Placement
    parts: list[Part] = field(default_factory=list)
    entries: list[Entries] = field(default_factory=list)
    blobs: list[Blob] = field(default_factory=list)
    lent: set[str] = field(default_factory=set)
    """Weights for which their masters stand."""
    n_copies: int = 0
    stage: int | None = None
    """Of the checkpoint that was converted, as far as it is told."""

    def __post_init__(self) -> None:
        self._stored = {name for held in self.weights.files for name, entry in held.items if entry.is_tensor}
        self._trained = {name for shapes in self.weights.trained.values() for name in shapes}
        self._second_names: dict[str, list[str]] = {}
        for alias, owner in self.weights.aliases.items():
            self._second_names.setdefault(owner, []).append(alias)

    def is_trained(self, name: str, own: Mapping[str, str]) -> bool:
        """Whether the optimizer has the parameter."""
        return name in self._trained or len(own) > 1

    def add(self, name: str, state: str, file: TorchFile, *, is_trained: bool) -> None:
        """One file.

        Raises:
            FormatError: it holds no tensor, or not as many elements as the parameter has.
        """
        root = file.root
        value: Any = root.get("param") if isinstance(root, Mapping) else root
        if not is_trained:
            if name in self._stored or not isinstance(value, TensorRef):
                self.n_copies += 1
                return
            self._add_part(file, [(weight_name(name), self._shaped(name, value, file))])
            self.lent.add(name)
            return
        if isinstance(value, (int, float)):
            fqn, path, _ = state_name(name, state)
            self.blobs.append(Blob(fqn, "value", None, value, path, None, is_loaded=True))
            return
        if not isinstance(value, TensorRef):
            raise FormatError(f"expected a tensor, got {type(value).__name__}", where=file.path)
        tensor = value if state == _STEP else self._shaped(name, value, file)
        named = [(state_name(name, state), tensor)]
        if state == MASTER and name not in self._stored:
            second = [alias for alias in self._second_names.get(name, ()) if alias not in self._stored]
            named += [(weight_name(label), tensor) for label in (name, *second)]
            self.lent |= {name, *second}
        self._add_part(file, named)

    def _add_part(self, file: TorchFile, named: Sequence[tuple[tuple[str, Any, str], TensorRef]]) -> None:
        entries = [Entry(fqn, path, tensor) for (fqn, path, _), tensor in named]
        self.parts.append(Part(file.path, None, entries, file.storages, file.big_endian))

    def _shaped(self, name: str, tensor: TensorRef, file: TorchFile) -> TensorRef:
        """A flat tensor in the shape of its parameter, as far as that is known."""
        known = next((shapes[name] for shapes in self.weights.shapes.values() if name in shapes), None)
        if known is None or len(tensor.shape) != 1 or len(known) == 1 or not tensor.is_contiguous:
            return tensor
        if self.found.tp_world_size > 1 and self.placement.rules is None:
            return tensor
        if self.found.tp_world_size > 1:
            whole = [target.shape for mp in self.weights.shapes for target in self._targets(mp, name)]
            known = whole[0] if whole else known
        if prod(known) != tensor.numel:
            raise FormatError(f"has {counted(tensor.numel, 'element')}, {name!r} is {list(known)}", where=file.path)
        return replace(tensor, shape=tuple(known), strides=contiguous_strides(known))

    def _targets(self, mp: int, name: str) -> Sequence[Any]:
        return self.placement.targets(mp, name) if name in self.weights.shapes[mp] else ()

    def add_values(self, file: TorchFile) -> None:
        """``optimizer_state.pt``: its values and groups; what tensors it has are one rank's part, and of no use."""
        fields = mapping(file.root, "the saved object", file.path)
        self.stage = number_of(fields.get("zero_stage"))
        groups = [group for group in fields.get("param_groups") or () if isinstance(group, Mapping)]
        entries = entries_of(optimizer_values(self.found, self.placement, fields, groups), prefix=("optimizer",))
        self.parts.append(Part(file.path, None, entries.items, file.storages, file.big_endian))
        self.entries.append(entries)


READER = UniversalReader()
