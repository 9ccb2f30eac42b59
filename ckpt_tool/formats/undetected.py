"""Says of a source that no reader knows what is there instead, and what to type."""

from __future__ import annotations

import re
from dataclasses import replace

from ckpt_tool.errors import CkptError, FormatError, NotFound
from ckpt_tool.formats._content import HEAD_NBYTES, Content, content_of, is_stand_in
from ckpt_tool.formats._folder import folder_content, kinds_of_files, named_content, telling_files
from ckpt_tool.formats.base import SURE, TAKEN_ABOVE, Probe, Reader, Source
from ckpt_tool.formats.lacking import empty_metadata, lacking_files
from ckpt_tool.formats.registry import readers
from ckpt_tool.sizes import counted, some_of
from ckpt_tool.storage.altered_names import under_other_names
from ckpt_tool.storage.local.above import broken_links, folders_above
from ckpt_tool.storage.virtual.subfolder import Subfolder, sublisting
from ckpt_tool.storage.virtual.tar import TarStore

__all__ = ["about_undetected"]

_MAX_FOLDERS_TRIED = 64
_MAX_FILES_TRIED = 8
_LIKE_A_MODEL = re.compile(r"model|weights|ckpt|checkpoint|last|latest", re.IGNORECASE)
_SHOWN = 3
_OF_THE_WHOLE = re.compile(r"\.snapshot_metadata|checkpoint_metadata\.json|pytorch_model_fsdp_\d+/\.metadata")
"""Files that speak of all of a folder; others may be those of one checkpoint of several in it."""
_DESCRIBING = (
    ".metadata",
    "metadata.pkl",
    ".distcp",
    ".json",
)  # not listed among the files that hold tensors, or without any


def about_undetected(source: Source, probes: list[tuple[Probe, Reader]]) -> FormatError | NotFound:
    """The error for a source that no reader takes, given what each of them said."""
    return _about_folder(source, probes) if source.listing.entry is None else _about_file(source, probes)


def _reasons(probes: list[tuple[Probe, Reader]]) -> str:
    return "; ".join(f"{reader.name}: {probe.why}" for probe, reader in probes)


def _about_file(source: Source, probes: list[tuple[Probe, Reader]]) -> FormatError | NotFound:
    """The error for one file that is no checkpoint by itself: part of one, or something else altogether."""
    entry = source.listing.entry or ""
    url = source.listing.url.rstrip("/")
    whole = Source(source.store, replace(source.listing, entry=None))
    in_folder = [(reader.probe(whole), reader) for reader in readers()]
    best, reader = max(in_folder, key=lambda pair: pair[0].confidence)
    if best.confidence > TAKEN_ABOVE and _is_part(entry, reader, whole):
        return NotFound(
            f"one file of {_with_article(reader.name)} checkpoint, not the whole ({best.why})",
            where=f"{url}/{entry}",
            hint=f'give the folder: "{url}"',
        )
    content = named_content(entry) or content_of(source.head(entry, HEAD_NBYTES))
    if content is not None:
        return FormatError(f"is {content.what}, which is no checkpoint", where=f"{url}/{entry}", hint=content.fix)
    likely = [(probe, reader) for probe, reader in probes if probe.confidence > 0]
    why = f" ({_reasons(likely)})" if likely else ": its first bytes are those of nothing known"
    return FormatError(
        f"no known checkpoint format{why}", where=f"{url}/{entry}", hint="ckpt formats lists what is read"
    )


def _is_part(entry: str, reader: Reader, whole: Source) -> bool:
    """Whether the file belongs to the checkpoint of its folder, not just lies beside it."""
    if entry.endswith(_DESCRIBING):
        return True
    try:
        return entry in reader.read(whole).files.index
    except CkptError:  # then it is a part if the folder looks another without it
        others = {path: nbytes for path, nbytes in whole.listing.sizes.items() if path != entry}
        without = replace(whole, listing=replace(whole.listing, sizes=others))
        return reader.probe(without) != reader.probe(whole)


