"""What a training state has beside its tensors: random states of each rank, the schedule of the learning rate.

accelerate's ``load_state`` ends without the schedule and goes on with other random numbers without random states;
transformers' Trainer goes on without both. Knows names only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.storage.store import Listing

__all__ = ["companion_findings", "side_files"]

# accelerate (1.15) and transformers (5.24): a file for each rank, the first one's name without ranks.
_RANDOM = (
    (re.compile(r"random_states_(\d+)\.pkl"), "random_states_{}.pkl"),
    (re.compile(r"rng_state_(\d+)\.pth"), "rng_state_{}.pth"),
)
_RANDOM_OF_ONE = "rng_state.pth"
_SCHEDULE = re.compile(r"(?:lr_)?scheduler(?:_\d+)?\.(?:bin|pt|pth)")
_SCHEDULED = ".initial_lr"
"""What a schedule of torch's leaves in an optimizer's groups."""
_TRAINER = ("trainer_state.json", "optimizer.pt")
_OTHERS = re.compile(
    r"(?:scaler(?:_\d+)?\.(?:pt|pth)|(?:dl_)?sampler(?:_\d+)?\.bin|optimizer(?:_\d+)?\.(?:pt|bin)|training_args\.bin"
    r"|dl_state_dict(?:_\d+)?\.bin|custom_checkpoint_\d+\.pkl)"
)
"""What else the two save, each by ``torch.save``."""
_MAX_RANKS = 4096


def companion_findings(manifest: Manifest, listing: Listing) -> Iterator[Finding]:
    """Files of a training state by accelerate or transformers that others tell of."""
    if listing.entry is not None:
        return
    top = [path for path in listing.paths if "/" not in path]
    is_trainer = all(path in top for path in _TRAINER)
    world_size = manifest.info.get("world_size")
    n_ranks = max(world_size if type(world_size) is int else 0, int(manifest.chunks.rank.max(initial=-1)) + 1)
    yield from _random_findings(manifest, top, n_ranks, is_trainer=is_trainer)
    if {"rng_state", "scheduler"} <= {path.partition(".")[0].partition("_0")[0] for path in top}:
        yield from _trainer_findings(top, listing)
    is_scheduled = manifest.format == "accelerate" and any(blob.fqn.endswith(_SCHEDULED) for blob in manifest.blobs)
    if (is_scheduled or is_trainer) and not any(_SCHEDULE.fullmatch(path) for path in top):
        path = "scheduler.pt" if is_trainer else "scheduler.bin"
        why = "beside optimizer.pt" if is_trainer else "though the optimizer's initial_lr is what a schedule leaves"
        said = f"{path} is not here, {why}: a run that goes on from here starts its learning rate anew, or ends"
        yield Finding("missing-file", Severity.WARNING, said, where=FileRange(path, 0, 0))


def _trainer_findings(top: list[str], listing: Listing) -> Iterator[Finding]:
    """The optimizer and the state of a Trainer that saved a schedule and random states, as it does with both."""
    if "trainer_state.json" not in top:
        said = "trainer_state.json is not here, though a schedule and random states are: no run goes on from here"
        yield Finding("missing-file", Severity.WARNING, said, where=FileRange("trainer_state.json", 0, 0))
    elif not any("optim" in path or path.startswith("global_step") for path in listing.paths):
        said = "optimizer.pt is not here, though a schedule and random states are: a run goes on with a new optimizer"
        yield Finding("missing-file", Severity.WARNING, said, where=FileRange("optimizer.pt", 0, 0))


def side_files(manifest: Manifest, listing: Listing) -> tuple[str, ...]:
    """Torch files that accelerate and transformers save beside the tensors, those that are no part of the manifest."""
    if listing.entry is not None:
        return ()
    used = {entry.path if entry.part is None else entry.part.path for entry in manifest.files}
    known = (*(pattern for pattern, _ in _RANDOM), re.compile(re.escape(_RANDOM_OF_ONE)), _SCHEDULE, _OTHERS)
    return tuple(
        path
        for path in listing.paths
        if "/" not in path and path not in used and any(pattern.fullmatch(path) for pattern in known)
    )


def _random_findings(manifest: Manifest, top: list[str], n_ranks: int, *, is_trainer: bool) -> Iterator[Finding]:
    for pattern, name in _RANDOM:
        ranks = {int(found[1]) for path in top if (found := pattern.fullmatch(path)) is not None}
        if not ranks and _is_expected(manifest, name, top, is_trainer=is_trainer):
            one = _RANDOM_OF_ONE if is_trainer else name.format(0)
            path = one if n_ranks < 2 else name.format("*")
            said = (
                f"{path} is not here, the random states of each rank: a run that goes on from here draws other numbers"
            )
            yield Finding("missing-file", Severity.WARNING, said, where=FileRange(path, 0, 0))
        for rank in sorted(set(range(min(max(n_ranks, *ranks, 0), _MAX_RANKS))) - ranks) if ranks else ():
            path = name.format(rank)
            said = f"{path} is not here, the random states of rank {rank}, though those of other ranks are"
            yield Finding("missing-file", Severity.WARNING, said, where=FileRange(path, 0, 0))


def _is_expected(manifest: Manifest, name: str, top: list[str], *, is_trainer: bool) -> bool:
    """Whether files of this name belong to a checkpoint that has none of them."""
    others = any(pattern.fullmatch(path) for path in top for pattern, _ in _RANDOM) or _RANDOM_OF_ONE in top
    if others:
        return False
    if is_trainer:
        return name.startswith("rng_state")
    has_optimizer = any(str(part.get("folder", "")).startswith("optimizer") for part in manifest.info.get("parts", ()))
    return manifest.format == "accelerate" and has_optimizer and name.startswith("random_states")
