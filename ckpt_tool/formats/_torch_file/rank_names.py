"""A rank file set is the files of one checkpoint whose names differ only in a rank number, and in what they hold.

Only names are looked at: ``model_world_size_4_rank_0.pt``, ``optim_world_size_4_rank_0.pt`` (verl),
``pytorch_model_fsdp_0_rank0.bin``, ``optimizer_0_rank0.bin`` (accelerate), ``shard.rank3.pt``,
``checkpoint_last-shard0.pt`` (fairseq), ``ckpt_rank-00000000-of-00000008.pth`` (torch_xla); or of the folders that
they are in, ``rank_0/model.pt``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.records import dataclass

__all__ = ["RankFile", "RankFileSet", "find_sets", "of_folder", "rank_file"]

_TORCH_SUFFIXES = "pt|pth|bin|ckpt|pkl"
_RANK, _SHARD, _SAFETENSORS = (
    re.compile(
        rf"(?P<stem>.*?)(?:[._-]?world_?size[._-]?(?P<world>[0-9]{{1,7}}))?[._-]?{word}[._-]?(?P<rank>0*[0-9]{{1,7}})"
        r"(?:[._-]of[._-](?P<of>0*[0-9]{1,7}))?"
        rf"(?P<rest>(?:[._-][A-Za-z0-9]+)*?)\.(?:{suffixes})",
        re.IGNORECASE,
    )
    for word, suffixes in (("rank", _TORCH_SUFFIXES), ("shard", _TORCH_SUFFIXES), ("rank", "safetensors"))
)
_FOLDER = re.compile(r"(?P<stem>(?:.*[._-])?)rank[._-]?(?P<rank>0*[0-9]{1,7})", re.IGNORECASE)
_IN_FOLDER = re.compile(rf"[^/]+\.(?:{_TORCH_SUFFIXES})", re.IGNORECASE)
# Ranks of one axis only (Megatron's mp_rank_00, DeepSpeed's zero_pp_rank_0_mp_rank_00): formats of their own.
_OTHER_AXES = re.compile(r"(?<![A-Za-z0-9])(?:mp|pp|tp|dp|ep|cp|zero|expert|layer)_?$", re.IGNORECASE)
# A step: behind a word, or a number that is no count of models or ranks.
_SAVE = re.compile(
    r"(?<![A-Za-z])(?:(?:global_?)?steps?|iter(?:ation)?s?|ba|epochs?|checkpoint|ckpt)[-_=]?(?P<save>\d{1,15})(?!\d)"
    r"|(?<![A-Za-z0-9])(?P<bare>\d{5,15})(?!\d)",
    re.IGNORECASE,
)
_TEN = 10
_KINDS = (
    ("optim", re.compile(r"(?:^|[._-])(?:optim|optimizer|opt)(?:[._-]|$)", re.IGNORECASE)),
    (
        "extra_state",
        re.compile(r"(?:^|[._-])(?:extra|rng|random|scheduler|sampler|dataloader)(?:[._-]|$)", re.IGNORECASE),
    ),
)


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file of a set, as its name tells."""

    path: str
    kind: str
    """``model``, ``optim`` or ``extra_state``."""
    family: str
    """The name without its rank: files that differ in nothing else have the same."""
    rank: int
    world_size: int | None
    """As the name says it, None where it does not."""
    digits: str
    """The rank as the name spells it."""


@dataclass(frozen=True, slots=True)
class RankFileSet:
    """Files of one checkpoint."""

    files: tuple[RankFile, ...]
    """Sorted by kind (model first), family, rank."""
    world_size: int
    """From the names; where these do not tell, one more than the highest rank."""
    is_stated: bool
    """Whether the names tell the world size."""
    strays: tuple[str, ...] = ()
    """Files that spell the rank of another file of their family in an unusual way: ``rank_01`` beside ``rank_1``."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Paths that should be there: each family should have a file of every rank."""
        families: dict[str, list[RankFile]] = {}
        for file in self.files:
            families.setdefault(file.family, []).append(file)
        return tuple(
            _with_rank(files[-1], rank)
            for files in families.values()
            for rank in absent_numbers([file.rank for file in files], self.world_size)
        )


def rank_file(path: str, *, is_safetensors: bool = False) -> RankFile | None:
    """What the name of a torch file, or of a safetensors one, says about it; None when it names no rank.

    >>> found = rank_file("optim_world_size_4_rank_3.pt")
    >>> found.kind, found.rank, found.world_size
    ('optim', 3, 4)
    >>> rank_file("mp_rank_00_model_states.pt") is None, rank_file("pytorch_model_fsdp_rank1.bin").rank
    (True, 1)
    """
    name = path.rpartition("/")[2]
    match = _SAFETENSORS.fullmatch(name) if is_safetensors else _RANK.fullmatch(name) or _SHARD.fullmatch(name)
    if match is None or _OTHER_AXES.search(match["stem"]):
        return None if is_safetensors or match is not None else _by_folder(path)
    label = f"{match['stem']}{match['rest']}"
    start = len(path) - len(match.string) + match.start("rank")
    family = f"{path[:start]}*{path[start + len(match['rank']) :]}"
    stated = match["world"] or match["of"]
    world_size = None if stated is None else int(stated)
    return RankFile(path, _kind_of(label), family, int(match["rank"]), world_size, match["rank"])


