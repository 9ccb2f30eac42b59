"""A listing of a run: every step that was saved, whether it is complete and why not, and which is the newest good one.

Costs one listing of the run and a few small reads for each step; no payload is read unless a verification is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from ckpt_tool.api.checkpoint import DEFAULT_MEMORY_BYTES
from ckpt_tool.api.runs.names import (
    TRACKERS,
    StepFiles,
    StepName,
    files_below,
    group_steps,
    natural,
    tagged,
    target_of,
)  # fmt: skip
from ckpt_tool.api.runs.parts import own_and_below
from ckpt_tool.api.runs.rules import Judgement, families, judge, tracker_text
from ckpt_tool.api.trust.verify import verify as verified
from ckpt_tool.checks.report import LEVELS
from ckpt_tool.errors import CkptError, NotFound, UsageError
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.store import Listing, Store
from ckpt_tool.storage.urls import join_url

__all__ = ["SCHEMA", "RunListing", "RunStep", "Tracker", "ls"]

SCHEMA = "ckpt-tool/ls/1"
# Files of a step that training cannot go on without, where the other steps have them.
_STATE = re.compile(
    r"optim|scheduler|trainer_state|training_args|random_state|rng|dataloader|data\.pt|common\.pt|model"
)
_HOLDS_TENSORS = re.compile(r"\.(?:safetensors|bin|pt|pth|ckpt|npz|distcp|gguf)$|^\.metadata$")
_LATEST_LINKS = frozenset({"latest", "last", "newest", "current", "latest_checkpoint", "last_checkpoint"})


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step."""

    path: str
    """Relative to the run; empty for the run itself."""
    url: str
    """To open it with."""
    step: int | None
    """Its number, None where its name has none."""
    parts: tuple[tuple[str, str], ...]
    """(folder or file below it, format) of each checkpoint in it."""
    problems: tuple[str, ...]
    """Why it is not complete."""
    layout: str | None
    nbytes: int
    n_files: int
    modified: float | None
    """When the last of its files was written, seconds since 1970."""
    verified: str | None = None
    """The level at which it was verified."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing, and what was verified is whole."""
        return not self.problems

    @property
    def format(self) -> str | None:
        """Formats of its parts; None where none is known."""
        return ", ".join(dict.fromkeys(name for _, name in self.parts)) or None


@dataclass(frozen=True, slots=True)
class Tracker:
    """A file that names the last step."""

    path: str
    names: str
    says: str | None
    """How it disagrees with the folders; None when it names the newest complete step and nothing is newer."""


@dataclass(frozen=True, slots=True)
class RunListing:
    """The steps of a run."""

    url: str
    steps: tuple[RunStep, ...]
    """Oldest first: by number, then by what trackers name, then by time."""
    trackers: tuple[Tracker, ...]
    notes: tuple[str, ...]

    @property
    def latest(self) -> RunStep | None:
        """The newest complete step: of the highest number, and named by a tracker; without numbers the last written."""
        return next((step for step in reversed(self.steps) if step.is_complete), None)

    def to_json(self) -> dict[str, Any]:
        """The listing as JSON-able values.

        Schema ``ckpt-tool/ls/1``: ``schema url latest`` (a URL or null), ``steps[] {path url step complete why[]
        format parts[] {folder format} layout nbytes files modified verified}``, ``trackers[] {path names says}``,
        ``notes[]``. ``modified`` is UTC in ISO 8601, null where the storage does not tell. Later versions only add
        keys.
        """
        latest = self.latest
        return {
            "schema": SCHEMA,
            "url": self.url,
            "latest": None if latest is None else latest.url,
            "steps": [_step_json(step) for step in self.steps],
            "trackers": [{"path": each.path, "names": each.names, "says": each.says} for each in self.trackers],
            "notes": list(self.notes),
        }


def ls(
    run: str | os.PathLike[str],
    *,
    verify: str | None = None,
    latest: bool = False,
    memory_budget_bytes: int = DEFAULT_MEMORY_BYTES,
    n_workers: int | None = None,
) -> RunListing:
    """Every step of a run directory or bucket.

    Cost: one listing request for each folder, or for each page of an object store; for each step its metadata file, or
    the ends of its files.

    Args:
        run: a path or a URL.
        verify: verify each complete step at this level, ``quick``, ``default`` or ``full``; errors make it incomplete.
        latest: look at steps from the newest back, and at none older than the first complete one.
        memory_budget_bytes: for verifying.
        n_workers: for verifying.

    Raises:
        NotFound: nothing there, or no step; with ``latest`` a folder without a step is a run that has none yet.
        UsageError: an unknown level.
    """
    if verify is not None and verify not in LEVELS:
        raise UsageError(f"{verify!r} is no level of verification, expected one of {', '.join(LEVELS)}")
    store, listing = open_store(run)
    try:
        found = _Run(os.fspath(run), store, listing, may_be_empty=latest)
        steps: list[RunStep] = []
        for files in reversed(found.files):
            step = found.step(files)
            if verify is not None and step.is_complete:
                step = _verified(step, verify, memory_budget_bytes, n_workers)
            if step.parts or step.problems:
                steps.append(step)
            if latest and step.is_complete:
                break
        listed = RunListing(os.fspath(run), tuple(reversed(steps)), (), found.notes)
        return replace(listed, trackers=tuple(found.trackers(listed)))
    finally:
        store.close()


