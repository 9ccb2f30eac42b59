"""New names of tensors and objects, and which of them go: what an edit asks for, held against what is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.api.convert.names import replaced
from ckpt_tool.errors import NotFound, UsageError
from ckpt_tool.layout.names import without_wrappers
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.select import matching, near_hint, texts
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, shell_word

__all__ = ["NameChanges", "NewNames", "new_names", "parse_rename"]


@dataclass(frozen=True)
class NameChanges:
    """What is asked for."""

    rename: Sequence[tuple[str, str]] = ()
    r"""(regular expression, text) pairs, applied in order; ``\1`` is the first group."""
    strip_prefixes: str | Sequence[str] = ()
    """Taken off, the first that fits."""
    strip_wrappers: bool = False
    """Take out what DDP, FSDP, torch.compile and activation checkpointing put into names."""
    drop: str | Sequence[str] = ()
    """Globs or ``re:`` patterns."""
    drop_optimizer: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return not (self.rename or self.strip_prefixes or self.strip_wrappers or self.drop or self.drop_optimizer)


@dataclass(frozen=True)
class NewNames:
    """New names by old ones, of all that stays."""

    tensors: Mapping[str, str]
    objects: Mapping[str, str]
    dropped: tuple[Dropped, ...]

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """What is called otherwise now."""
        both = (*self.tensors.items(), *self.objects.items())
        return tuple((old, new) for old, new in both if old != new)


def parse_rename(text: str) -> tuple[str, str]:
    r"""``PATTERN=TEXT`` as it is typed; the last ``=`` that no backslash precedes counts.

    >>> parse_rename(r"^model\.(.*)=\1")
    ('^model\\.(.*)', '\\1')

    Raises:
        UsageError: there is none.
    """
    found = re.fullmatch(r"(?s)(.+)(?<!\\)=(.*)", text)
    if found is None:
        raise UsageError(f"{text!r} is no renaming", hint=r"write it as '^model\.(.*)=\1'")
    return found[1].replace(r"\=", "="), found[2]


def new_names(manifest: Manifest, changes: NameChanges) -> NewNames:
    """Names after the changes.

    Raises:
        UsageError: a pattern cannot be read or fits nothing, two names become one, or an empty one.
        NotFound: nothing would be left.
    """
    tensors = manifest.tensors
    fqns = list(tensors.fqns)
    objects = list(dict.fromkeys(blob.fqn for blob in manifest.blobs))
    going: dict[str, str] = {}
    if changes.drop_optimizer:
        going |= {f: "optimizer state" for f, s in zip(fqns, tensors.section, strict=True) if _is_optimizer(int(s))}
        going |= {
            blob.fqn: "optimizer state" for blob in manifest.blobs if section_of(blob.path, blob.fqn) == "optimizer"
        }
        if not going:
            raise NotFound("there is no optimizer state to drop", where=manifest.where)
    for pattern in texts(changes.drop):
        both = [*fqns, *objects]
        hits = matching(pattern, both)
        if not hits:
            hint = near_hint(pattern, both) or "ckpt inspect lists names"
            raise UsageError(f"nothing matches --drop {pattern!r}", where=manifest.where, hint=hint)
        going |= {both[hit]: f"fits {pattern}" for hit in hits}
    mapped = _map(changes, [*fqns, *objects], manifest.where)
    kept = {fqn: mapped(fqn) for fqn in fqns if fqn not in going}
    kept_objects = {fqn: mapped(fqn) for fqn in objects if fqn not in going}
    if not kept:
        raise NotFound(f"none of {counted(len(fqns), 'tensor')} is left", where=manifest.where)
    _check_collisions((*kept.items(), *kept_objects.items()), manifest.where)
    return NewNames(kept, kept_objects, tuple(Dropped(fqn, why) for fqn, why in going.items()))


def _is_optimizer(section: int) -> bool:
    return SECTIONS[section] == "optimizer"


def _map(changes: NameChanges, fqns: Sequence[str], where: str) -> Callable[[str], str]:
    compiled, prefixes = [], texts(changes.strip_prefixes)
    for pattern, text in changes.rename:
        try:
            found = re.compile(pattern.removeprefix("re:"))
            re.compile(f"{found.pattern}|").sub(text, "")  # the alternative matches, so that the text is expanded
        except (re.error, IndexError) as error:
            raise UsageError(f"names cannot be mapped from {pattern!r} to {text!r}: {error}") from error
        compiled.append((found, text))
    used = [0] * len(compiled)
    stripped: set[str] = set()

    def mapped(fqn: str) -> str:
        for number, (pattern, text) in enumerate(compiled):
            fqn, n = replaced(pattern, text, fqn)
            used[number] += n
        fitting = [prefix for prefix in prefixes if fqn.startswith(prefix)]
        stripped.update(fitting)
        prefix = next(iter(fitting), "")
        fqn = fqn[len(prefix) :]
        return without_wrappers(fqn) if changes.strip_wrappers else fqn

    for fqn in fqns:
        mapped(fqn)
    for number, (searched, _) in enumerate(compiled):
        if not used[number]:
            raise UsageError(
                f"no name matches --rename {searched.pattern!r}", where=where, hint="ckpt inspect lists names"
            )
    if changes.strip_wrappers and all(without_wrappers(fqn) == fqn for fqn in fqns):
        raise UsageError(
            "no name has anything that --strip-wrappers takes out", where=where, hint="ckpt inspect lists names"
        )
    unused = [prefix for prefix in prefixes if prefix not in stripped]
    if unused:
        raise UsageError(
            f"no name begins with --strip-prefix {unused[0]!r}", where=where, hint="ckpt inspect lists names"
        )
    return mapped


def _check_collisions(names: Iterable[tuple[str, str]], where: str) -> None:
    owners: dict[str, str] = {}
    for old, new in names:
        if not new:
            raise UsageError(f"nothing would be left of the name {old!r}", where=where)
        if new.startswith(".") and not old.startswith("."):
            front = old.removesuffix(new)
            hint = f"take its dot off too: --strip-prefix {shell_word(front + '.')}" if front != old else None
            raise UsageError(f"{old!r} would be called {new!r}, with a dot in front", where=where, hint=hint)
        if new in owners:
            raise UsageError(
                f"{owners[new]!r} and {old!r} would both be called {new!r}",
                where=where,
                hint="make the pattern more exact, or drop one of them with --drop",
            )
        owners[new] = old
