"""What tensors are called in the target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt_tool.errors import LayoutError
from ckpt_tool.manifest.model import KeyPath, Manifest
from ckpt_tool.manifest.tables import TensorTable

__all__ = ["module_names", "renamed"]

# Keys under which trainers put the module's own state dict, and prefixes that wrappers add to a module's names.
_STATE_KEYS = frozenset({"model", "module", "state_dict", "model_state_dict", "app"})
_WRAPPER_PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "module.", "_checkpoint_wrapped_module.")


def module_names(paths: Iterable[KeyPath]) -> list[str]:
    """The name that the module itself gives each tensor: without the trainer's outer key and wrappers' prefixes.

    >>> module_names([("model", "lm_head.weight"), ("w",), ("state_dict", "module._orig_mod.w")])
    ['lm_head.weight', 'w', 'w']
    """
    names = []
    for path in paths:
        keys = list(path)
        while len(keys) > 1 and keys[0] in _STATE_KEYS:
            keys.pop(0)
        name = ".".join(str(key) for key in keys)
        stripped = True
        while stripped:
            stripped = False
            for prefix in _WRAPPER_PREFIXES:
                if name.startswith(prefix):
                    name, stripped = name[len(prefix) :], True
        for prefix in _WRAPPER_PREFIXES[:2] + _WRAPPER_PREFIXES[3:]:  # wrappers of inner modules
            name = name.replace(f".{prefix}", ".")
        names.append(name)
    return names


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
