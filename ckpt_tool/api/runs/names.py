"""A run is a folder of saved steps; what a name says of a step, and which files of a run belong to which step.

Knows the names that trainers give; reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckpt_tool.records import dataclass, field
from ckpt_tool.storage.store import Listing

__all__ = ["TRACKERS", "StepFiles", "StepName", "group_steps", "natural", "step_name", "target_of"]

TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest_universal", "latest.txt", "last_checkpoint")
"""Text files that name the last step: of Megatron and verl (a number), of DeepSpeed (a tag), and of others."""

# A word that stands before the number: torchtitan step-500, Megatron iter_0000500, DeepSpeed and verl global_step500,
# transformers' Trainer checkpoint-500, accelerate checkpoint_5, Lightning epoch=3-step=500.ckpt, NeMo step=500.
_STEP = re.compile(
    r"(?:^|[^a-z])(?:global_?steps?|steps?|iter(?:ation)?s?|updates?)[-_=]?(\d{1,15})(?!\d)", re.IGNORECASE
)
_CHECKPOINT = re.compile(r"(?:^|[^a-z])(?:checkpoint|ckpt)[-_=]?(\d{1,15})(?!\d)", re.IGNORECASE)
_EPOCH = re.compile(r"(?:^|[^a-z])epochs?[-_=]?(\d{1,15})(?!\d)", re.IGNORECASE)
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
    for path, nbytes in listing.sizes.items():
        marker = _MARKER.fullmatch(path)
        if marker is not None and nbytes == 0:
            marked.add(marker[1])
            continue
        place = _place(path, names)
        if place is None:
            continue
        folder, name, is_file = place
        if is_file and (folder.rpartition("/")[0] in wholes or folder in of_ranks):
            continue
        step = found.setdefault(folder, StepFiles(folder, name, is_file))
        step.sizes[path.rpartition("/")[2] if is_file else path[len(folder) + 1 :]] = nbytes
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


def _without_doubtful(steps: Iterable[StepFiles]) -> list[StepFiles]:
    """Steps without folders that are numbers by chance, and without weights of a folder that is no run."""
    steps = list(steps)
    worded = any(not step.name.is_plain and step.name.step is not None for step in steps)
    return [step for step in steps if not (step.name.is_plain and worded)]
