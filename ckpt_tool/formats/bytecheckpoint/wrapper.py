"""DDP's name for the module that it wraps, ``module.``, which ByteCheckpoint keeps in names, and FSDP does not have.

A DDP state numbers the optimizer's parameters, an FSDP one names them (``bytecheckpoint`` 0.0.2, ``planner/``); its
loader takes each for what it is, and finds nothing under the names of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.manifest.model import Blob, KeyPath, Manifest

__all__ = ["with_wrapper"]

_WRAPPER = "module."
_MODEL, _OPTIMIZER, _STATE, _GROUPS = "model", "optimizer", "state", "param_groups"


def with_wrapper(manifest: Manifest, blobs: Sequence[Blob], *, is_ddp: bool) -> tuple[Manifest, tuple[Blob, ...]]:
    """The same under the names that DDP's states have, or FSDP's; nothing changes where they are so already."""
    paths = manifest.tensors.paths or [(fqn,) for fqn in manifest.tensors.fqns]
    names = [str(path[1]) for path in paths if len(path) > 1 and path[0] == _MODEL]
    is_wrapped = bool(names) and all(name.startswith(_WRAPPER) for name in names)
    if not names or is_wrapped == is_ddp:
        return manifest, tuple(blobs)
    moved = [_moved(path, is_ddp=is_ddp) for path in paths]
    fqns = tuple(".".join(map(str, path)) for path in moved)
    tensors = replace(manifest.tensors, fqns=fqns, paths=tuple(moved))
    found = [
        replace(blob, path=path, fqn=".".join(map(str, path)), value=_value(blob.value, path, is_ddp=is_ddp))
        if (path := _moved(blob.path, is_ddp=is_ddp))[:2] in ((_OPTIMIZER, _GROUPS), (_OPTIMIZER, _STATE))
        else blob
        for blob in blobs
    ]
    return manifest.replace(tensors=tensors), tuple(found)


def _moved(path: KeyPath, *, is_ddp: bool) -> KeyPath:
    """A tensor's path with the parameter called otherwise."""
    at = 1 if path[:1] == (_MODEL,) else 2 if path[:2] == (_OPTIMIZER, _STATE) else len(path)
    if at >= len(path) or not isinstance(path[at], str):
        return path
    return (*path[:at], _renamed(str(path[at]), is_ddp=is_ddp), *path[at + 1 :])


def _renamed(name: str, *, is_ddp: bool) -> str:
    return _WRAPPER + name if is_ddp else name.removeprefix(_WRAPPER)


def _value(value: Any, path: KeyPath, *, is_ddp: bool) -> Any:
    """Parameter groups, or a part of them, with the names in their lists of parameters."""
    if isinstance(value, list) and path[-1:] == ("params",):
        return [_renamed(name, is_ddp=is_ddp) if isinstance(name, str) else name for name in value]
    if isinstance(value, list):
        return [_value(one, path, is_ddp=is_ddp) for one in value]
    if isinstance(value, Mapping):
        return {key: _value(one, (*path, str(key)), is_ddp=is_ddp) for key, one in value.items()}
    return value
