"""Rank files are one folder per model-parallel rank: ``mp_rank_01_000_002/model_optim_rng.pt``.

The first number is the tensor-parallel rank. A second one is the pipeline stage, a third one the expert-parallel rank;
but the stage is left out where there is one only, so that a lone second number can be either: then the run's
arguments tell, or without them where the ends of the model are. Data-parallel ranks leave no trace. Source: Megatron-LM
``training/checkpointing.py``, ``get_checkpoint_name``.

NeMo 1 has ``mp_rank_01/model_weights.ckpt``, and with pipeline stages ``tp_rank_01_pp_rank_002/model_weights.ckpt``:
the weights alone. Source: NeMo 1 ``nlp_overrides.py``, ``NLPSaveRestoreConnector``.

Where experts are cut over fewer tensor-parallel ranks than the rest, not every pair of an expert-parallel and a
tensor-parallel rank exists, see `rank_pairs`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import gcd, lcm

from ckpt_tool.errors import FormatError, LayoutError, NotFound, Unsupported
from ckpt_tool.formats.megatron.facts import Facts
from ckpt_tool.geometry.absent import MAX_LISTED
from ckpt_tool.numerals import numeral
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted_of

__all__ = [
    "MODEL_FILE",
    "NEMO_FILE",
    "OPTIMIZER_FILE",
    "Grid",
    "RankFolder",
    "check_ranks",
    "grid_of",
    "rank_folder",
    "rank_folders",
    "rank_pairs",
]

MODEL_FILE = "model_optim_rng.pt"
NEMO_FILE = "model_weights.ckpt"
OPTIMIZER_FILE = "distrib_optim.pt"
_FOLDER = re.compile(rf"mp_rank_({numeral(2)})(?:_({numeral(3)}))?(?:_({numeral(3)}))?")
_FIRST_MODULES = ("embedding.word_embeddings.",)
_LAST_MODULES = ("decoder.final_",)  # final_layernorm, or final_norm of hybrid models
_NEMO_FOLDER = re.compile(rf"mp_rank_({numeral(2)})|tp_rank_({numeral(2)})_pp_rank_({numeral(3)})")


@dataclass(frozen=True, slots=True)
class RankFolder:
    """One rank's folder, as its name tells."""

    name: str
    numbers: tuple[int, ...]
    file: str = MODEL_FILE
    """What is in it."""

    @property
    def is_nemo(self) -> bool:
        """Whether NeMo 1 wrote it: a second number is a stage then."""
        return self.file == NEMO_FILE

    @property
    def path(self) -> str:
        """The file's path."""
        return f"{self.name}/{self.file}"


@dataclass(frozen=True)
class Grid:
    """Which folder belongs to which model-parallel rank."""

    tp: int
    pp: int
    ep: int
    folders: dict[tuple[int, int, int], str]
    """By stage, expert-parallel rank and tensor-parallel rank."""
    etp: int
    """Tensor-parallel ranks of experts."""

    def writes_state(self, coord: tuple[int, int, int]) -> bool:
        """Whether the rank gathers an optimizer's state, dense parameters' or experts'."""
        rank = _rank_of_pair(coord[1], coord[2], self.tp, self.ep, self.etp)
        return rank is not None and rank < max(self.tp, self.ep * self.etp)

    def number(self, coord: tuple[int, int, int]) -> int:
        """The rank's number, tensor-parallel ranks adjoining."""
        stage, expert, tensor = coord
        return (stage * self.ep + expert) * self.tp + tensor


def rank_folders(paths: Iterable[str]) -> list[RankFolder]:
    """Folders that hold a model file, by name.

    >>> [f.numbers for f in rank_folders(["mp_rank_01_000/model_optim_rng.pt", "x.pt"])]
    [(1, 0)]
    >>> [f.numbers for f in rank_folders(["tp_rank_01_pp_rank_002/model_weights.ckpt"])]
    [(1, 2)]
    """
    found = []
    for path in sorted(paths):
        folder, _, name = path.rpartition("/")
        pattern = {MODEL_FILE: _FOLDER, NEMO_FILE: _NEMO_FOLDER}.get(name)
        match = None if pattern is None else pattern.fullmatch(folder)
        if match is not None:
            numbers = tuple(int(number) for number in match.groups() if number is not None)
            found.append(RankFolder(folder, numbers, name))
    return found


