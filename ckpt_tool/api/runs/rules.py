"""A rule says whether the files of one step are all there, from their names and sizes and a few small reads.

What the formats' own metadata says is believed before any rule about names. Payload is not looked at: that is what
``verify`` is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckpt_tool.api.runs.endings import INDEX, PAYLOAD, cut_files
from ckpt_tool.api.runs.names import TRACKERS, StepFiles
from ckpt_tool.api.runs.parts import folder_source, parts_of
from ckpt_tool.checks.extents import extent_findings, measure
from ckpt_tool.checks.other_names import with_other_names
from ckpt_tool.checks.stand_ins import with_stand_ins
from ckpt_tool.errors import CkptError, FormatError, StorageError
from ckpt_tool.formats._hf_index import parse_index
from ckpt_tool.formats._missing import LackingReader
from ckpt_tool.formats.base import MetadataChecker, Reader, Source
from ckpt_tool.geometry.absent import absent_places
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.numerals import numeral
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, format_bytes, some_of
from ckpt_tool.storage.altered_names import is_unfinished, under_other_names
from ckpt_tool.storage.store import Listing, Store
from ckpt_tool.storage.unfinished import MARKER_NAME

__all__ = ["Judgement", "families", "judge", "tracker_text"]

_MAX_METADATA_NBYTES = 64 << 20
_MAX_TRACKER_NBYTES = 1024
_EXAMPLES = 3
# Readers whose manifest comes from metadata files alone, whatever the number of ranks.
_READ_FROM_METADATA = frozenset(
    {"accelerate", "bytecheckpoint", "dcp", "megatron-dist", "megatron-zarr", "orbax", "torchsnapshot"}
)

# Files that each rank of a grid writes; the numbers count from 0 (shards of transformers from 1), and all combinations
# are there. Layers and experts of DeepSpeed are numbered with gaps.
_N, _N2, _N3 = (f"({numeral(width, most=12)})" for width in (1, 2, 3))
_GRIDS = (
    re.compile(rf"(?:bf16_|fp16_)?zero_pp_rank_{_N}_mp_rank_{_N2}_?optim_states\.pt"),
    re.compile(rf"zero_pp_rank_{_N}_mp_rank_{_N2}_model_states\.pt"),
    re.compile(rf"mp_rank_{_N2}_model_states\.pt"),
    re.compile(rf"(?:.*/)?mp_rank_{_N2}(?:_{_N3})?(?:_{_N3})?/model_optim_rng\.pt"),
    re.compile(rf"(?:.*/)?mp_rank_{_N2}(?:_{_N3})?(?:_{_N3})?/distrib_optim\.pt"),
    re.compile(rf"(?:.*/)?__{_N}\.metadata"),
)
_OF_WORLD = re.compile(rf"(.*?)_world_size_{_N}_rank_{_N}\.pt")
_OF_SHARDS = re.compile(r"(.*?)-(\d+)-of-(\d+)(?:\.\w+)?\.(safetensors|bin)")
_RANKS = re.compile(r"(?:.*[/_])?(?:rank)?_(\d+)(?:_\d+)?\.(?:distcp|safetensors)")


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was found of one step."""

    parts: tuple[tuple[str, str], ...]
    """(folder or file below the step, format) of each checkpoint in it; empty for the step itself."""
    problems: tuple[str, ...]
    """Why it is not complete; empty when nothing is missing."""
    layout: str | None
    """World size or mesh, as far as names or metadata tell."""
    is_committed: bool
    """The format itself says that the save ended: a metadata file that is written last, or a folder that is renamed."""


def judge(step: StepFiles, store: Store, url: str) -> Judgement:
    """What the files of a step are, and what is missing.

    Cost: the first bytes of a few files, and metadata files: a request or two for most formats.

    Args:
        step: the files.
        store: of the run.
        url: of the run.
    """
    sources = parts_of(step, store, url)
    problems: list[str] = []
    if step.name.is_temporary:
        problems.append("a temporary name: its save is under way, or was killed")
    if step.is_marked:
        problems.append(f"{step.path}-unfinished lies beside it")
    if not step.sizes:
        problems.append("an empty folder")
    problems += _by_names(step)
    is_told_by_names = bool(problems)
    parts: list[tuple[str, str]] = []
    layouts: list[str] = []
    is_committed = False
    for folder, source, reader in sources:
        parts.append((folder, reader.name))
        read = _by_metadata(source, reader)
        found = (*read.problems, *(() if is_told_by_names else _lacking(source, reader)))
        problems += [f"{folder}/{text}" if folder and folder not in step.sizes else text for text in found]
        is_committed = is_committed or read.manifest is not None
        layout = _layout(source.listing, read.manifest)
        layouts += [layout] if layout and layout not in layouts else []
    if not parts and _is_orbax(step):
        parts, is_committed = [("", "orbax")], True
    elif step.sizes:
        known = {step.path.rpartition("/")[2]} if step.is_file else {part for part, _ in parts}
        if "" not in known:
            others = {path: n for path, n in step.sizes.items() if path.partition("/")[0] not in known}
            problems += cut_files(folder_source(others, store, step.parent if step.is_file else step.path, url))
        parts = parts or ([("", name)] if (name := _format_by_names(step)) is not None else [])
        if not parts and not problems:
            problems.append("no checkpoint that is known")
    return Judgement(tuple(parts), tuple(dict.fromkeys(problems)), ", ".join(layouts) or None, is_committed)


