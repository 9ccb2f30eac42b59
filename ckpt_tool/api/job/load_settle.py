"""What of a live state is not in a checkpoint and need not be, and what it has no place for although it should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.api.job.load_match import Match, Problem, SavedValues, neutral_path
from ckpt_tool.manifest.model import KeyPath, Manifest
from ckpt_tool.manifest.tables import SECTIONS

if TYPE_CHECKING:
    from ckpt_tool.frameworks.state import LiveState

__all__ = ["absent_entries", "settled", "tied_leaves"]


def settled(live: LiveState, manifest: Manifest, match: Match, rank: int) -> Match:
    """``match`` without what is no loss, and with what would be lost without a word.

    - A tensor in a tuple is in an object there.
    - A tensor that shares its memory with one that was found is filled with that (tied weights).
    - An optimizer that has made its state to be filled had none for a parameter that has none there.
    - Where the state has an empty dict and the checkpoint tensors, these are unexpected.
    """
    missing = {each.fqn for each in match.problems if each.kind == "missing"}
    renamed = dict(match.renamed)
    if missing:
        settled_here = _in_objects(live, manifest, rank)
        settled_here |= _unmade(live, manifest, match)
        for number, other in tied_leaves(live).items():
            if match.rows[number] < 0 <= match.rows[other]:
                settled_here.add(live.leaves[number].fqn)
                renamed[live.leaves[number].fqn] = manifest.tensors.fqns[match.rows[other]]
        missing &= settled_here
    left = [each for each in match.problems if each.kind != "missing" or each.fqn not in missing]
    return replace(match, problems=(*left, *_without_place(live, manifest)), renamed=tuple(renamed.items()))


def tied_leaves(live: LiveState) -> dict[int, int]:
    """By leaf that is the same memory as an earlier one: the first of these."""
    first: dict[Any, int] = {}
    tied: dict[int, int] = {}
    for number, leaf in enumerate(live.leaves):
        if not any(part.box.volume for part in leaf.parts):
            continue
        places = tuple([(part.view.data_ptr(), part.view.stride(), part.box) for part in leaf.parts])
        other = first.setdefault((leaf.shape, leaf.dtype.name, places), number)
        if other != number:
            tied[number] = other
    return tied


def absent_entries(live: LiveState, match: Match) -> list[int]:
    """Which of ``live.made`` the checkpoint has nothing of."""
    return [
        number
        for number, entry in enumerate(live.made)
        if all(match.rows[leaf] < 0 for leaf in entry.leaves)
    ]  # fmt: skip


def _in_objects(live: LiveState, manifest: Manifest, rank: int) -> set[str]:
    if not live.in_tuples:
        return set()
    saved = SavedValues(manifest.blobs, rank, lambda _: None)
    return {".".join(map(str, path)) for path in live.in_tuples if saved.has_above(path)}


def _unmade(live: LiveState, manifest: Manifest, match: Match) -> set[str]:
    """Names of tensors that an optimizer has made and that it had no need to, by what the checkpoint has of it."""
    absent = absent_entries(live, match)
    by_optimizer: dict[KeyPath, list[int]] = {}
    for number, entry in enumerate(live.made):
        by_optimizer.setdefault(entry.path[:-1], []).append(number)
    names: set[str] = set()
    for path, numbers in by_optimizer.items():
        lost = [number for number in numbers if number in absent]
        if len(lost) < len(numbers) or not _is_saved(manifest, path):
            names.update(live.leaves[leaf].fqn for number in lost for leaf in live.made[number].leaves)
    return names


def _is_saved(manifest: Manifest, path: KeyPath) -> bool:
    """Whether the state of the optimizer at ``path``, or of one of another name, has tensors in the checkpoint."""
    if _below(manifest, path):
        return True
    front = _front(path[:-1])
    has_values = any(_spelled(blob.path or (blob.fqn,)).startswith(front) for blob in manifest.blobs)
    return not has_values and bool((manifest.tensors.section == SECTIONS.index("optimizer")).any())


def _without_place(live: LiveState, manifest: Manifest) -> list[Problem]:
    """Tensors for which the state has an empty dict, as that of an optimizer before its first step."""
    text = "in its place the state has an empty dict; an optimizer makes its state at its first step"
    empty = [slot.path for slot in live.slots if isinstance(slot.value, Mapping) and not slot.value]
    return [Problem("unexpected", fqn, text) for path in empty for fqn in _below(manifest, path)]


def _below(manifest: Manifest, path: KeyPath) -> list[str]:
    """Names of the tensors below ``path``."""
    tensors, front = manifest.tensors, _front(path)
    paths = tensors.paths if tensors.paths is not None else [(fqn,) for fqn in tensors.fqns]
    return [fqn for fqn, each in zip(tensors.fqns, paths, strict=True) if _spelled(each).startswith(front)]


def _front(path: KeyPath) -> str:
    """How `_spelled` begins for what lies below ``path``."""
    return ".".join(map(str, neutral_path((*path, ""))[0]))


def _spelled(path: KeyPath) -> str:
    """``path`` in one spelling, whatever the word for the optimizer is and however it is cut into keys."""
    keys = path if len(path) > 1 else tuple(str(path[0]).split("."))
    return ".".join(map(str, neutral_path(keys)[0]))
