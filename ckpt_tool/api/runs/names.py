"""A run is a folder of saved steps; what a name says of a step, and which files of a run belong to which step.

Knows the names that trainers give; reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ckpt_tool.records import dataclass, field
from ckpt_tool.storage.store import Listing

__all__ = [
    "TRACKERS",
    "StepFiles",
    "StepName",
    "files_below",
    "group_steps",
    "natural",
    "step_name",
    "tagged",
    "target_of",
]

TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest_universal", "latest.txt", "last_checkpoint")
"""Text files that name the last step: of Megatron and verl (a number), of DeepSpeed (a tag), and of others."""

# A word that stands before the number: torchtitan step-500, Megatron iter_0000500, DeepSpeed and verl global_step500,
# transformers' Trainer checkpoint-500, accelerate checkpoint_5, Lightning epoch=3-step=500.ckpt, NeMo step=500,
# Composer ep3-ba500, fairseq checkpoint_3_500.pt.
_STEP = re.compile(
    r"(?:^|[^a-z])(?:global_?steps?|steps?|iter(?:ation)?s?|updates?|ba)[-_=]?(\d{1,15})(?!\d)", re.IGNORECASE
)
_CHECKPOINT = re.compile(r"(?:^|[^a-z])(?:checkpoint|ckpt)(?:_\d{1,9}(?=_\d))?[-_=]?(\d{1,15})(?!\d)", re.IGNORECASE)
# Composer's `ep1-ba100`, `checkpoint_ep3`; behind other words `ep` is a degree of expert parallelism.
_EPOCH = re.compile(
    r"(?:(?:^|(?:checkpoint|ckpt|model)[-_.])ep|(?:^|[^a-z])epochs?)[-_=]?(\d{1,15})(?!\d)", re.IGNORECASE
)
_PLAIN = re.compile(r"\d{1,15}")
_UNNUMBERED = re.compile(
    r"(?:(?:checkpoint|ckpt|global_?step|step|iter|epoch)s?[-_=]?)?(?:release|last|final|best)", re.IGNORECASE
)
# Orbax writes 500.orbax-checkpoint-tmp-1699, older Trainers tmp-checkpoint-500, this tool 500.partial.
_TEMPORARY = re.compile(
    r"^[._]*tmp[-_.]|[-_.](?:tmp|temp|incomplete|partial|unfinished|inprogress|orbax-checkpoint-tmp)(?:$|[-_.\d])",
    re.IGNORECASE,
)
_FILE = re.compile(r"\.(?:ckpt|pt|pth|safetensors)(?:\.tmp|\.partial|\.incomplete)?$")
# In a folder with one of these, files that are called like steps are parts of one checkpoint.
_CHECKPOINT_FILES = re.compile(
    r"\.metadata|metadata\.(?:pkl|json)|ckpt_layout\.json|.*\.index\.json|\.?__\d+_\d+\.distcp"
)
# Files that are numbered without a word: nanochat's model_000500.pt beside optim_000500_rank0.pt, Detectron2's
# model_0004999.pth. Shards and ranks are counted from 0 or 1.
_NUMBERED = re.compile(r"([A-Za-z][A-Za-z_.-]*?[-_.])(\d{5,15})(\.(?:ckpt|pt|pth|safetensors))")
_LIKE_A_MODEL = re.compile(r"model|net|weights|checkpoint|ckpt", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"\d{1,15}(?=\D*$)")
_OF_RANK = re.compile(r"(\w+)_(\d+)\.pt")
_MARKER = re.compile(r"(.+)-unfinished")  # NeMo's, a file beside the checkpoint
# Files of a rank or a layer have numbers too, and are no steps.
_PART = re.compile(
    r"(?:^|[-_.])(?:rank|layer|shard|part|mp|pp|tp|dp|expert|optim|states?)(?:$|[-_.\d])|-of-\d", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class StepName:
    """What a folder's or a file's name says."""

    step: int | None
    """None for a name without a number, as ``release`` or ``last.ckpt``."""
    is_temporary: bool
    """The name is one under which a save is under way."""
    is_plain: bool = False
    """Nothing but a number, which other folders are called as well."""


@dataclass
class StepFiles:
    """One step as it lies in a run."""

    path: str
    """Folder or file, relative to the run; empty for the run itself."""
    name: StepName
    is_file: bool
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes by path, relative to the folder; the file alone by its name."""
    modified: float | None = None
    """When the last of its files was written, seconds since 1970."""
    is_marked: bool = False
    """A file beside it says that it is unfinished."""

    @property
    def parent(self) -> str:
        """The folder that it lies in, relative to the run."""
        return self.path.rpartition("/")[0]