def _about_folder(source: Source, probes: list[tuple[Probe, Reader]]) -> NotFound:
    """The error for a folder that is no checkpoint: empty, the wrong level, or unknown."""
    url = source.listing.url.rstrip("/")
    part = _part_of_above(source)
    if part is not None:
        return part
    telling = telling_files(source.listing.sizes)
    looked_at = (path for path in telling[:_MAX_FILES_TRIED] if source.listing.nbytes(path))
    stand_in = next((path for path in looked_at if _is_stand_in(source, path)), None)
    lacking = lacking_files(source.listing.sizes)
    altered = under_other_names(lacking, source.listing.sizes)
    if altered and ".metadata" not in altered:
        path, its = next(iter(altered.items()))
        return NotFound(f"{path} is missing", where=url, hint=its.said, files=tuple(lacking))
    if lacking and (stand_in is None or "/" in stand_in) and _OF_THE_WHOLE.fullmatch(lacking[0]):
        return NotFound(
            f"{lacking[0]} is missing, without which nothing tells what the other files hold: its save did not end, or "
            "it was not copied",
            where=url,
            hint=f"fetch it; ckpt verify {url} --plan-fetch lists all",
            files=tuple(lacking),
        )
    inside = _checkpoints_below(source)
    if inside and (stand_in is None or "/" in stand_in):
        listed = some_of([f"{folder} ({name})" for folder, name in inside], 8)
        return NotFound(
            f"no checkpoint itself, but its folders hold some: {listed}",
            where=url,
            hint=f'give one of them, such as "{url}/{inside[-1][0]}"',
        )
    empty = empty_metadata(source.listing)
    if empty:
        others = f"; so {counted(len(empty) - 1, 'other is', 'others are')}" if len(empty) > 1 else ""
        return NotFound(
            f"{empty[0]} is an empty file, and nothing else tells what the other files hold: the disk was full, or the "
            f"copy did not end{others}",
            where=url,
            hint=f"fetch it again; ckpt verify {url} --plan-fetch lists all",
            files=tuple(empty),
        )
    if stand_in is not None:
        other = content_of(source.head(stand_in, HEAD_NBYTES)) or Content("something else")
        others = f"; {counted(len(telling) - 1, 'other file')} may be so too" if len(telling) > 1 else ""
        return NotFound(f"no checkpoint: {stand_in} is {other.what}{others}", where=url, hint=other.fix)
    links = broken_links(url)
    if links:
        name = next(iter(links))
        more = f" and {len(links) - 1:,} more" if len(links) > 1 else ""
        return NotFound(
            f"no checkpoint: {name} is a link to {links[name]!r}, which does not exist{more}",
            where=url,
            hint="fetch or copy the files themselves: of a download, or with cp -L, rsync -L or git annex get",
        )
    content = folder_content(source.listing.sizes)
    if content is not None:
        fix = None if content.fix is None else content.fix.replace("FOLDER", url)
        return NotFound(f"no checkpoint, but {content.what}", where=url, hint=fix)
    top = [path for path in source.listing.sizes if "/" not in path]
    likeliest = sorted(telling, key=_likeliest_last)[-_MAX_FILES_TRIED:]
    single = _single_files(source, likeliest)
    if single:
        listed = ", ".join(f"{path} ({name})" for path, name in single)
        n_more = len(telling) - len(likeliest)
        listed += f"; {counted(n_more, 'more file', 'were')} not looked at" if n_more else ""
        return NotFound(
            f"no checkpoint itself among {kinds_of_files(source.listing.sizes)}, but files that are one each: {listed}",
            where=url,
            hint=f'give one of them, such as "{url}/{single[-1][0]}"',
        )
    named = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, top))})(?![\w])") if top else None
    likely = [each for each in probes if each[0].confidence > 0 or (named and named.search(each[0].why))]
    likely = likely or probes[-1:]
    contents = {path: content_of(source.head(path, HEAD_NBYTES)) for path in top[:_SHOWN]}
    what = [f"{path} is {content.what}" for path, content in contents.items() if content is not None]
    renamed = [
        f"{path} may be renamed: {content.fix}"
        for path, content in contents.items()
        if content is not None and content.fix is not None and content.fix.startswith("name it ")
    ]
    why = _reasons(likely) if likely[0][0].confidence > 0 else "; ".join(what) or _reasons(likely)
    place = "a tar archive with " if isinstance(source.store, TarStore) else ""
    return NotFound(
        f"{place}no known checkpoint format among {kinds_of_files(source.listing.sizes)} ({why})",
        where=url,
        hint=renamed[0] if renamed else "ckpt formats lists what is read",
    )