def families(step: StepFiles) -> set[str]:
    """Kinds of files by their names with numbers taken out: what steps of one run have in common.

    >>> from ckpt_tool.api.runs.names import StepName
    >>> sorted(families(StepFiles("s", StepName(1, False), False, {"a_0.pt": 1, "a_1.pt": 1, "b": 1})))
    ['a_#.pt', 'b']
    """
    return {re.sub(r"\d+", "#", path) for path in step.sizes}


def tracker_text(store: Store, path: str, nbytes: int) -> str | None:
    """What a tracker file names, None where it holds something else: one small request."""
    if not 0 < nbytes <= _MAX_TRACKER_NBYTES:
        return None
    text = store.read(path, 0, nbytes).decode("utf-8", "replace").strip()
    return text if text and text.isprintable() and "\ufffd" not in text else None


@dataclass(frozen=True, slots=True)
class _Read:
    problems: tuple[str, ...]
    manifest: Manifest | None
    """None where there is no metadata, or it was not read."""


def _by_metadata(source: Source, reader: Reader) -> _Read:
    """What the checkpoint's own metadata says that its files should be."""
    listing = source.listing
    if reader.name in _READ_FROM_METADATA:
        metadata = [path for path in listing.sizes if path.rpartition("/")[2] in {".metadata", "metadata.json"}]
        if sum(listing.sizes[path] for path in metadata) > _MAX_METADATA_NBYTES:
            return _Read((), None)
        try:
            manifest = reader.read(source)
        except StorageError:
            raise
        except CkptError as error:
            return _Read((f"its metadata cannot be read: {error}",), None)
        missing = with_stand_ins(extent_findings(manifest, listing, measure(manifest, listing)), source)
        missing = with_other_names(missing, manifest, listing)
        lacking = reader.check_metadata(source, manifest) if isinstance(reader, MetadataChecker) else ()
        errors = [*missing, *(finding for finding in lacking if finding.severity is Severity.ERROR)]
        return _Read((*(finding.message for finding in errors), *cut_files(source)), manifest)
    problems = [text for path in listing.paths if INDEX.fullmatch(path) for text in _by_index(source, path)]
    problems += cut_files(source)
    tracker = next((path for path in TRACKERS if path in listing.sizes), None)
    if tracker is not None:
        tag = tracker_text(source.store, tracker, listing.sizes[tracker])
        if tag is not None and not any(path.startswith(f"{tag}/") for path in listing.sizes):
            problems.append(f"{tracker} names {tag}, which is not here")
    return _Read(tuple(problems), None)


def _lacking(source: Source, reader: Reader) -> tuple[str, ...]:
    """What a few of the files of ranks tell of the others."""
    if not isinstance(reader, LackingReader):
        return ()
    try:
        return reader.lacking(source)
    except StorageError:
        raise
    except CkptError as error:
        return (f"it cannot be read: {error}",)


def _by_index(source: Source, path: str) -> Iterator[str]:
    """Files that an index of shards names and that are not there, or cannot hold its bytes."""
    listing = source.listing
    if listing.sizes[path] > _MAX_METADATA_NBYTES:
        return
    try:
        index = parse_index(source.read_whole(path), path)
    except FormatError:
        index = None
    if index is None or any(fault.kind == "index-bad-value" for fault in index.faults):
        yield f"{path} is no index of shards"
        return
    names, total = set(index.files), index.total_size
    missing = sorted(name for name in names if name not in listing.sizes)
    if missing:
        others = under_other_names(missing, listing.sizes, names)
        said = f"{path} names {len(missing):,} of {counted(len(names), 'file')} that are missing: {some_of(missing)}"
        yield f"{said}; {next(iter(others.values())).said}" if others else said
    elif isinstance(total, int) and (held := sum(listing.sizes[name] for name in names)) < total:
        yield f"the shards of {path} have {format_bytes(held)} together, expected at least {format_bytes(total)}"


def _by_names(step: StepFiles) -> Iterator[str]:
    """What names and sizes alone say."""
    unfinished = [path for path in step.sizes if is_unfinished(path) or path.rpartition("/")[2] == MARKER_NAME]
    if unfinished:
        yield f"{counted(len(unfinished), 'unfinished file')}: {some_of(unfinished)}"
    empty = [path for path, nbytes in step.sizes.items() if nbytes == 0 and PAYLOAD.search(path)]
    if empty:
        yield f"{counted(len(empty), 'empty file')}: {some_of(empty)}"
    yield from _without_metadata(step)
    yield from _grids(step)