class _Run:
    """Files of a run, by step."""

    def __init__(self, url: str, store: Store, listing: Listing, *, may_be_empty: bool) -> None:
        if listing.entry is not None:
            hint = f'give the folder: "{listing.url}"'
            raise NotFound("a file, expected the folder of a run", where=url, hint=hint)
        self._url = url
        self._store = store
        files = group_steps(listing)
        found = dict(_trackers(store, listing, files))
        self._named = {path: text for path, text in found.items() if text is not None}
        self.notes = tuple(f"{path} holds no name of a step and was passed over" for path in found.keys() - self._named)
        self._links = dict(_links(listing, files))
        files += tagged(self._named, listing, files)
        if not files:
            files = self._unnamed(listing, may_be_empty=may_be_empty)
        else:
            files += self._own_files(listing, files)
        named = self._by_trackers(files)
        self.files = sorted(files, key=lambda step: _order(step, named))
        parents = sorted({step.parent for step in files if step.path}, key=natural)
        if len(parents) > 1:
            shown = ", ".join(parent or "." for parent in parents[:3])
            folders = counted(len(parents), "folder")
            self.notes += (f"steps of {folders} are listed together: {shown}; give one for its own newest",)
        self._families = {step.path: families(step) for step in self.files if step.path and not step.is_file}

    def _by_trackers(self, files: Sequence[StepFiles]) -> dict[str, int]:
        """Paths of the steps that trackers name, with the place of the first such tracker among all kinds of them."""
        named: dict[str, int] = {}
        for path, text in sorted(self._named.items(), key=lambda each: -TRACKERS.index(each[0].rpartition("/")[2])):
            if (target := target_of(path, text, files)) is not None:
                named[target.path] = TRACKERS.index(path.rpartition("/")[2])
        return named

    def _unnamed(self, listing: Listing, *, may_be_empty: bool) -> list[StepFiles]:
        """The run as one checkpoint, or its folders that are one each, where none is called like a step."""
        whole = files_below(listing, "")
        found = judge(whole, self._store, self._url)
        folders = [part for part, _ in found.parts if part not in listing.sizes]
        if not folders and may_be_empty:
            return []
        if not folders:
            hint = 'name the folder that the steps lie in; "ckpt inspect" looks at a single checkpoint'
            raise NotFound(f"no step of a run among {counted(len(listing.sizes), 'file')}", where=self._url, hint=hint)
        if "" not in folders:
            self.notes += ("no name tells a step: the last written one counts as the newest",)
            return [files_below(listing, folder) for folder in folders]
        whole, below = own_and_below(whole, self._store, self._url)
        others = f"; checkpoints of their own below it: {', '.join(below)}" if below else ""
        self.notes += (f"it is one checkpoint, no run with steps{others}",)
        return [whole]

    def _own_files(self, listing: Listing, steps: Sequence[StepFiles]) -> list[StepFiles]:
        """A checkpoint of the run's own files beside its steps, as a trainer leaves when it ends."""
        taken = {f"{step.parent}/{name}".lstrip("/") for step in steps if step.is_file for name in step.sizes}
        sizes = {path: n for path, n in listing.sizes.items() if "/" not in path and path not in taken}
        sizes = {path: n for path, n in sizes.items() if path not in self._named}
        times = [listing.modified[path] for path in sizes if path in listing.modified]
        name = StepName(None, is_temporary=False)
        own = StepFiles("", name, is_file=False, sizes=sizes, modified=max(times, default=None))
        if not any(_HOLDS_TENSORS.search(path) for path in sizes) or not judge(own, self._store, self._url).parts:
            return []
        self.notes += ("its own files are a checkpoint too, listed as .",)
        return [own]

    def step(self, files: StepFiles) -> RunStep:
        """What is found of one step."""
        found = judge(files, self._store, self._url)
        problems = (*found.problems, *self._beside_others(files, found))
        if not found.problems:
            problems += tuple(self._uncommitted(files, found))
        if files.name.is_plain and not found.parts:
            problems = ()  # a folder that is a number by chance: it is not listed
        return RunStep(
            path=files.path,
            url=join_url(self._url, files.path),
            step=files.name.step,
            parts=found.parts,
            problems=problems,
            layout=found.layout,
            nbytes=sum(files.sizes.values()),
            n_files=len(files.sizes),
            modified=files.modified,
        )

    def trackers(self, listing: RunListing) -> Iterator[Tracker]:
        """How each tracker agrees with the steps."""
        for path, text in self._named.items():
            yield Tracker(path, text, self._says(path, text, listing))
        for path, text in self._links.items():
            name = path.rpartition("/")[2].lower()
            target = next((step for step in self.files if step.path == text), None)
            if target is None:
                yield Tracker(path, text, f"is a link to {text}, and there is no such step here")
            elif name in _LATEST_LINKS:
                yield Tracker(path, text, self._says(path, text.rpartition("/")[2], listing))

    def _says(self, path: str, text: str, listing: RunListing) -> str | None:
        target = target_of(path, text, self.files)
        if target is None:
            return f"names {text}, and there is no such step here"
        beside = [step for step in listing.steps if step.path.rpartition("/")[0] == target.parent]
        own = next((step for step in beside if step.path == target.path), None)
        newer = [step for step in beside if target.name.step is not None and (step.step or -1) > target.name.step]
        is_bad = own is not None and not own.is_complete
        said = [f"names {text}" + (f", which is not complete: {own.problems[0]}" if own and is_bad else "")]
        for is_complete, state in ((True, "complete"), (False, "not complete")):
            names = [step.path for step in newer if step.is_complete is is_complete]
            if names:
                said.append(f"newer and {state}: {', '.join(names)}")
        return "; ".join(said) if is_bad or len(said) > 1 else None

    def _beside_others(self, files: StepFiles, found: Judgement) -> Iterator[str]:
        """State that nearly all other steps have."""
        own = self._families.get(files.path)
        if not own or files.name.is_temporary or not found.parts:
            return
        others = [
            self._families[other.path]
            for other in self.files
            if other is not files
            and other.path in self._families
            and other.parent == files.parent
            and not other.name.is_temporary
            and 2 * len(own & self._families[other.path]) >= len(own)
        ]
        for family in sorted(set().union(*others) - own):
            n = sum(family in other for other in others)
            if n >= 2 and 4 * n > 3 * len(others) and _STATE.search(family):
                yield f"lacks {family}, which {counted(n, 'other step', 'have')}"

    def _uncommitted(self, files: StepFiles, found: Judgement) -> Iterator[str]:
        """A tracker that was not moved on is all that tells of some formats that a save did not end."""
        if found.is_committed or files.name.step is None:
            return
        for path, text in self._named.items():
            target = target_of(path, text, self.files)
            number = target.name.step if target is not None else None
            if number is not None and path.rpartition("/")[0] == files.parent and files.name.step > number:
                yield f"newer than {text}, which {path} names: its save did not end"


