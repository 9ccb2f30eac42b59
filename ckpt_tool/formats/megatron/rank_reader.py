"""The reader of Megatron's legacy checkpoints: files of weights and of optimizer state per model-parallel rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._disagreeing import DISAGREEING, differing, disagreement_findings
from ckpt_tool.formats._replicas import COPIES, MAX_COPY_NBYTES, replica_findings
from ckpt_tool.formats._torch_file.archive import TorchFile, open_torch_files
from ckpt_tool.formats._torch_file.assemble import Assembly, Part, assemble
from ckpt_tool.formats._torch_file.entries import entries_of
from ckpt_tool.formats._torch_file.findings import archive_findings
from ckpt_tool.formats._torch_file.reading import TorchFilesReader
from ckpt_tool.formats._torch_file.rows import Rows
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.megatron.common_state import Common, common_of, iteration_findings
from ckpt_tool.formats.megatron.facts import Facts, facts_of
from ckpt_tool.formats.megatron.joined import joined, with_folder
from ckpt_tool.formats.megatron.keys import weight_name
from ckpt_tool.formats.megatron.location import Location, locate, within
from ckpt_tool.formats.megatron.nemo import CONFIG, facts_of_config
from ckpt_tool.formats.megatron.parallel import OWN_RULES, ParallelRules, built_in_rules
from ckpt_tool.formats.megatron.parameter_groups import own_groups
from ckpt_tool.formats.megatron.rank_files import (
    MODEL_FILE,
    NEMO_FILE,
    OPTIMIZER_FILE,
    Grid,
    check_ranks,
    grid_of,
    rank_folders,
)
from ckpt_tool.formats.megatron.rank_model import Coord, RankModel, model_chunks
from ckpt_tool.formats.megatron.rank_optimizer import (
    WITHOUT_OPTIMIZER,
    RankOptimizer,
    add_member,
    lacks_state,
    read_optimizer,
)
from ckpt_tool.formats.megatron.rank_whole_state import has_whole_state, without_whole_state
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import ChunkTable, TensorTable
from ckpt_tool.sizes import counted
from ckpt_tool.storage.local.above import folders_above
from ckpt_tool.storage.virtual.subfolder import places_below

__all__ = ["READER", "MegatronLegacyReader"]

_MAX_CONFIG_NBYTES = 1 << 20


class MegatronLegacyReader(TorchFilesReader):
    """``mp_rank_XX[_YYY[_ZZZ]]/model_optim_rng.pt`` with ``distrib_optim.pt``; the run's folder or an iteration's.

    Of NeMo 1, ``model_weights.ckpt`` of each rank, in a ``.nemo`` archive or unpacked.
    """

    name = "megatron-legacy"

    def probe(self, source: Source) -> Probe:
        """By file names; one request for a tracker. One rank's file is known too, and refused by `read`."""
        if _rank_alone(source) is not None:
            return Probe(0.95, "one of several ranks' files, by the name of its folder")
        try:
            location = locate(source, _is_complete, _is_ours)
        except (FormatError, NotFound) as error:
            return Probe(0.95, str(error))
        if location is None:
            return Probe(0.0, f"no mp_rank_*/{MODEL_FILE}, here or in an iteration's folder")
        folders = rank_folders(within(source, location.folder).listing.sizes)
        kind = folders[0].name.partition("_")[0]
        return Probe(0.95, f"{counted(len(folders), 'folder')} {kind}_rank_* with {folders[0].file}")

    def read(self, source: Source) -> Manifest:
        """The manifest; payload offsets are reckoned, and unresolved.

        Requests: the tracker where there is one, own rules likewise, and three for each file.

        Raises:
            NotFound: rank folders are missing, or the tracker's iteration; or one rank's file was named.
            FormatError: files contradict each other or the run's arguments.
            LayoutError: a weight is cut over ranks, and no rule says how; or a fact is missing.
        """
        alone = _rank_alone(source)
        if alone is not None:
            raise alone
        location = locate(source, _is_complete, _is_ours)
        if location is None:
            raise NotFound(f"no mp_rank_*/{MODEL_FILE}", where=source.listing.url)
        with places_below(location.folder):
            return self._read(source, location)

    def _read(self, source: Source, location: Location) -> Manifest:
        inner = within(source, location.folder)
        folders = rank_folders(inner.listing.sizes)
        opened = open_torch_files(inner, [folder.path for folder in folders])
        by_folder = {folder.name: file for folder, file in zip(folders, opened, strict=True)}
        first = _common(opened[0])
        facts = _nemo_facts(inner) if folders[0].is_nemo else first.facts
        held = {name: model_chunks(file.root, file.path) for name, file in by_folder.items()}
        grid = grid_of(folders, facts, {name: frozenset().union(*chunks) for name, chunks in held.items()})
        files = {coord: by_folder[name] for coord, name in grid.folders.items()}
        chunks = {coord: held[name] for coord, name in grid.folders.items()}
        check_ranks(grid, {coord: facts_of(file.root.get("args")) for coord, file in files.items()})
        common = _common(files[0, 0, 0])
        model = RankModel.of(chunks, grid, facts, _rules(source, location), source.listing.url)
        if facts.pp is None and grid.pp > 1 and not folders[0].is_nemo:
            model.notes.append(
                "no args of the run: second numbers of rank folders are taken for stages, as the first one has the "
                "embedding and the last one the last norm"
            )
        if facts.tp is None and not folders[0].is_nemo:
            model.notes.append(
                f"no args of the run: {counted(grid.tp, 'tensor-parallel rank', 'are')} here, taken for all there were"
            )
        rows = Rows()
        for (coord, _), members in model.members.items():
            for member in members:
                name = weight_name(member.key)
                add_member(rows, member, name, member.tensor, files[coord], grid.number(coord))
        optimizer = read_optimizer(inner, grid, facts, model, files)
        return _manifest(self.name, source, location, common, facts, model, rows, optimizer, files, grid)

    def lacking(self, source: Source) -> tuple[str, ...]:
        """What the file of the first rank tells: three requests, and one for NeMo's settings."""
        location = locate(source, _is_complete, _is_ours)
        if location is None:
            return ()
        inner = within(source, location.folder)
        folders = rank_folders(inner.listing.sizes)
        with places_below(location.folder):
            first = open_torch_files(inner, [folders[0].path])[0]
        facts = _nemo_facts(inner) if folders[0].is_nemo else _common(first).facts
        said = [WITHOUT_OPTIMIZER] if lacks_state(inner, facts, [first]) else []
        if facts.pp is not None:  # else only the names of tensors of all ranks tell
            try:
                grid_of(folders, facts, {})
            except NotFound as error:
                said.append(error.message)
        return tuple(said)

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Copies of the same box that differ; optimizer state that is gone, or could not be placed."""
        yield from iteration_findings(manifest)
        if manifest.info.get("optimizer_lost"):
            yield Finding("optimizer-lost", Severity.WARNING, WITHOUT_OPTIMIZER)
        undecoded = manifest.info.get("optimizer_undecoded")
        if undecoded:
            yield Finding("optimizer-undecoded", Severity.WARNING, f"optimizer state is left out of place: {undecoded}")
        everything = np.arange(len(manifest.chunks), dtype=np.int64)
        yield from replica_findings(source, manifest, self.resolve(source, manifest, everything))
        yield from archive_findings(source, manifest)


READER = MegatronLegacyReader()


def _is_ours(path: str) -> bool:
    return "mp_rank_" in path or "tp_rank_" in path


def _rank_alone(source: Source) -> NotFound | None:
    """The error for one of several ranks' folders or a file in it; None where something else was named."""
    url, entry = source.listing.url.rstrip("/"), source.listing.entry
    files = (MODEL_FILE, NEMO_FILE, OPTIMIZER_FILE)
    is_rank = entry in files if entry is not None else any(name in source.listing for name in files)
    if not is_rank or not _is_ours(url.rpartition("/")[2]):
        return None
    for store, inner in folders_above(url):
        folders = rank_folders(store.listing().sizes)
        if len(folders) < 2 or all(folder.name != inner.rstrip("/") for folder in folders):
            return None
        return NotFound(
            f"one {'folder' if entry is None else 'file'} of a Megatron checkpoint, not the whole: that of one of "
            f"{counted(len(folders), 'model-parallel rank')}",
            where=url if entry is None else f"{url}/{entry}",
            hint=f'give the folder that holds all of them: "{store.url}"',
        )
    return None