def step_name(name: str) -> StepName | None:
    """What a name says, None where it is not that of a step.

    >>> step_name("iter_0000500"), step_name("epoch=3-step=500.ckpt").step, step_name("rank_3")
    (StepName(step=500, is_temporary=False, is_plain=False), 500, None)
    >>> step_name("checkpoint-7.tmp").is_temporary, step_name("release").step, step_name("12").is_plain
    (True, None, True)
    """
    is_temporary = _TEMPORARY.search(name) is not None
    plain = name.partition(".")[0] if is_temporary else name
    if _PLAIN.fullmatch(plain):
        return StepName(int(plain), is_temporary, is_plain=True)
    if _PART.search(name.partition("=")[0] if "=" in name else name):
        return None
    for pattern in (_STEP, _CHECKPOINT, _EPOCH):
        found = pattern.search(name)
        if found is not None:
            return StepName(int(found[1]), is_temporary)
    if _UNNUMBERED.fullmatch(name.partition(".")[0]):
        return StepName(None, is_temporary)
    return None


def group_steps(listing: Listing) -> list[StepFiles]:
    """The steps of a run, each with its files; the outermost folder that is called like a step is one.

    Folders that are called by a number alone count where no step lies around or beside them that has a word, and where
    they are no parts of something else (a tensor's chunks, a process's files).
    """
    found: dict[str, StepFiles] = {}
    names: dict[str, StepName | None] = {}
    marked: set[str] = set()
    wholes = {path.rpartition("/")[0] for path in listing.sizes if _CHECKPOINT_FILES.fullmatch(path.rpartition("/")[2])}
    of_ranks = _of_ranks(listing.sizes)
    series = _series(listing.sizes)
    for path, nbytes in listing.sizes.items():
        marker = _MARKER.fullmatch(path)
        if marker is not None and nbytes == 0:
            marked.add(marker[1])
            continue
        place = _place(path, names) or series.get(path)
        if place is None:
            continue
        folder, name, is_file = place
        if is_file and (folder.rpartition("/")[0] in wholes or folder in of_ranks):
            continue
        step = found.setdefault(folder, StepFiles(folder, name, is_file))
        step.sizes[path[len(step.parent) + 1 if step.parent else 0 :] if is_file else path[len(folder) + 1 :]] = nbytes
        seconds = listing.modified.get(path)
        if seconds is not None:
            step.modified = seconds if step.modified is None else max(step.modified, seconds)
    for folder in listing.empty:
        place = _place(f"{folder}/", names)
        if place is not None and not place[2]:
            found.setdefault(place[0], StepFiles(place[0], place[1], is_file=False))
    for path in marked & found.keys():
        found[path].is_marked = True
    return _without_doubtful(found.values())


def target_of(path: str, text: str, files: Sequence[StepFiles]) -> StepFiles | None:
    """The step that a tracker names: a path from where it lies, the name or the number of one that lies beside it."""
    parent = path.rpartition("/")[0]
    own = f"{parent}/{text.rstrip('/')}".lstrip("/")
    steps = [step for step in files if not step.name.is_temporary]
    beside = [step for step in steps if step.parent == parent]
    called = [step for step in beside if step.path.rpartition("/")[2] == own.rpartition("/")[2]]
    for step in (*(step for step in steps if step.path == own), *called):
        return step
    if text.isdecimal() and len(text) < 16:
        return next((step for step in beside if step.name.step == int(text)), None)
    return None


def tagged(named: Mapping[str, str], listing: Listing, files: Sequence[StepFiles]) -> list[StepFiles]:
    """Steps whose folders or files have names of their own, which only a tracker tells; files with others like them.

    Args:
        named: by the path of each tracker, what it names.
        listing: of the run.
        files: steps that are known by their names.
    """
    found: dict[str, StepFiles] = {}
    for path, text in named.items():
        parent = path.rpartition("/")[0]
        place = f"{parent}/{text}".lstrip("/")
        file = f"{parent}/{text.rpartition('/')[2]}".lstrip("/")
        if file in listing.sizes:
            like = _without_number(file)
            for other in [other for other in listing.sizes if _without_number(other) == like]:
                number = _LAST_NUMBER.search(other)
                name = StepName(int(number[0]) if number else None, is_temporary=False)
                sizes = {other.rpartition("/")[2]: listing.sizes[other]}
                found[other] = StepFiles(other, name, is_file=True, sizes=sizes, modified=listing.modified.get(other))
        elif (step := files_below(listing, place, step_name(text))).sizes:
            found[place] = step
    known = {step.path for step in files}
    return [step for path, step in found.items() if path not in known]


