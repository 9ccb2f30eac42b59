"""The tree of an inspection: tensors by the parts of their names, with equal layers folded into one.

Two folds keep a model of a thousand tensors on one screen: siblings that are numbers and hold the same (names, types,
shapes) become ``0-31``, siblings that are single tensors of one type and shape become ``{k_proj,v_proj}.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ckpt_tool.cli.text import Cell, Line, Span, columns, cut, line, plain, width_of
from ckpt_tool.dtypes import short_name
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted, format_bytes

if TYPE_CHECKING:
    from ckpt_tool.api.inspect import TensorRow

__all__ = ["number_ranges", "parts_text", "tree_lines"]

_NAMES_IN_BRACES = 4
_WIDTH_WITH_PARTS = 96
_LEAST_NAME = 20
_MAX_DEPTH = 64  # a name of a million dots must not exhaust the stack


@dataclass(slots=True)
class _Node:
    """A prefix of names: what is below it, or the tensor that it names, or both."""

    children: dict[str, _Node] = field(default_factory=dict)
    tensor: TensorRow | None = None
    kind: int = -1
    """Equal for nodes that hold the same, in any order, and only for those."""
    n_tensors: int = 0
    nbytes: int = 0
    entries: list[_Entry] | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of the tree: nodes that are equal but for their names."""

    label: str
    nodes: tuple[_Node, ...]