def _nemo_facts(source: Source) -> Facts:
    """What NeMo's settings beside the folders say; one request where there are any."""
    if CONFIG not in source.listing or source.listing.nbytes(CONFIG) > _MAX_CONFIG_NBYTES:
        return Facts()
    return facts_of_config(source.read_whole(CONFIG).decode("utf-8", "replace"))


def _is_complete(names: Iterable[str]) -> bool:
    """Whether an iteration's folder has rank folders."""
    return bool(rank_folders(names))


def _common(file: TorchFile) -> Common:
    """What a rank's file holds besides weights and random states."""
    root = file.root if isinstance(file.root, Mapping) else {}
    own = [key for key in root if isinstance(key, str) and (key.startswith("model") or key == "rng_state")]
    if not has_whole_state(root.get("optimizer")):
        return common_of(file, file.path, own)
    pruned = {**root, "optimizer": without_whole_state(root["optimizer"])}
    return common_of(replace(file, root=pruned), file.path, own)


def _rules(source: Source, location: Location) -> ParallelRules:
    """The built-in rules behind those that lie beside the checkpoint."""
    rules = built_in_rules()
    for path in dict.fromkeys((f"{location.folder}/{OWN_RULES}".lstrip("/"), OWN_RULES)):
        if path in source.listing:
            rules = rules.with_own(source.read_whole(path).decode("utf-8", "replace"), path)
    return rules


