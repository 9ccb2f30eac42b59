"""State of an optimizer over flat parameters: numbered in their order, it is cut up as they are and named by parameter.

Ranks of FSDP1, FairScale and torch_xla save ``optimizer.state_dict()`` as it is: ``state.0.exp_avg`` is a part of
the first vector's, padded as the vector is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpt_tool.manifest.alias import with_aliases
from ckpt_tool.manifest.flat_parameters import Vector, unflatten
from ckpt_tool.manifest.model import Blob, KeyPath, Manifest, TensorMeta
from ckpt_tool.manifest.optimizer import OptimizerView, optimizer_views
from ckpt_tool.records import dataclass

__all__ = ["FlatOptimizer", "flat_optimizers", "unflatten_all"]

_ASSUMED = "replicated_by_assumption"
_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


@dataclass(frozen=True, slots=True)
class FlatOptimizer:
    """An optimizer whose numbers are those of flat parameters."""

    path: KeyPath
    """The keys in front of ``state``."""
    names: Mapping[int, tuple[str, ...]]
    """By number: the parameters in its vector."""
    vectors: Mapping[str, Vector]
    """By fqn: the states that are vectors themselves."""

    def named(self, manifest: Manifest) -> Manifest:
        """``manifest``, whose vectors are cut already, with what else this optimizer has called by parameters too.

        A counter of a vector becomes one of each parameter in it, and groups list parameters by name.
        """
        metas: list[TensorMeta] = list(manifest.tensors)
        copies: list[tuple[int, TensorMeta]] = []
        renamed: dict[str, list[str]] = {}
        for row, meta in enumerate(manifest.tensors):
            paths = self._paths(meta.path)
            if paths:
                metas[row], *others = (replace(meta, fqn=".".join(map(str, path)), path=path) for path in paths)
                copies += [(row, other) for other in others]
                renamed[meta.fqn] = [metas[row].fqn, *(other.fqn for other in others)]
        tensors = type(manifest.tensors).from_records(metas)
        blobs = tuple(named for blob in manifest.blobs for named in self._blobs(blob))
        info = {key: value for key, value in manifest.info.items() if key not in ("optimizer_parameters", _ASSUMED)}
        assumed = [name for fqn in manifest.info.get(_ASSUMED, ()) for name in renamed.get(fqn, (fqn,))]
        info |= {_ASSUMED: assumed} if assumed else {}
        return with_aliases(manifest.replace(tensors=tensors, blobs=blobs, info=info), copies)

    def _blobs(self, blob: Blob) -> Iterator[Blob]:
        paths = self._paths(blob.path)
        if paths:
            yield from (replace(blob, fqn=".".join(map(str, path)), path=path) for path in paths)
            return
        n = len(self.path)
        is_members = blob.path[:n] == self.path and blob.path[n : n + 1] == (_GROUPS,) and blob.path[-1] == _PARAMS
        if is_members and isinstance(blob.value, (list, tuple)):
            names = [name for number in blob.value for name in self.names.get(number, ())]
            yield replace(blob, value=names, where=None, kind="value")
            return
        yield blob

    def _paths(self, path: KeyPath) -> list[KeyPath]:
        """The paths by parameter of what lies at ``path``; none where that is no state by number."""
        n = len(self.path)
        if path[:n] != self.path or path[n : n + 1] != (_STATE,) or len(path) < n + 3:
            return []
        return [(*path[: n + 1], name, *path[n + 2 :]) for name in self.names.get(_number(path[n + 1]), ())]


def flat_optimizers(manifest: Manifest, vectors: Sequence[Vector]) -> list[FlatOptimizer]:
    """The optimizers of ``manifest`` over ``vectors``, which are all that the model trains, in its order.

    An optimizer is one where it numbers as many parameters, and each of its states has one element, or as many as the
    ranks' equal parts of the vector of that number.
    """
    found = []
    for view in optimizer_views(manifest):
        numbers = {*view.parameters, *(key for group in view.groups for key in group.params)}
        if view.spelling == "ids" and numbers == {*range(len(vectors))}:
            states = _states(manifest, view, vectors)
            if states is not None:
                names = {number: tuple(s.fqn for s in vector.flat.segments) for number, vector in enumerate(vectors)}
                found.append(FlatOptimizer(view.path, names, states))
    return found


def unflatten_all(manifest: Manifest, vectors: Mapping[str, Vector], optimizers: Sequence[FlatOptimizer]) -> Manifest:
    """``manifest`` with parameters in place of ``vectors``, by fqn, and of the state that ``optimizers`` have of them.

    Raises:
        CkptError: see ``unflatten``.
    """
    cut = unflatten(manifest, {**vectors, **{fqn: one for found in optimizers for fqn, one in found.vectors.items()}})
    for optimizer in optimizers:
        cut = optimizer.named(cut)
    return cut


def _states(manifest: Manifest, view: OptimizerView, vectors: Sequence[Vector]) -> dict[str, Vector] | None:
    """The states that are vectors; None where one has another size than its parameter."""
    found: dict[str, Vector] = {}
    for number, states in view.parameters.items():
        flat = vectors[int(number)].flat
        for state, fqn in states.items():
            row = manifest.tensors.index.get(fqn)
            if row is None or not manifest.tensors.ndim[row]:
                continue
            n_parts = max(len(manifest.chunks.rows_of(row)), 1)
            shape = manifest.tensors.shape_of(row)
            if len(shape) != 1 or shape[0] != -(-flat.numel // n_parts):
                return None
            found[fqn] = Vector(flat, (*view.path, _STATE), (state,))
    return found


def _number(key: str | int) -> int:
    return key if isinstance(key, int) else -1