def number_ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as ranges; a step is written behind a colon.

    >>> number_ranges([0, 1, 2, 5]), number_ranges([1, 3, 5, 7]), number_ranges([4]), number_ranges([0, 1])
    ('0-2,5', '1-7:2', '4', '0,1')
    """
    values = sorted(numbers)
    texts: list[str] = []
    at = 0
    while at < len(values):
        end = at + 1
        step = values[end] - values[at] if end < len(values) else 1
        while end < len(values) and values[end] - values[end - 1] == step:
            end += 1
        if end - at > 2:
            texts.append(f"{values[at]}-{values[end - 1]}" + (f":{step}" if step > 1 else ""))
            at = end
        else:
            texts.append(str(values[at]))
            at += 1
    return ",".join(texts)


def parts_text(row: TensorRow) -> str:
    """How a tensor is cut: ``4x1`` parts along its dimensions, and copies; nothing for one whole box.

    Boxes that do not form a grid (flat slices) are counted.
    """
    n_parts = 1
    for n in row.parts:
        n_parts *= n
    copies = f"{row.n_copies} copies" if row.n_copies > 1 else ""
    n_stored = row.n_chunks // max(row.n_copies, 1)
    if 0 in row.shape:
        return "empty"
    if row.n_chunks == 0:
        return "not stored"
    if n_parts == 1:
        return copies
    if n_parts > n_stored:
        return counted(row.n_chunks, "box")
    return "x".join(str(n) for n in row.parts) + (copies and f", {copies}")


def tree_lines(
    rows: Sequence[TensorRow], *, width: int, depth: int | None = None, limit: int | None = None
) -> list[Line]:
    """The tree as aligned lines.

    Args:
        rows: tensors, in the order to show.
        width: columns of the terminal; the column of parts is left out, then names are cut, where it is too narrow.
        depth: levels to show, None for all; what is below is counted.
        limit: most lines, None for all; the rest is counted.
    """
    root = _grown(rows)
    _sum(root, {})
    table: list[list[Cell]] = []
    _walk(root, "", table, depth, is_root=True)
    n_left = 0
    if limit is not None and len(table) > limit:
        table, n_left = table[:limit], len(table) - limit
    heads: list[Cell] = [Span(head, "dim") for head in ("", "type", "shape", "size", "parts")]
    if not any(how and not how.endswith(" each") for how in (plain(line(row[4])) for row in table)):
        heads[4] = ""
    lines = _fitted([heads, *table], width)
    if n_left:
        lines.append(line(Span(f"… {counted(n_left, 'more line')}; --limit 0 shows all", "dim")))
    return lines


def _grown(rows: Sequence[TensorRow]) -> _Node:
    root = _Node()
    for row in rows:
        node = root
        for part in row.fqn.split(".", _MAX_DEPTH):
            node = node.children.setdefault(part, _Node())
        node.tensor = row
    return root


def _sum(node: _Node, kinds: dict[object, int]) -> None:
    """Fill in totals and kinds from the leaves up. Names have few parts, so recursion is shallow."""
    for child in node.children.values():
        _sum(child, kinds)
    own = node.tensor
    node.n_tensors = sum(child.n_tensors for child in node.children.values()) + (own is not None)
    node.nbytes = sum(child.nbytes for child in node.children.values()) + (own.nbytes if own else 0)
    shape = (own.dtype, own.shape) if own else None
    key = (shape, frozenset((name, child.kind) for name, child in node.children.items()))
    node.kind = kinds.setdefault(key, len(kinds))


def _entries(node: _Node) -> list[_Entry]:
    """The lines directly below a node, in order of first appearance, equal siblings together; kept in the node."""
    if node.entries is not None:
        return node.entries
    groups: dict[tuple[str, str, object], list[tuple[str, _Node]]] = {}
    for name, child in node.children.items():
        tail, last = _chain(child)
        bundle = _bundle(last)
        kind = "number" if name.isdecimal() else "leaf" if bundle else "single"
        how = (
            {parts_text(tensor) for tensor in bundle} if kind == "leaf" else ()
        )  # not of layers: only shapes fold them
        key = (kind, tail, name if kind == "single" else (last.kind, frozenset(how)))
        groups.setdefault(key, []).append((name, last))
    node.entries = [_entry(kind, tail, members) for (kind, tail, _), members in groups.items()]
    return node.entries


def _entry(kind: str, tail: str, members: list[tuple[str, _Node]]) -> _Entry:
    names = [name for name, _ in members]
    head = number_ranges(int(name) for name in names) if kind == "number" else _braced(names)
    nodes = tuple(found for _, found in members)
    label = f"{head}.{tail}" if tail else head
    leaves = list(nodes[0].children)
    if leaves and _bundle(nodes[0]):
        return _Entry(f"{label}.{_braced(leaves)}", nodes)
    if nodes[0].children and nodes[0].tensor is None:
        below = _entries(nodes[0])
        if len(below) == 1:  # nothing beside it: one line for both
            return _Entry(
                f"{label}.{below[0].label}", tuple(found for node in nodes for found in _entries(node)[0].nodes)
            )
    return _Entry(label, nodes)


def _braced(names: Sequence[str]) -> str:
    """Several names as one.

    >>> _braced(["q", "k"]), _braced(["q"])
    ('{q,k}', 'q')
    """
    if len(names) == 1:
        return names[0]
    return "{" + ",".join(names[:_NAMES_IN_BRACES]) + (",…" if len(names) > _NAMES_IN_BRACES else "") + "}"


def _chain(node: _Node) -> tuple[str, _Node]:
    """The names below a node that have nothing beside them, and the node where that ends: ``weight``."""
    names: list[str] = []
    while len(node.children) == 1 and node.tensor is None:
        ((below, child),) = node.children.items()
        if below.isdecimal():
            break
        names.append(below)
        node = child
    return ".".join(names), node


def _bundle(node: _Node) -> list[TensorRow]:
    """The tensors that one line can stand for: one, or all that a node holds if they look alike; else none.

    Alike are those of one type and shape, single numbers aside: the moments of a parameter and its step.
    """
    if not node.children:
        return [] if node.tensor is None else [node.tensor]
    tensors = [child.tensor for child in node.children.values() if child.tensor is not None and not child.children]
    if node.tensor is not None or len(tensors) < len(node.children) or any(n.isdecimal() for n in node.children):
        return []
    looks = {(tensor.dtype, tensor.shape) for tensor in tensors if tensor.shape not in {(), (1,)}}
    return tensors if len(looks) <= 1 else []


def _walk(node: _Node, indent: str, table: list[list[Cell]], depth: int | None, *, is_root: bool = False) -> None:
    entries = _entries(node)
    for at, entry in enumerate(entries):
        is_last = at == len(entries) - 1
        branch = "" if is_root else "└─ " if is_last else "├─ "
        table.append(_row(entry, indent + branch))
        below = entry.nodes[0]
        if not _bundle(below) and (depth is None or depth > 1):
            bar = "" if is_root else "   " if is_last else "│  "
            _walk(below, indent + bar, table, None if depth is None else depth - 1)


def _row(entry: _Entry, branch: str) -> list[Cell]:
    """Cells of one line; below a line for n equal ones, sizes are those of one of them."""
    n = len(entry.nodes)
    nbytes = sum(node.nbytes for node in entry.nodes)
    n_tensors = sum(node.n_tensors for node in entry.nodes)
    bundle = _bundle(entry.nodes[0])
    if not bundle:
        label = line(Span(branch, "dim"), Span(entry.label, "bold"), Span(f" x{n:,}" if n > 1 else "", "yellow"))
        each = Span(f"{format_bytes(entry.nodes[0].nbytes)} each", "dim") if n > 1 else ""
        return [label, Span(counted(n_tensors, "tensor"), "dim"), "", format_bytes(nbytes), each]
    label = line(Span(branch, "dim"), entry.label, Span(f" x{n_tensors:,}" if n_tensors > 1 else "", "yellow"))
    widest = max(bundle, key=lambda tensor: len(tensor.shape))
    parts = {parts_text(found) for node in entry.nodes for found in _bundle(node) if found.shape == widest.shape}
    shapes = list(dict.fromkeys(str(list(found.shape)) for found in sorted(bundle, key=lambda t: -len(t.shape))))
    how = parts.pop() if len(parts) == 1 else "mixed"
    return [label, Span(widest.dtype, "cyan"), " ".join(shapes), format_bytes(nbytes), Span(how, "dim")]


def _fitted(table: list[list[Cell]], width: int) -> list[Line]:
    """Aligned lines no wider than ``width``.

    Types become short, parts go where little room is, names are cut, and at last types and shapes go.
    """
    lines = columns(table, "lllrl")
    if _widest(lines) <= width:
        return lines
    table = [[row[0], _short(row[1]), row[2], row[3], row[4] if width >= _WIDTH_WITH_PARTS else ""] for row in table]
    for spared in ((), (1,), (1, 2)):
        kept = [["" if at in spared else cell for at, cell in enumerate(row)] for row in table]
        excess = _widest(columns(kept, "lllrl")) - width
        room = max(max(width_of(row[0]) for row in kept) - max(excess, 0), _LEAST_NAME)
        lines = columns([[_cut(row[0], room), *row[1:]] for row in kept], "lllrl")
        if _widest(lines) <= width:
            break
    return lines


def _widest(lines: Sequence[Line]) -> int:
    return max((width_of(found) for found in lines), default=0)


def _short(cell: Cell) -> Cell:
    """Types as f32, bf16, i64; counts without their noun."""
    if not isinstance(cell, Span):
        return cell
    return Span(short_name(cell.text.removesuffix("s").removesuffix(" tensor")), cell.style)


def _cut(label: Cell, room: int) -> Cell:
    """A label of branch, name and count with its name cut."""
    if not isinstance(label, tuple) or width_of(label) <= room:
        return label
    branch, name, *count = label
    return line(branch, *cut((name,), room - width_of(branch) - sum(width_of(c) for c in count)), *count)