def _trackers(store: Store, listing: Listing, files: Sequence[StepFiles]) -> Iterator[tuple[str, str | None]]:
    """Path and text of trackers that lie beside steps, not in them; None for one that holds no text."""
    inside = tuple(f"{step.path}/" for step in files if not step.is_file)
    for path, nbytes in listing.sizes.items():
        if path.rpartition("/")[2] in TRACKERS and not path.startswith(inside):
            yield path, tracker_text(store, path, nbytes)


def _links(listing: Listing, files: Sequence[StepFiles]) -> Iterator[tuple[str, str]]:
    """Links beside steps: those that lead to one of them, or to nothing."""
    parents = {step.parent for step in files}
    steps = {step.path for step in files}
    for path, target in sorted(listing.links.items()):
        is_here = target in steps or any(target.startswith(f"{step}/") for step in steps)
        is_nothing = target not in steps and not any(known.startswith(f"{target}/") for known in listing.sizes)
        if path.rpartition("/")[0] in parents and (is_here or is_nothing):
            yield path, target


def _order(step: StepFiles, named: Mapping[str, int]) -> tuple[int, int, float, bool, list[tuple[str, int]]]:
    """Oldest first; of one number that comes last which a tracker names, as training goes on from it."""
    number = -1 if step.name.step is None else step.name.step
    is_named = -named.get(step.path, len(TRACKERS))
    return number, is_named, step.modified or 0.0, not step.name.is_temporary, natural(step.path)


def _verified(step: RunStep, level: str, memory_budget_bytes: int, n_workers: int | None) -> RunStep:
    """The step, with what a verification of its parts found."""
    problems: list[str] = []
    for folder, name in step.parts:
        if name == "orbax":
            return step
        try:
            url = join_url(step.url, folder)
            report = verified(url, level=level, memory_budget_bytes=memory_budget_bytes, n_workers=n_workers)
        except CkptError as error:
            problems.append(f"verify: {error}")
            continue
        errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
        if errors:
            problems.append(f"verify: {counted(len(errors), 'error')}, {errors[0].kind}: {errors[0].message}")
    return replace(step, problems=tuple(problems), verified=level)


def _step_json(step: RunStep) -> dict[str, Any]:
    time = None if step.modified is None else datetime.fromtimestamp(step.modified, timezone.utc)
    return {
        "path": step.path,
        "url": step.url,
        "step": step.step,
        "complete": step.is_complete,
        "why": list(step.problems),
        "format": step.format,
        "parts": [{"folder": folder, "format": name} for folder, name in step.parts],
        "layout": step.layout,
        "nbytes": step.nbytes,
        "files": step.n_files,
        "modified": None if time is None else time.isoformat(timespec="seconds"),
        "verified": step.verified,
    }