def _by_folder(path: str) -> RankFile | None:
    """As `rank_file`, of a file in a folder that is named for a rank, the outermost one."""
    folder, _, name = path.partition("/")
    match = _FOLDER.fullmatch(folder)
    if match is None or _IN_FOLDER.fullmatch(name) is None or _OTHER_AXES.search(match["stem"].rstrip("._-")):
        return None
    family = f"{path[: match.start('rank')]}*{path[match.end('rank') :]}"
    return RankFile(path, _kind_of(name), family, int(match["rank"]), None, match["rank"])


def _kind_of(label: str) -> str:
    return next((kind for kind, pattern in _KINDS if pattern.search(label)), "model")


def of_folder(paths: Iterable[str]) -> list[str]:
    """The files of a folder itself, and those in folders of ranks.

    >>> of_folder(["a.pt", "rank0/a.pt", "rank1/a.pt", "mp_rank_00/a.pt", "x/a_rank0.pt", "rank0/x/a.pt"])
    ['a.pt', 'rank0/a.pt', 'rank1/a.pt']
    """
    return [path for path in paths if "/" not in path or _by_folder(path) is not None]


def find_sets(paths: Iterable[str], *, is_safetensors: bool = False) -> list[RankFileSet]:
    """The sets among files of one folder, the largest first, then the newest.

    Sets differ in the world size that their names state, or in a step. A name that states no world size makes a set
    only together with others that state none.
    """
    told = (rank_file(path, is_safetensors=is_safetensors) for path in paths)
    found = [file for file in told if file is not None]
    saves = _saves({file.family for file in found})
    newest = max((save for save in saves.values() if save is not None), default=None)
    by_world: dict[tuple[int | None, int], list[RankFile]] = {}
    for file in found:
        save = saves[file.family]
        by_world.setdefault((file.world_size, (newest if save is None else save) or 0), []).append(file)
    order = {"model": 0, "optim": 1, "extra_state": 2}
    sets = []
    for (stated, _), named in sorted(by_world.items(), key=lambda item: -item[0][1]):
        files = _one_each(named)
        one_set = RankFileSet(
            files=tuple(sorted(files, key=lambda file: (order[file.kind], file.family, file.rank))),
            world_size=max(1 + max(file.rank for file in files), stated or 0),
            is_stated=stated is not None,
            strays=tuple(sorted({file.path for file in named} - {file.path for file in files})),
        )
        sets.append(one_set)
    return sorted(sets, key=lambda found: -len(found.files))


def _saves(families: Collection[str]) -> dict[str, int | None]:
    """The step of each family whose name has one where others have another; None where it may be of any.

    >>> found = _saves({"model_step5_rank*.pt", "model_step10_rank*.pt", "optim_000010_rank*.pt", "rng_rank*.pt"})
    >>> found["model_step5_rank*.pt"], found["model_step10_rank*.pt"], found["rng_rank*.pt"]
    (5, 10, None)
    """
    numbers: dict[str, dict[str, int]] = {}
    for family in families:
        match = _SAVE.search(family.rpartition("/")[2])
        if match is not None:
            digits = match["save"] or match["bare"]
            before, after = match.string[: match.end() - len(digits)], match.string[match.end() :]
            numbers.setdefault(f"{before}#{after}", {})[family] = int(digits)
    are_steps = any(len(own) > 1 for own in numbers.values())
    known = {family: n for own in numbers.values() for family, n in own.items()} if are_steps else {}
    return {family: known.get(family) for family in families}


def _one_each(files: Sequence[RankFile]) -> list[RankFile]:
    """One file for each rank of a family: of several the one with as many zeros before it as most of the others.

    How many that are, ranks of one digit tell.
    """
    small = Counter((file.family, len(file.digits)) for file in files if file.rank < _TEN)
    width: dict[str, int] = {}
    for (family, length), _ in sorted(small.items(), key=lambda item: (-item[1], item[0])):
        width.setdefault(family, length)
    chosen: dict[tuple[str, int], RankFile] = {}
    for file in sorted(files, key=lambda file: file.digits != str(file.rank).zfill(width.get(file.family, 1))):
        chosen.setdefault((file.family, file.rank), file)
    return list(chosen.values())


def _with_rank(sample: RankFile, rank: int) -> str:
    """The path that another rank's file of the same family has, with as many digits."""
    digits = str(rank).zfill(len(sample.digits) if sample.digits.startswith("0") else 1)
    return sample.family.replace("*", digits, 1)
