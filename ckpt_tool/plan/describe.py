"""A plan as text: every byte range that will be read and written, for people and other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from ckpt_tool.plan.model import Pieces, Plan

__all__ = ["PLAN_SCHEMA", "plan_json"]

PLAN_SCHEMA = "ckpt-tool/tiles/1"


def plan_json(plan: Plan) -> Iterator[str]:
    """Lines of one JSON document, one tile per line, in the order of execution.

    Schema ``ckpt-tool/tiles/1``: ``schema``, ``fingerprint``, ``source``, ``target`` (URLs), ``stats``, ``casts``, and
    ``tiles``: ``fqn``, ``offsets`` and ``sizes`` (elements, global), ``unit``, ``reads`` and ``writes`` as ``[file,
    offset, length]`` in bytes; a read that is not contiguous gives its span.
    """
    head = {
        "schema": PLAN_SCHEMA,
        "fingerprint": plan.fingerprint,
        "source": plan.source.root,
        "target": plan.target.root,
        "stats": asdict(plan.stats),
        "casts": [{"fqn": c.fqn, "from": c.source.name, "to": c.target.name} for c in plan.casts],
    }
    yield json.dumps(head)[:-1] + ', "tiles": [\n'
    tiles = plan.tiles
    for unit, (first, last) in enumerate(
        zip(tiles.unit_bounds[:-1].tolist(), tiles.unit_bounds[1:].tolist(), strict=True)
    ):
        for tile in range(first, last):
            tensor = int(tiles.tensor[tile])
            ndim = int(plan.source.tensors.ndim[tensor])
            row = {
                "fqn": plan.source.tensors.fqns[tensor],
                "offsets": tiles.offsets[tile, :ndim].tolist(),
                "sizes": tiles.sizes[tile, :ndim].tolist(),
                "unit": unit,
                "reads": _ranges(plan.reads, tile, plan.source.files.paths),
                "writes": _ranges(plan.writes, tile, plan.target.files.paths),
            }
            yield json.dumps(row) + (",\n" if tile + 1 < len(tiles) else "\n")
    yield "]}\n"


def _ranges(pieces: Pieces, tile: int, paths: tuple[str, ...]) -> list[tuple[str, int, int]]:
    rows = range(int(pieces.starts[tile]), int(pieces.starts[tile + 1]))
    return [(paths[pieces.file[r]], int(pieces.file_offset[r]), int(pieces.length[r])) for r in rows]