def _part_of_above(source: Source) -> NotFound | None:
    """The error for a folder that is part of the checkpoint of a folder above; None where it is not surely."""
    for store, inner in folders_above(source.listing.url):
        try:
            above = Source(store, store.listing())
            best, reader = max(((r.probe(above), r) for r in readers()), key=lambda pair: pair[0].confidence)
            if best.confidence < SURE:
                continue
            if any(path.startswith(inner) for path in reader.read(above).files.index):
                return NotFound(
                    f"one folder of {_with_article(reader.name)} checkpoint, not the whole ({best.why})",
                    where=source.listing.url.rstrip("/"),
                    hint=f'give the folder that holds all of it: "{above.listing.url}"',
                )
        except CkptError:
            continue
        finally:
            store.close()
    return None


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _is_stand_in(source: Source, path: str) -> bool:
    return is_stand_in(source.head(path, HEAD_NBYTES))


def _checkpoints_below(source: Source) -> list[tuple[str, str]]:
    """(folder, format) of folders that a reader knows, outermost only, in natural order of their names."""
    folders = sorted({path.rsplit("/", 1)[0] for path in source.listing.sizes if "/" in path}, key=_natural)
    tried: list[str] = []
    for folder in folders:
        parts = folder.split("/")
        tried += [prefix for i in range(1, len(parts) + 1) if (prefix := "/".join(parts[:i])) not in tried]
    found: list[tuple[str, str]] = []
    for folder in tried[:_MAX_FOLDERS_TRIED]:
        if any(folder.startswith(outer + "/") for outer, _ in found):
            continue
        inner = Source(Subfolder(source.store, folder), sublisting(source.listing, folder))
        best, reader = max(((r.probe(inner), r) for r in readers()), key=lambda pair: pair[0].confidence)
        if best.confidence > TAKEN_ABOVE:
            found.append((folder, reader.name))
    return found


def _single_files(source: Source, paths: list[str]) -> list[tuple[str, str]]:
    """(path, format) of files that a reader knows by themselves."""
    found: list[tuple[str, str]] = []
    for path in paths:
        inner = Source(source.store, replace(source.listing, entry=path))
        best, reader = max(((r.probe(inner), r) for r in readers()), key=lambda pair: pair[0].confidence)
        if best.confidence > TAKEN_ABOVE:
            found.append((path, reader.name))
    return found


def _likeliest_last(path: str) -> tuple[int, bool, list[tuple[str, int]]]:
    """Sort key: files above those below, models behind other state, numbers by value.

    >>> sorted(["a/model.pt", "model.pt", "train.pt", "best_ckpt.pt"], key=_likeliest_last)
    ['a/model.pt', 'train.pt', 'best_ckpt.pt', 'model.pt']
    """
    return -path.count("/"), _LIKE_A_MODEL.search(path.rpartition("/")[2]) is not None, _natural(path)


def _natural(name: str) -> list[tuple[str, int]]:
    """Sort key with numbers by value.

    >>> sorted(["step-10", "step-9"], key=_natural)
    ['step-9', 'step-10']
    """
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]
