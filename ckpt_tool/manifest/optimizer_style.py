"""One optimizer under the names of another spelling; ``optimizer.OptimizerView`` tells the three of them.

Bytes stay where they are: tensors and objects get other names, and hyperparameters are listed by group or parameter.
The forms are those that torch 2.13 ``get_optimizer_state_dict`` and ``Optimizer.state_dict`` give, as DCP
flattens them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpt_tool.errors import UsageError
from ckpt_tool.manifest.model import Blob, KeyPath, Manifest
from ckpt_tool.manifest.optimizer import OptimizerView, ParameterKey, optimizer_views
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, counted_of

__all__ = ["STYLES", "Restyled", "restyle_optimizers"]

STYLES = {"ids": "ids", "fqn": "names", "fqn-flat": "flat"}
"""Spelling of an ``OptimizerView`` by the word for it on the command line."""


@dataclass(frozen=True, slots=True)
class Restyled:
    """A manifest and its objects under other names, and what was done."""

    manifest: Manifest
    blobs: tuple[Blob, ...]
    notes: tuple[str, ...]


def restyle_optimizers(manifest: Manifest, blobs: Sequence[Blob], style: str) -> Restyled:
    """Every optimizer of ``manifest`` in one of ``STYLES``; ``blobs`` are its objects, loaded.

    Raises:
        UsageError: no such style, no optimizer, parameters without a known name, or hyperparameters that are no values.
    """
    if style not in STYLES:
        raise UsageError(f"no optimizer style {style!r}", hint="one of: " + " ".join(STYLES))
    views = optimizer_views(manifest.replace(blobs=tuple(blobs)), with_stateless=True)
    if not views:
        raise UsageError(
            "there is no optimizer to spell otherwise", where=manifest.where, hint="leave --optim-style out"
        )
    spelling = STYLES[style]
    moved: dict[str, KeyPath] = {}
    added: list[Blob] = []
    marks: list[str] = []
    numbers: dict[str, str] = {}
    in_model = _model_names(manifest) if spelling == "ids" else {}
    notes = []
    for view in views:
        if view.spelling == spelling:
            continue
        names = _names(manifest, view, spelling)
        for key, states in view.parameters.items():
            for slot, fqn in states.items():
                moved[fqn] = _state_path(view.path, names[key], slot, spelling)
        added += _group_blobs(view, names, spelling)
        marks.append(_joined((*view.path, "param_groups")))
        if spelling == "ids":
            numbers |= {str(number): in_model.get(str(key), str(key)) for key, number in names.items()}
        notes.append(
            f"{view.prefix or 'the optimizer'}: {counted(len(names), 'parameter')}, now keyed by {_KEYED[spelling]}"
            + (f" ({view.evidence[-1]})" if view.spelling == "ids" and spelling != "ids" else "")
        )
        empty = [number for number, group in enumerate(view.groups) if not group.params]
        if spelling == "flat" and empty:
            notes.append(f"{view.prefix or 'the optimizer'}: groups {empty} have no parameters, so no name to be under")
    kept = [blob for blob in blobs if not any(f"{blob.fqn}.".startswith(f"{mark}.") for mark in marks)]
    info = {key: value for key, value in manifest.info.items() if key != "optimizer_parameters"}
    return Restyled(
        _moved_tensors(manifest, moved).replace(info={**info, "optimizer_parameters": numbers} if numbers else info),
        (*(_moved_blob(blob, moved) for blob in kept), *added),
        tuple(notes),
    )


_KEYED = {"ids": "number", "names": "name", "flat": "name, each hyperparameter too"}


def _names(manifest: Manifest, view: OptimizerView, spelling: str) -> dict[ParameterKey, ParameterKey]:
    """The new key of each parameter of a view, in the order of its groups."""
    unread = sorted({name for group in view.groups for name in group.unread})
    # Groups keep their numbers, and tensors their place in a group; by parameter there would have to be more of them.
    if unread and ("flat" in (spelling, view.spelling) or not _are_tensors(manifest, view)):
        raise UsageError(
            f"hyperparameters of {view.prefix or 'the optimizer'} are tensors or unread ({', '.join(unread)})",
            where=manifest.where,
            hint="leave --optim-style out: they keep their names then",
        )
    keys = list(dict.fromkeys([*(key for group in view.groups for key in group.params), *view.parameters]))
    if len({type(key) for key in keys}) > 1:
        raise UsageError(
            f"groups of {view.prefix or 'the optimizer'} number parameters whose state is named, and nothing tells "
            "which number is whose",
            where=manifest.where,
            hint="leave --optim-style out",
        )
    if spelling == "ids":
        return {key: number for number, key in enumerate(keys)}
    unknown = [key for key in keys if isinstance(key, int) and key not in view.names]
    if unknown:
        raise UsageError(
            f"{counted_of(len(unknown), len(keys), 'parameter', 'are')} known by their number only ({unknown[:4]}); "
            f"{view.evidence[-1]}",
            where=manifest.where,
            hint="leave --optim-style out",
        )
    return {key: _in_module(manifest, view.names[key]) if isinstance(key, int) else key for key in keys}


def _are_tensors(manifest: Manifest, view: OptimizerView) -> bool:
    """Whether every hyperparameter of a view that is no object is a tensor under the name that its group gives it."""
    paths = [(*view.path, "param_groups", g, name) for g, group in enumerate(view.groups) for name in group.unread]
    return all(_joined(path) in manifest.tensors.index for path in paths)


def _in_module(manifest: Manifest, fqn: str) -> str:
    """A parameter's name inside its module: without the key under which the model's state was saved."""
    path = manifest.tensor(fqn).path
    return _joined(path[1:]) or fqn


def _model_names(manifest: Manifest) -> dict[str, str]:
    """The tensor that each name means to an optimizer: the one of that name, or the first that has it in its module."""
    found: dict[str, str] = {}
    for fqn, path in zip(manifest.tensors.fqns, manifest.tensors.paths or (), strict=False):
        found.setdefault(_joined(path[1:]), fqn)
    return found | {fqn: fqn for fqn in manifest.tensors.fqns}


def _state_path(at: KeyPath, key: ParameterKey, slot: str, spelling: str) -> KeyPath:
    return (*at, f"state.{key}.{slot}") if spelling == "flat" else (*at, "state", key, slot)


def _group_blobs(view: OptimizerView, names: dict[ParameterKey, ParameterKey], spelling: str) -> Iterator[Blob]:
    for number, group in enumerate(view.groups):
        members = [names[key] for key in group.params]
        if spelling == "flat":
            paths = {(*view.path, f"param_groups.{member}.{name}"): value
                     for member in members for name, value in group.hyperparameters.items()}  # fmt: skip
        else:
            paths = {(*view.path, "param_groups", number, name): value for name, value in group.hyperparameters.items()}
            paths[(*view.path, "param_groups", number, "params")] = members
        for path, value in paths.items():
            yield Blob(_joined(path), "value", None, value, path, is_loaded=True)


def _joined(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def _moved_tensors(manifest: Manifest, moved: dict[str, KeyPath]) -> Manifest:
    tensors = manifest.tensors
    paths = tensors.paths or tuple((fqn,) for fqn in tensors.fqns)
    return manifest.replace(
        tensors=replace(
            tensors,
            fqns=tuple(_joined(moved[fqn]) if fqn in moved else fqn for fqn in tensors.fqns),
            paths=tuple(moved.get(fqn, path) for fqn, path in zip(tensors.fqns, paths, strict=True)),
        )
    )


def _moved_blob(blob: Blob, moved: dict[str, KeyPath]) -> Blob:
    path = moved.get(blob.fqn)
    return blob if path is None else replace(blob, fqn=_joined(path), path=path)