def rank_folder(tensor_rank: int, stage: int, expert_rank: int, *, pp: int, ep: int) -> str:
    """The name of a rank's folder in a run of ``pp`` stages and ``ep`` expert-parallel ranks.

    >>> rank_folder(1, 0, 3, pp=1, ep=4), rank_folder(1, 2, 0, pp=4, ep=1)
    ('mp_rank_01_003', 'mp_rank_01_002')
    """
    name = f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
    return name + (f"_{expert_rank:03d}" if ep > 1 else "")


def rank_pairs(tp: int, ep: int, etp: int) -> list[tuple[int, int]]:
    """Expert-parallel and tensor-parallel rank of each folder of a stage, in the order of the ranks that write them.

    A rank's number within its stage gives both: tensor-parallel ranks of the rest adjoin, and so do those of experts.
    The first ``tp`` of them have the dense parameters' optimizer, the first ``etp * ep`` the experts'.

    >>> rank_pairs(2, 2, 2), rank_pairs(2, 4, 1)
    ([(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 0), (1, 1), (2, 0), (3, 1)])

    Raises:
        Unsupported: several ranks of experts would have one folder.
    """
    _check_experts(tp, etp)
    return [(rank // etp % ep, rank % tp) for rank in range(lcm(tp, etp * ep))]


def _check_experts(tp: int, etp: int) -> None:
    """Raise Unsupported where several ranks of experts would have one folder."""
    if etp < 1 or tp % etp:
        raise Unsupported(
            f"experts of {etp} tensor-parallel ranks, the rest of {tp}: in per-rank files several of these ranks would "
            "have the same folder, and the parts of experts of all but one would be lost",
            hint=f"--to megatron-dist has no such limit; --etp {tp} fits",
        )


def _rank_of_pair(expert: int, tensor: int, tp: int, ep: int, etp: int) -> int | None:
    """The first rank of a stage that is both, None when none is; no list is made, as sizes come from files.

    >>> [_rank_of_pair(e, t, 2, 4, 1) for e, t in ((0, 0), (1, 1), (2, 0), (2, 1))]
    [0, 1, 2, None]
    """
    # rank = tensor + tp * k with (rank // etp) % ep == expert, and etp divides tp.
    step, missing = tp // etp, expert - tensor // etp
    common = gcd(step, ep)
    if missing % common or not (0 <= expert < ep and 0 <= tensor < tp):
        return None
    return tensor + tp * (missing // common * pow(step // common, -1, ep // common) % (ep // common))


def grid_of(folders: Sequence[RankFolder], facts: Facts, modules: Mapping[str, frozenset[str]]) -> Grid:
    """The ranks of ``folders``, all of them there.

    Args:
        folders: where the files are.
        facts: arguments of the run.
        modules: by folder, what its tensors are called; what a second number is, is told by it where no argument does.

    Raises:
        FormatError: folders of different depth are mixed, or most parts of experts were overwritten on saving.
        LayoutError: a second number can be a stage or an expert-parallel rank, and nothing tells which.
        NotFound: folders are missing, by the run's arguments or because numbers are left out; it has the files of the
            first thousand.
    """
    depths = {len(folder.numbers) for folder in folders}
    if len(depths) != 1:
        raise FormatError(f"folders with {' and '.join(map(str, sorted(depths)))} numbers, expected one kind")
    depth = depths.pop()
    is_expert = _second_is_expert(folders, facts, modules) if depth == 2 and not folders[0].is_nemo else False
    coords = {}
    for folder in folders:
        tensor, *rest = folder.numbers
        if depth == 1:
            stage, expert = 0, 0
        elif depth == 2:
            stage, expert = (0, rest[0]) if is_expert else (rest[0], 0)
        else:
            stage, expert = rest
        coords[stage, expert, tensor] = folder.name
    seen = [max(coord[axis] for coord in coords) + 1 for axis in range(3)]
    stated = (facts.pp, facts.ep if facts.expert_model_parallel_size else None, facts.tp)
    pp, ep, tp = (max(a, b or 0) for a, b in zip(seen, stated, strict=True))
    etp = facts.expert_tensor_parallel_size if facts.num_experts else None
    etp = etp or tp
    if etp > tp:
        raise FormatError(
            f"experts of {etp} tensor-parallel ranks, the rest of {tp}: Megatron saves ranks with different parts of "
            "an expert into the same file, so the parts of the rank that wrote it last are all there are",
            where=folders[0].name,
            hint="such runs keep all parts with --ckpt-format torch_dist only",
        )
    _check_experts(tp, etp)
    ranks = {coord: _rank_of_pair(coord[1], coord[2], tp, ep, etp) for coord in coords}
    # Megatron saves on ranks that are the first in their data-parallel group, or in that of experts.
    n_saving = max(tp, ep * etp)
    n_absent = pp * n_saving - sum(rank is not None and rank < n_saving for rank in ranks.values())
    if n_absent:
        all_of_them = ((p, rank // etp % ep, rank % tp) for p in range(pp) for rank in range(n_saving))
        absent = list(islice((coord for coord in all_of_them if coord not in coords), MAX_LISTED))
        stage, expert, tensor = absent[0]
        names = [rank_folder(t, p, e, pp=pp, ep=ep) for p, e, t in absent]
        raise NotFound(
            f"{counted_of(n_absent, pp * n_saving, 'rank folder', 'are')} missing, such as tensor-parallel rank "
            f"{tensor} of stage {stage}" + (f" and expert-parallel rank {expert}" if ep > 1 else ""),
            where=folders[0].name,
            hint="copy the folders of all model-parallel ranks",
            files=() if folders[0].is_nemo else tuple(f"{name}/{MODEL_FILE}" for name in names),
        )
    if (stated[0], stated[2]) not in ((pp, tp), (None, None), (None, tp), (pp, None)):
        raise LayoutError(f"folders of {tp} x {pp} ranks, the run's arguments say {stated[2]} x {stated[0]}")
    strange = next((coords[coord] for coord, rank in ranks.items() if rank is None), None)
    if strange is not None:
        raise LayoutError(
            f"no rank of {tp} tensor-parallel ones, {ep} expert-parallel ones and {etp} of experts has this folder",
            where=strange,
        )
    return Grid(tp, pp, ep, dict(sorted(coords.items())), etp)


def check_ranks(grid: Grid, facts: Mapping[tuple[int, int, int], Facts]) -> None:
    """Nothing, when the ranks that the files say they are of are those of their folders.

    Files that all name the same rank were written by one process (a converter), and tell nothing.

    Raises:
        FormatError: a file is another rank's.
    """
    if len({one.rank for one in facts.values()}) < 2:
        return
    for (stage, expert, tensor), one in facts.items():
        if one.rank is None or not one.world_size or one.world_size % grid.pp:
            continue
        found = (one.rank // (one.world_size // grid.pp), one.rank % grid.tp)
        if found != (stage, tensor):
            raise FormatError(
                f"holds rank {one.rank} of {one.world_size}: stage {found[0]}, tensor-parallel rank {found[1]}; the "
                f"folder is of stage {stage}, tensor-parallel rank {tensor}",
                where=grid.folders[stage, expert, tensor],
            )


def _second_is_expert(folders: Sequence[RankFolder], facts: Facts, names: Mapping[str, frozenset[str]]) -> bool:
    """Whether the second of two numbers is the expert-parallel rank.

    Without arguments of the run it is a stage where the ends of the model lie on the first and the last number alone.
    """
    if facts.pp is not None:
        return facts.pp == 1
    last = max(folder.numbers[1] for folder in folders)
    may_lack_experts = not last and any(".experts." in name for name in names[folders[0].name])
    ends = {0: _FIRST_MODULES, last: _LAST_MODULES} if last else {0: _FIRST_MODULES + _LAST_MODULES}
    are_stages = all(_has_ends(names[folder.name], ends.get(folder.numbers[1], ())) for folder in folders)
    if are_stages and not may_lack_experts:
        return False
    raise LayoutError(
        "a second number in the names of rank folders is a pipeline stage or an expert-parallel rank; the files hold "
        "no args that tell, and not just the first one has the embedding and the last one the last norm",
        where=folders[0].name,
        hint="if folders of other ranks are missing, copy them too; else save again with args, as Megatron does",
    )


def _has_ends(names: frozenset[str], expected: Sequence[str]) -> bool:
    """Whether the modules at the ends of the model that are there are the expected ones."""
    found = {end for end in _FIRST_MODULES + _LAST_MODULES if any(name.startswith(end) for name in names)}
    return found == set(expected)
