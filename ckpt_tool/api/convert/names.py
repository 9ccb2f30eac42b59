"""What tensors are called in the target."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.names import without_wrappers
from ckpt_tool.manifest.model import KeyPath, Manifest
from ckpt_tool.manifest.sections import WRAPPERS
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.sizes import counted, shell_word, some_of

__all__ = ["beside_model_notes", "module_names", "renamed", "replaced"]

# Keys under which trainers put the module's own state dict.
_STATE_KEYS = frozenset({"model", "module", "state_dict", "model_state_dict", "app"})


def module_names(paths: Iterable[KeyPath]) -> list[str]:
    """The name that the module itself gives each tensor: without the trainer's outer key and wrappers' prefixes.

    >>> module_names(
    ...     [("model", "lm_head.weight"), ("w",), ("state_dict", "module._orig_mod.w"), ("state", "model", "w")]
    ... )
    ['lm_head.weight', 'w', 'w', 'w']
    """
    names = []
    for path in paths:
        name = ".".join(str(key) for key in path[_n_outer_keys(path) :])
        names.append(without_wrappers(name))
    return names


def beside_model_notes(paths: Sequence[KeyPath]) -> tuple[str, ...]:
    """What to say where a trainer keeps the module under a key of its own, and other tensors are exported with it.

    >>> beside_model_notes([("model", "w"), ("criterion", "weight"), ("best_loss",)])
    ("beside 'model', 2 tensors are written too: best_loss, criterion.weight (to leave out: --exclude 'criterion.*')",)
    >>> beside_model_notes([("model", "w"), ("model", "b")]), beside_model_notes([("w",), ("criterion", "weight")])
    ((), ())
    """
    of_module = [_n_outer_keys(path) for path in paths]
    outer = next((".".join(map(str, path[:n])) for path, n in zip(paths, of_module, strict=True) if n), None)
    beside = [path for path, n in zip(paths, of_module, strict=True) if not n]
    if outer is None or not beside:
        return ()
    names = sorted(".".join(map(str, path)) for path in beside)
    first = beside[0]
    pattern = f"{first[0]}.*" if len(first) > 1 else str(first[0])
    what = counted(len(beside), "tensor", "are")
    return (f"beside {outer!r}, {what} written too: {some_of(names)} (to leave out: --exclude {shell_word(pattern)})",)


def _n_outer_keys(path: KeyPath) -> int:
    """How many keys of a path are what trainers put around a module's own names."""
    n = 0
    while len(path) > n + 1:
        if path[n] in _STATE_KEYS:
            n += 1
        elif path[n] in WRAPPERS and len(path) > n + 2 and path[n + 1] in _STATE_KEYS:
            n += 2
        else:
            break
    return n


def renamed(manifest: Manifest, names: Mapping[str, str]) -> Manifest:
    """``manifest`` with some tensors called otherwise, over the same bytes; renamed tensors lie at the root.

    Raises:
        LayoutError: two tensors would get one name.
    """
    tensors = manifest.tensors
    fqns = tuple(names.get(fqn, fqn) for fqn in tensors.fqns)
    seen: dict[str, str] = {}
    for before, after in zip(tensors.fqns, fqns, strict=True):
        if after in seen:
            raise LayoutError(
                f"{seen[after]!r} and {before!r} would both be called {after!r}",
                hint="keep their names with --names source, or leave one out with --exclude",
            )
        seen[after] = before
    paths = tensors.paths
    if paths is not None:
        paths = tuple(
            path if after == before else (after,) for path, before, after in zip(paths, tensors.fqns, fqns, strict=True)
        )
    table = TensorTable(fqns, tensors.dtypes, tensors.shape, tensors.ndim, tensors.section, paths)
    return manifest.replace(tensors=table)


def replaced(pattern: re.Pattern[str], text: str, name: str) -> tuple[str, int]:
    r"""A name with what a pattern finds replaced, and how often; nothing is found behind the end of what was.

    >>> replaced(re.compile(".*"), "new", "old"), replaced(re.compile("^"), "model.", "w")
    (('new', 1), ('model.w', 1))
    """
    end = -1
    count = 0

    def one(match: re.Match[str]) -> str:
        nonlocal end, count
        is_behind = match.start() == match.end() == end
        end = match.end()
        count += not is_behind
        return "" if is_behind else match.expand(text)

    return pattern.sub(one, name), count