def files_below(listing: Listing, folder: str, name: StepName | None = None) -> StepFiles:
    """All files below a folder of the run, or of the run itself, as those of a step."""
    prefix = f"{folder}/" if folder else ""
    paths = [path for path in listing.sizes if path.startswith(prefix)]
    return StepFiles(
        folder,
        name or StepName(None, is_temporary=False),
        is_file=False,
        sizes={path[len(prefix) :]: listing.sizes[path] for path in paths},
        modified=max((listing.modified[path] for path in paths if path in listing.modified), default=None),
    )


def natural(name: str) -> list[tuple[str, int]]:
    """Sort key with numbers by value.

    >>> sorted(["step-10", "step-9"], key=natural)
    ['step-9', 'step-10']
    """
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _place(path: str, names: dict[str, StepName | None]) -> tuple[str, StepName, bool] | None:
    """The step that a file belongs to: path, what its name says, whether it is the file itself."""
    *folders, last = path.split("/")
    for depth, part in enumerate(folders):
        if part not in names:
            names[part] = step_name(part)
        name = names[part]
        if name is not None:
            return "/".join(folders[: depth + 1]), name, False
    if _FILE.search(last):
        name = step_name(last)
        if name is not None and not name.is_plain:
            return path, name, True
    return None


def _of_ranks(paths: Iterable[str]) -> set[str]:
    """Files that are what ranks keep of a step counter: ``step_3.pt`` beside ``model_3.pt``, by torch_checkpointing."""
    numbered: dict[tuple[str, str], set[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        match = _OF_RANK.fullmatch(name)
        if match is not None:
            numbered.setdefault((folder, match[2]), set()).add(match[1])
    return {
        f"{folder}/step_{number}.pt".lstrip("/")
        for (folder, number), stems in numbered.items()
        if "step" in stems and len(stems) > 1
    }


def _series(paths: Iterable[str]) -> dict[str, tuple[str, StepName, bool]]:
    """Files of steps that are numbered without a word, and what has the same number beside them: as `_place` tells.

    Of several series in a folder that which is called like a model is the steps.
    """
    found: dict[str, dict[tuple[str, str], dict[int, str]]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        match = _NUMBERED.fullmatch(name)
        if match is not None and not _PART.search(name):
            found.setdefault(folder, {}).setdefault((match[1], match[3]), {})[int(match[2])] = path
    steps: dict[tuple[str, int], str] = {}
    for folder, series in found.items():
        counted_up = {
            key for key, own in series.items() if sorted(own) in (list(range(len(own))), [*range(1, len(own) + 1)])
        }
        likely = [key for key in series if key not in counted_up]
        likely = [key for key in likely if _LIKE_A_MODEL.search(key[0])] or likely
        if len(likely) == 1:
            steps |= {(folder, number): path for number, path in series[likely[0]].items()}
    folders = {folder for folder, _ in steps}
    places: dict[str, tuple[str, StepName, bool]] = {}
    for path in paths if steps else ():
        folder, _, name = path.rpartition("/")
        if folder in folders:
            numbers = (int(digits) for digits in re.findall(r"\d{5,15}", name))
            step = next((steps[folder, number] for number in numbers if (folder, number) in steps), None)
            number = _NUMBERED.fullmatch(step.rpartition("/")[2]) if step is not None else None
            if step is not None and number is not None:
                places[path] = step, StepName(int(number[2]), is_temporary=False), True
    return places


def _without_number(path: str) -> str:
    return _LAST_NUMBER.sub("#", path)


def _without_doubtful(steps: Iterable[StepFiles]) -> list[StepFiles]:
    """Steps without folders that are numbers by chance, and without weights of a folder that is no run."""
    steps = list(steps)
    worded = any(not step.name.is_plain and step.name.step is not None for step in steps)
    return [step for step in steps if not (step.name.is_plain and worded)]
