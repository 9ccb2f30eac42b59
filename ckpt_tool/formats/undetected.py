"""Says of a source that no reader knows what is there instead, and what to type."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

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


class _Folder:
    """A folder that no reader takes, and what several of the explanations look at."""

    def __init__(self, source: Source, probes: list[tuple[Probe, Reader]]) -> None:
        self.source = source
        self.probes = probes
        self.sizes = source.listing.sizes
        self.url = source.listing.url.rstrip("/")
        self.telling = telling_files(self.sizes)
        self.lacking = tuple(lacking_files(self.sizes))

    @cached_property
    def stand_in(self) -> str | None:
        """The first of the files that tell most which is something else altogether."""
        looked_at = (path for path in self.telling[:_MAX_FILES_TRIED] if self.sizes[path])
        return next((path for path in looked_at if is_stand_in(self.source.head(path, HEAD_NBYTES))), None)

    @property
    def has_stand_in_on_top(self) -> bool:
        """Whether that is one of its own files, not of a folder in it."""
        return self.stand_in is not None and "/" not in self.stand_in

    def not_found(self, message: str, hint: str | None, *, files: Sequence[str] = ()) -> NotFound:
        """The error about it."""
        return NotFound(message, where=self.url, hint=hint, files=tuple(files))


def _about_folder(source: Source, probes: list[tuple[Probe, Reader]]) -> NotFound:
    """The error for a folder that is no checkpoint: the first explanation that fits."""
    folder = _Folder(source, probes)
    return next(found for explain in _EXPLANATIONS if (found := explain(folder)) is not None)


def _renamed(folder: _Folder) -> NotFound | None:
    """What names the others is here under another name."""
    altered = under_other_names(folder.lacking, folder.sizes)
    if not altered or ".metadata" in altered:  # of which more can be said
        return None
    path, its = next(iter(altered.items()))
    return folder.not_found(f"{path} is missing", its.said, files=folder.lacking)


def _without_the_whole(folder: _Folder) -> NotFound | None:
    """What names the others is not here, and no part is a checkpoint without it."""
    lacking = folder.lacking
    if not lacking or folder.has_stand_in_on_top or not _OF_THE_WHOLE.fullmatch(lacking[0]):
        return None
    return folder.not_found(
        f"{lacking[0]} is missing, without which nothing tells what the other files hold: its save did not end, or "
        "it was not copied",
        f"fetch it; ckpt verify {folder.url} --plan-fetch lists all",
        files=lacking,
    )


def _above_checkpoints(folder: _Folder) -> NotFound | None:
    """The folder of a run, or of several."""
    inside = [] if folder.has_stand_in_on_top else _checkpoints_below(folder.source)
    if not inside:
        return None
    listed = some_of([f"{path} ({name})" for path, name in inside], 8)
    return folder.not_found(
        f"no checkpoint itself, but its folders hold some: {listed}",
        f'give one of them, such as "{folder.url}/{inside[-1][0]}"',
    )


def _with_empty_metadata(folder: _Folder) -> NotFound | None:
    """What names the others has not a byte."""
    empty = empty_metadata(folder.source.listing)
    if not empty:
        return None
    others = f"; so {counted(len(empty) - 1, 'other is', 'others are')}" if len(empty) > 1 else ""
    return folder.not_found(
        f"{empty[0]} is an empty file, and nothing else tells what the other files hold: the disk was full, or the "
        f"copy did not end{others}",
        f"fetch it again; ckpt verify {folder.url} --plan-fetch lists all",
        files=empty,
    )


def _of_stand_ins(folder: _Folder) -> NotFound | None:
    """Pointers, pages of a server, zeros."""
    path = folder.stand_in
    if path is None:
        return None
    other = content_of(folder.source.head(path, HEAD_NBYTES)) or Content("something else")
    n_others = len(folder.telling) - 1
    others = f"; {counted(n_others, 'other file')} may be so too" if n_others else ""
    return folder.not_found(f"no checkpoint: {path} is {other.what}{others}", other.fix)


def _of_broken_links(folder: _Folder) -> NotFound | None:
    """Links whose files were not fetched."""
    links = broken_links(folder.url)
    if not links:
        return None
    name = next(iter(links))
    more = f" and {len(links) - 1:,} more" if len(links) > 1 else ""
    return folder.not_found(
        f"no checkpoint: {name} is a link to {links[name]!r}, which does not exist{more}",
        "fetch or copy the files themselves: of a download, or with cp -L, rsync -L or git annex get",
    )


def _known_by_names(folder: _Folder) -> NotFound | None:
    """A tokenizer, archives, models made for running, nothing at all."""
    content = folder_content(folder.sizes)
    if content is None:
        return None
    fix = None if content.fix is None else content.fix.replace("FOLDER", folder.url)
    return folder.not_found(f"no checkpoint, but {content.what}", fix)


def _of_single_files(folder: _Folder) -> NotFound | None:
    """Files that are a checkpoint each."""
    likeliest = sorted(folder.telling, key=_likeliest_last)[-_MAX_FILES_TRIED:]
    single = _single_files(folder.source, likeliest)
    if not single:
        return None
    listed = ", ".join(f"{path} ({name})" for path, name in single)
    n_more = len(folder.telling) - len(likeliest)
    listed += f"; {counted(n_more, 'more file', 'were')} not looked at" if n_more else ""
    return folder.not_found(
        f"no checkpoint itself among {kinds_of_files(folder.sizes)}, but files that are one each: {listed}",
        f'give one of them, such as "{folder.url}/{single[-1][0]}"',
    )


def _unknown(folder: _Folder) -> NotFound:
    """What the readers say that come nearest, or what the first files are."""
    top = [path for path in folder.sizes if "/" not in path]
    named = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, top))})(?![\w])") if top else None
    likely = [each for each in folder.probes if each[0].confidence > 0 or (named and named.search(each[0].why))]
    likely = likely or folder.probes[-1:]
    contents = {path: content_of(folder.source.head(path, HEAD_NBYTES)) for path in top[:_SHOWN]}
    what = [f"{path} is {content.what}" for path, content in contents.items() if content is not None]
    renamed = [
        f"{path} may be renamed: {content.fix}"
        for path, content in contents.items()
        if content is not None and content.fix is not None and content.fix.startswith("name it ")
    ]
    why = _reasons(likely) if likely[0][0].confidence > 0 else "; ".join(what) or _reasons(likely)
    place = "a tar archive with " if isinstance(folder.source.store, TarStore) else ""
    return folder.not_found(
        f"{place}no known checkpoint format among {kinds_of_files(folder.sizes)} ({why})",
        renamed[0] if renamed else "ckpt formats lists what is read",
    )


def _part_of_above(folder: _Folder) -> NotFound | None:
    """Part of the checkpoint of a folder above; None where it is not surely."""
    for store, inner in folders_above(folder.source.listing.url):
        try:
            above = Source(store, store.listing())
            best, reader = max(((r.probe(above), r) for r in readers()), key=lambda pair: pair[0].confidence)
            if best.confidence < SURE:
                continue
            if any(path.startswith(inner) for path in reader.read(above).files.index):
                return folder.not_found(
                    f"one folder of {_with_article(reader.name)} checkpoint, not the whole ({best.why})",
                    f'give the folder that holds all of it: "{above.listing.url}"',
                )
        except CkptError:
            continue
        finally:
            store.close()
    return None


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


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


_EXPLANATIONS: tuple[Callable[[_Folder], NotFound | None], ...] = (
    _part_of_above, _renamed, _without_the_whole, _above_checkpoints, _with_empty_metadata, _of_stand_ins,
    _of_broken_links, _known_by_names, _of_single_files, _unknown,
)  # fmt: skip
"""In the order in which they are tried: what says most about what to do comes first."""