def _random_states(files: Mapping[Coord, TorchFile], grid: Grid) -> Assembly:
    """Random states of every rank, apart by rank."""
    parts = []
    for coord, file in files.items():
        state = file.root.get("rng_state")
        items = entries_of(state, prefix=("rng_state",)).items if state is not None else []
        parts.append(Part(file.path, grid.number(coord), items, file.storages, file.big_endian, is_per_rank=True))
    return assemble(parts, section_of)


def _manifest(  # noqa: PLR0913, PLR0917 - all that was found
    name: str,
    source: Source,
    location: Location,
    common: Common,
    facts: Facts,
    model: RankModel,
    rows: Rows,
    optimizer: RankOptimizer,
    files: Mapping[Coord, TorchFile],
    grid: Grid,
) -> Manifest:
    random_states = _random_states(files, grid)
    tables = rows.tables()
    for more in (optimizer.rows, common.assembly.rows, random_states.rows):
        tables = joined(tables, more.tables())
    extra = [
        Blob(fqn, "value", None, value, ("model", fqn.removeprefix("model.")), None, is_loaded=True)
        for fqn, value in model.extra_states
    ]
    mixed = differing(_values_of_ranks(files, grid))
    known = {
        "step": common.iteration,
        "world_size": facts.world_size,
        "folder": location.folder or None,
        "optimizer_form": optimizer.form,
        "optimizer_undecoded": optimizer.undecoded,
        "optimizer_lost": optimizer.is_lost or None,
        "missing_files": [f"{location.folder}/{path}".lstrip("/") for path in optimizer.missing] or None,
        "layer_stages": model.stages,
        "layer_chunks": model.chunk_layers if max(map(len, model.chunk_layers), default=1) > 1 else None,
        "args": facts.described() or None,
        "int_keyed_dicts": list(common.int_keyed) or None,
        "n_rank_folders": len(grid.folders),
        COPIES: _small_copies(tables[0], tables[1]) or None,
        DISAGREEING: mixed or None,
    }
    return Manifest(
        format=name,
        root=source.listing.url,
        tensors=tables[0],
        chunks=tables[1],
        files=with_folder(tables[2], location.folder),
        blobs=(*extra, *common.assembly.blobs, *random_states.blobs),
        mesh=facts.mesh() if common.root.get("args") is not None else facts.mesh(f"{CONFIG} of NeMo"),
        info={key: value for key, value in known.items() if value is not None},
        notes=(
            *_notes(location, model, optimizer),
            *common.notes(source.listing.url, location.folder),
            *(one.message for one in disagreement_findings(mixed)),
        ),
    )


def _values_of_ranks(files: Mapping[Coord, TorchFile], grid: Grid) -> Iterator[tuple[str, int, Any]]:
    """``(name, rank, value)`` of what all ranks' files say alike where they are of one save."""
    for coord, file in files.items():
        rank, root = grid.number(coord), file.root if isinstance(file.root, Mapping) else {}
        yield "iteration", rank, root.get("iteration")
        yield from ((f"args.{name}", rank, value) for name, value in facts_of(root.get("args")).described().items())
        schedule = root.get("opt_param_scheduler")
        for name, value in schedule.items() if isinstance(schedule, Mapping) else ():
            yield f"opt_param_scheduler.{name}", rank, value
        optimizer = root.get("optimizer")
        for number, part in enumerate(optimizer if isinstance(optimizer, list) else [optimizer]):
            steps = {group["step"] for group in own_groups(part) if type(group.get("step")) in (int, float)}
            if len(steps) == 1:
                yield f"optimizer.{number}.step", rank, steps.pop()


def _small_copies(tensors: TensorTable, chunks: ChunkTable) -> list[str]:
    """Tensors of which ranks hold copies so small that a conversion compares them: norms and the biases of rows."""
    first = exact_duplicates(chunks.offsets, chunks.sizes, chunks.tensor.astype(np.int64))
    is_copy = (first != np.arange(len(first))) & (chunks.length <= MAX_COPY_NBYTES)
    return [tensors.fqns[row] for row in distinct(chunks.tensor[is_copy].astype(np.int64))]


def _notes(location: Location, model: RankModel, optimizer: RankOptimizer) -> Iterator[str]:
    """What a person should know."""
    yield from location.notes
    yield from model.notes
    if optimizer.undecoded is not None:
        yield f"optimizer state keeps the form of the files, each rank's apart: {optimizer.undecoded}"