def _without_metadata(step: StepFiles) -> Iterator[str]:
    """Folders of a DCP checkpoint that lack the file which is written last."""
    folders = {path.rpartition("/")[0] for path in step.sizes if path.endswith(".distcp")}
    for folder in sorted(folders):
        name = f"{folder}/.metadata" if folder else ".metadata"
        ranks = [path for path in step.sizes if path.rpartition("/")[0] == folder and path.endswith(".metadata")]
        outer = folder.rpartition("/")[0]
        if not ranks and f"{outer}/.metadata".lstrip("/") not in step.sizes:
            yield f"no {name}: its save did not end"
        elif step.sizes.get(name) == 0:
            yield f"{name} is empty"


def _grids(step: StepFiles) -> Iterator[str]:
    """Files of ranks or shards whose numbers leave gaps."""
    for pattern in _GRIDS:
        numbers: set[tuple[int, ...]] = set()
        sample: tuple[str, re.Match[str]] | None = None
        for path in step.sizes:
            match = pattern.fullmatch(path.rpartition("/")[2]) or pattern.fullmatch(path)
            if match is not None:
                numbers.add(tuple(int(n) for n in match.groups() if n is not None))
                sample = sample or (path, match)
        if sample is None or len({len(each) for each in numbers}) != 1:
            continue
        sizes = [max(column) + 1 for column in zip(*numbers, strict=True)]
        missing = absent_places(numbers, sizes, at_most=_EXAMPLES)
        if missing.n:
            files = f"{counted(missing.n + len(numbers), 'file')} {_pattern_of(sample[1])}"
            yield f"{missing.n:,} of {files} are missing: {some_of(missing.first, n=missing.n)}"
    has_index = any(INDEX.fullmatch(path) for path in step.sizes)  # which names what is missing
    for pattern in (_OF_WORLD, _OF_SHARDS):
        if has_index and pattern is _OF_SHARDS:
            continue
        sample = None
        found: dict[tuple[str, ...], set[int]] = {}
        for path in step.sizes:
            match = pattern.fullmatch(path)
            if match is not None:
                total, number = (match[2], match[3]) if pattern is _OF_WORLD else (match[3], match[2])
                found.setdefault((match[1], total), set()).add(int(number))
                sample = path, match
        for (_, total), have in found.items():
            first = int(pattern is _OF_SHARDS and (0 not in have or int(total) in have))
            lost = absent_places([(number - first,) for number in have], (int(total),), at_most=_EXAMPLES)
            if lost.n and sample is not None:
                example = _pattern_of(sample[1], 3 if pattern is _OF_WORLD else 2)
                shown = some_of([number + first for (number,) in lost.first], n=lost.n)
                yield f"{lost.n:,} of {counted(int(total), 'file')} {example} are missing: {shown}"


def _pattern_of(match: re.Match[str], *groups: int) -> str:
    r"""The name that matched, a sign in place of its numbers: all of them, or those of these groups.

    >>> _pattern_of(re.fullmatch(r"bf16_rank_(\d+)\.pt", "bf16_rank_3.pt"))
    'bf16_rank_#.pt'
    """
    text = match.string
    for group in reversed(groups or range(1, match.re.groups + 1)):
        if match[group] is not None:
            text = f"{text[: match.start(group)]}#{text[match.end(group) :]}"
    return text


def _is_orbax(step: StepFiles) -> bool:
    marks = {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "commit_success.txt"}
    return any(path.rpartition("/")[2] in marks for path in step.sizes)


def _format_by_names(step: StepFiles) -> str | None:
    """What an incomplete step was to become."""
    endings = ((".distcp", "dcp"), ("optim_states.pt", "deepspeed"), ("model_optim_rng.pt", "megatron-legacy"))
    for ending, name in (*endings, (".safetensors", "safetensors"), (".bin", "hf-bin"), (".ckpt", "torch-save")):
        if any(path.endswith(ending) for path in step.sizes):
            return name
    return "torch-save" if any(path.endswith((".pt", ".pth")) for path in step.sizes) else None


def _layout(listing: Listing, manifest: Manifest | None) -> str | None:
    """The mesh, or the number of ranks or shards that names tell."""
    if manifest is not None and manifest.mesh is not None:
        return " ".join(f"{a}={n}" for a, n in zip(manifest.mesh.axes, manifest.mesh.sizes, strict=True))
    ranks, grid = 0, set[tuple[str | None, ...]]()
    for path in listing.paths:
        name = path.rpartition("/")[2]
        numbered, world = _RANKS.fullmatch(path), _OF_WORLD.fullmatch(path)
        cell = _GRIDS[0].fullmatch(name) or _GRIDS[3].fullmatch(path)
        ranks = max(ranks, int(numbered[1]) + 1 if numbered else int(world[2]) if world else 0)
        if cell is not None:
            grid.add(cell.groups())
    n = ranks or len(grid)
    return counted(n, "rank") if n else None
