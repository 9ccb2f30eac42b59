"""The rules of the package's layers, as data, and the checker that reads them off the sources.

Knows module names and import statements; executes nothing.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ROOT = "ckpt_tool"

# From the bottom up. A part imports parts of lower rows only, never one of its own row.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "records"),
    ("dtypes", "numerals", "sizes", "checksum"),
    ("geometry",),
    ("manifest",),
    ("layout", "storage"),
    ("formats", "plan"),
    ("engine", "frameworks", "checks", "compare"),
    ("api",),
    ("cli",),
    ("__init__", "__main__"),
)

# Lower parts that a part nevertheless does without: the planner knows neither a mesh nor a store, a format no layout,
# and a command calls the api (it may name the records that it prints).
KEPT_APART: Mapping[str, frozenset[str]] = {
    "cli": frozenset({"geometry", "storage", "formats", "plan", "frameworks"}),
    "plan": frozenset({"layout", "storage"}),
    "formats": frozenset({"layout"}),
}

# Third-party packages that only these modules may import (a module, and whatever begins with its name).
CONFINED: Mapping[str, tuple[str, ...]] = {
    "torch": ("engine.distributed", "engine.save", "frameworks"),
    "typer": ("cli",),
    "click": ("cli",),
    "rich": ("cli",),
    "fsspec": ("storage",),
    "botocore": ("storage.s3",),
    "obstore": ("storage.s3",),
    "hdfs_native": ("storage.hdfs",),
    # Whose files are read without them: their modules move from release to release.
    **dict.fromkeys(("megatron", "deepspeed", "transformers", "safetensors"), ()),
}

# Inside formats/: modules that every format may import, besides the `_` ones; and those that know all formats.
FORMAT_CONTRACTS = frozenset({"base", "edited", "joint"})
FORMAT_INDEXES = frozenset({"__init__", "registry", "detect", "undetected", "bundle", "bundle_writer", "editors"})

BANNED_NAMES = frozenset({"utils", "helpers", "common", "misc"})
MAX_LINES = 400


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """One broken rule: the module that breaks it, the line (0: the whole module), and what is wrong."""

    module: str
    line: int
    what: str


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: absolute name, line, and whether merely importing the importer imports it."""

    name: str
    line: int
    at_import_time: bool


def violations(sources: Mapping[str, str]) -> list[Violation]:
    """Every broken rule in ``sources`` (dotted module name -> source text; a package is its ``.__init__``)."""
    found: list[Violation] = []
    graph: dict[str, set[str]] = {}
    for module, text in sources.items():
        found += _shape_violations(module, text)
        imports = list(imports_of(module, text, sources.keys()))
        found += [
            Violation(module, imported.line, what) for imported in imports for what in _complaints(module, imported)
        ]
        graph[module] = {imported.name for imported in imports if imported.at_import_time}
    found += [Violation(cycle[0], 0, f"import cycle: {' -> '.join(cycle)}") for cycle in _cycles(graph)]
    return sorted(found)


def imports_of(module: str, text: str, known: Iterable[str]) -> Iterator[Import]:
    """What ``module`` imports, own modules by the names in ``known`` (``from pkg import module`` is the module)."""
    modules = frozenset(known)
    for node, at_import_time in _statements(ast.parse(text), at_import_time=True):
        for name in _imported_names(node, module, modules):
            yield Import(name, node.lineno, at_import_time)


def _statements(tree: ast.AST, *, at_import_time: bool) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    """Import statements and calls below ``tree``, each with whether it runs when the module is imported."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for guarded in child.body:
                yield from _statements(ast.Module([guarded], []), at_import_time=False)
            for other in child.orelse:
                yield from _statements(ast.Module([other], []), at_import_time=at_import_time)
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom, ast.Call)):
            yield child, at_import_time
        is_deferred = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _statements(child, at_import_time=at_import_time and not is_deferred)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _imported_names(node: ast.stmt | ast.expr, module: str, known: frozenset[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (_own_name(alias.name, known) for alias in names)
        case ast.ImportFrom(module=stated, names=names, level=level):
            base = _absolute(module, stated, level)
            if base == ROOT:
                yield f"{ROOT}.__init__"
                return
            for alias in names:
                inner = _own_name(f"{base}.{alias.name}", known)
                yield inner if inner in known else _own_name(base, known)
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(function) in {"importlib.import_module", "import_module", "__import__"}:
                yield _own_name(name, known)


def _absolute(module: str, stated: str | None, level: int) -> str:
    if level == 0:
        return stated or ""
    base = module.split(".")[:-level]
    return ".".join([*base, stated] if stated else base)


def _own_name(name: str, known: frozenset[str]) -> str:
    return f"{name}.__init__" if f"{name}.__init__" in known else name


def _shape_violations(module: str, text: str) -> Iterator[Violation]:
    n_lines = text.count("\n")
    if n_lines > MAX_LINES:
        yield Violation(module, 0, f"{n_lines} lines, the limit is {MAX_LINES}")
    for part in module.split("."):
        if part.lstrip("_") in BANNED_NAMES:
            yield Violation(module, 0, f"named {part!r}, which says nothing")


def _complaints(module: str, imported: Import) -> Iterator[str]:
    """What is wrong with ``module`` importing ``imported``; nothing for a module outside the package (tests)."""
    importer = module.split(".")
    target = imported.name.split(".")
    if importer[0] != ROOT:
        return
    homes = CONFINED.get(target[0])
    if homes is not None and not ".".join(importer[1:]).startswith(homes):
        yield f"imports {target[0]}, which belongs to {', '.join(homes) or 'nobody'}"
    if target[0] != ROOT:
        return
    if target[1:] in ([], ["__init__"]):
        yield "imports the package root"
        return
    yield from _layer_complaints(importer[1], target[1])
    if importer[1] == target[1] == "formats":
        yield from _format_complaints(importer[2], target[2] if len(target) > 2 else "__init__")


def _layer_complaints(part: str, target: str) -> Iterator[str]:
    if part == target:
        return
    levels = {name: level for level, row in enumerate(LAYERS) for name in row}
    missing = [name for name in (part, target) if name not in levels]
    if missing:
        yield f"{missing[0]} has no place in LAYERS"
    elif levels[target] > levels[part]:
        yield f"imports {target}, which lies above {part}"
    elif levels[target] == levels[part]:
        yield f"imports {target}, a sibling of {part}"
    elif target in KEPT_APART.get(part, ()):
        yield f"imports {target}, which {part} does without"


def _format_complaints(part: str, target: str) -> Iterator[str]:
    is_shared = target.startswith("_") or target in FORMAT_CONTRACTS
    if part == target or part in FORMAT_INDEXES:
        return
    if target in FORMAT_INDEXES or not is_shared:
        yield f"format {part} imports {target}; formats share only _modules and {', '.join(sorted(FORMAT_CONTRACTS))}"


def _cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """One path ``a -> ... -> a`` for each module that reaches itself, no two on the same set of modules."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        path = _path_back(graph, start)
        if path:
            found.setdefault(frozenset(path), path)
    return list(found.values())


def _path_back(graph: Mapping[str, set[str]], start: str) -> list[str]:
    """Shortest import path from ``start`` to itself, both ends included; empty when there is none."""
    before: dict[str, str] = {}
    frontier = [start]
    while frontier:
        reached: list[str] = []
        for module in frontier:
            for target in sorted(graph.get(module, ())):
                if target == start:
                    path = [start, module]
                    while path[-1] != start:
                        path.append(before[path[-1]])
                    return path[::-1]
                if target not in before:
                    before[target] = module
                    reached.append(target)
        frontier = reached
    return []
