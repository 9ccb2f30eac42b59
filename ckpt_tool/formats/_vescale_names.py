"""Names in veScale's checkpoints, which have the model in one DCP folder, and an optimizer's for each pipeline stage.

As veScale 0.0.1 writes them (``vescale/checkpoint/api/vescale_checkpointer.py``, ``planner/vescale``,
``vescale/optim/distributed_optimizer.py``); of several pipeline stages there are the sources alone, and no bytes. Its
writer is torch's, with a storage record of its own. An optimizer's state is keyed by dtype, then by model chunk and
name, and its masters are called ``shard_casted_float16_groups``. Moments and masters are whole boxes in the shape of
the weights: flat parts, as data-parallel ranks hold them, are joined before they are written.

Names: states are ``optimizer.state.<parameter>.<state>``; what else a stage has keeps its keys below
``optimizer.pp_<stage>``.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from ckpt_tool.manifest.model import KeyPath, Manifest
from ckpt_tool.manifest.tables import SECTIONS

__all__ = ["vescale_names"]

_DTYPE = re.compile(r"torch\.\w+")
_PARAMETER = re.compile(r"\((?P<chunk>-?\d+), '(?P<name>.+)'\)")


def vescale_names(folder: str, part: Manifest) -> Manifest:
    """A part under the whole's names."""
    if not folder.startswith("optimizer/"):
        return part
    stage = folder.rpartition("/")[2]
    tensors = part.tensors
    paths = tensors.paths or tuple((fqn,) for fqn in tensors.fqns)
    given = [*paths, *(blob.path for blob in part.blobs)]
    parameters = {(found["chunk"], found["name"]) for found in map(_parameter, given) if found is not None}
    chunks = Counter(name for _, name in parameters)
    moved = [_moved(path, stage, chunks) for path in given]
    new = replace(
        tensors,
        fqns=tuple(".".join(map(str, path)) for path in moved[: len(paths)]),
        paths=tuple(moved[: len(paths)]),
        section=tensors.section * 0 + SECTIONS.index("optimizer"),
    )
    blobs = tuple(
        replace(blob, fqn=".".join(map(str, path)), path=path)
        for blob, path in zip(part.blobs, moved[len(paths) :], strict=True)
    )
    return part.replace(tensors=new, blobs=blobs)


def _parameter(path: KeyPath) -> re.Match[str] | None:
    if len(path) < 3 or not _DTYPE.fullmatch(str(path[0])):
        return None
    return _PARAMETER.fullmatch(str(path[1]))


def _moved(path: KeyPath, stage: str, chunks: Counter[str]) -> KeyPath:
    """A key path; a name that several model chunks have keeps the chunk's number in front."""
    found = _parameter(path)
    if found is None:
        return ("optimizer", stage, *path)
    name = found["name"] if chunks[found["name"]] <= 1 else f"{found['chunk']}.{found['name']}"
    return ("optimizer", "state", name, *path[2:])
