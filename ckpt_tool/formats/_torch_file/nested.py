"""A nested state dict is put together again from values and the keys that lead to them: the inverse of ``entries``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ckpt_tool.errors import Unsupported
from ckpt_tool.manifest.model import KeyPath

__all__ = ["nest"]


def nest(entries: Iterable[tuple[KeyPath, Any]], *, int_keyed: Collection[str] = ()) -> Any:
    """Dicts and lists that have each value at its path, keys in order of first appearance.

    A container whose keys are 0, 1, 2 ... becomes a list, unless its dotted name is in ``int_keyed``, where that of the
    outermost is empty, or its own key is ``state``, as in an optimizer's state by parameter number.

    >>> nest([(("groups", 0, "lr"), 0.1), (("state", 0, "step"), 7)])
    {'groups': [{'lr': 0.1}], 'state': {0: {'step': 7}}}

    Raises:
        Unsupported: two values have one path, or one value's path leads through another value.
    """
    found = list(entries)
    if len(found) == 1 and not found[0][0]:
        return found[0][1]
    root = _Node()
    for path, value in found:
        if not path:
            raise Unsupported("a value without keys cannot stand beside others in one file")
        node = root
        for key in path[:-1]:
            child = node.setdefault(key, _Node())
            if not isinstance(child, _Node):
                raise Unsupported(f"{list(path)} leads through another value, so both do not fit into one nested dict")
            node = child
        if path[-1] in node:
            raise Unsupported(f"two values have the keys {list(path)}, so they do not fit into one nested dict")
        node[path[-1]] = value
    return _plain(root, (), frozenset(int_keyed))


class _Node(dict[Any, Any]):
    """A container under construction, so that it is not taken for a value that is a dict."""


def _plain(node: _Node, path: KeyPath, int_keyed: frozenset[str]) -> Any:
    children = {
        key: _plain(child, (*path, key), int_keyed) if isinstance(child, _Node) else child
        for key, child in node.items()
    }
    is_sequence = set(children) == set(range(len(children))) and all(type(key) is int for key in children)
    if is_sequence and children and path[-1:] != ("state",) and ".".join(map(str, path)) not in int_keyed:
        return [children[position] for position in range(len(children))]
    return children
