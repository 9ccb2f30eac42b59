"""What a folder without a checkpoint holds instead, told from the names and sizes of its files; for messages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from ckpt_tool.formats._content import Content
from ckpt_tool.sizes import counted
from ckpt_tool.storage.altered_names import is_placeholder, is_unfinished, under_other_names

__all__ = ["folder_content", "kinds_of_files", "named_content", "telling_files"]

_ARCHIVE = re.compile(r"\.(?:tar|tgz|tbz2|txz|zip|7z|rar|tar\.(?:gz|bz2|xz|zst))$")
_PACKED_TAR = re.compile(r"\.(?:tgz|tbz2|txz|tar\.(?:gz|bz2|xz|zst))$")
_TOKENIZER = re.compile(
    r"(?:^|/)(?:tokenizer[^/]*|vocab\.(?:json|txt)|merges\.txt|special_tokens_map\.json|added_tokens\.json|"
    r"[^/]*(?:sentencepiece|spiece|spm)[^/]*|chat_template\.[^/]+)$"
)
_TENSORS = re.compile(r"\.(?:safetensors|bin|pt|pth|ckpt|distcp|npz|npy|gguf|h5|msgpack)$")
_METADATA = re.compile(r"(?:^|/)(?:\.metadata|metadata\.pkl|_METADATA|\.snapshot_metadata)$|\.(?:nemo|keras|pkl)$")
_DESCRIBING = re.compile(r"\.(?:json|md|txt|ya?ml|toml|py|gitattributes|gitignore|jinja)$|(?:^|/)LICENSE$")


# Models made for running, and those of programs whose checkpoints are not read.
_COMPILED = (
    (re.compile(r"\.onnx(?:_data|\.data)?$"), "an ONNX model"),
    (re.compile(r"\.tflite$"), "a TensorFlow Lite model"),
    (re.compile(r"\.(?:engine|plan)$"), "a TensorRT engine"),
    (re.compile(r"\.ckpt(?:-\d+)?\.(?:index|meta|data-\d{5}-of-\d{5})$"), "a part of a TensorFlow checkpoint"),
    (re.compile(r"(?:^|/)saved_model\.pb$"), "a TensorFlow model"),
    (re.compile(r"\.mlmodel$|\.mlpackage/"), "a Core ML model"),
)
_UNENDED, _END_IT = "a download or a save that did not end", "let it end, or start it again"


def named_content(path: str) -> Content | None:
    """What a file is by the end of its name, where that says more than its first bytes do.

    >>> named_content("a.tgz").fix, named_content("a.pt.part").fix, named_content("a.pt")
    ('unpack it with tar -xf', 'let it end, or start it again', None)
    """
    if is_unfinished(path):
        return Content(_UNENDED, _END_IT)
    if _PACKED_TAR.search(path):
        return Content("a compressed tar archive", "unpack it with tar -xf")
    what = next((what for pattern, what in _COMPILED if pattern.search(path)), None)
    return None if what is None else Content(what, "take the checkpoint that it was made from")


def folder_content(sizes: Mapping[str, int]) -> Content | None:
    """What these files are when no reader knows them, None where nothing known fits.

    >>> folder_content({"tokenizer.json": 5, "config.json": 1}).what
    'a tokenizer without a model'
    """
    if not sizes:
        return Content("an empty folder")
    items = [path for path in sizes if path.endswith(".distcp")]
    if items and ".metadata" not in sizes:
        n = counted(len(items), ".distcp file")
        altered = under_other_names([".metadata"], {path: nbytes for path, nbytes in sizes.items() if nbytes})
        it = "".join(f"see whether {each.path!r} is it, and copy it to .metadata; else " for each in altered.values())
        return Content(
            f"{n} without .metadata, which names what they hold: its save did not end, or it was not copied",
            f"{it}fetch .metadata, or take what can be told without it: ckpt verify FOLDER --salvage OUT",
        )
    unfinished = [path for path in sizes if is_unfinished(path)]
    if unfinished:
        n = counted(len(unfinished), "unfinished file")
        return Content(f"{_UNENDED}: {n} ({unfinished[0]})", _END_IT)
    waiting = [path for path in sizes if is_placeholder(path)]
    if waiting:
        n = counted(len(waiting), "placeholder")
        return Content(f"{n} of files that lie in a cloud ({waiting[0]})", "have them downloaded to this machine first")
    tensors = [path for path in sizes if _TENSORS.search(path)]
    if tensors and not any(sizes[path] for path in tensors):
        return Content(
            f"{counted(len(tensors), 'empty file')} where tensors should be ({tensors[0]})",
            "the disk was full, or the copy did not end; fetch them again",
        )
    archives = [path for path in sizes if _ARCHIVE.search(path)]
    if archives and not tensors:
        return Content(f"{counted(len(archives), 'archive')} ({archives[0]})", "unpack it, and name the folder in it")
    compiled = [(path, what) for path in sizes for pattern, what in _COMPILED if pattern.search(path)]
    if compiled and not tensors:
        path, what = compiled[0]
        return Content(f"{what} ({path})", "take the checkpoint that it was made from")
    others = [path for path in sizes if not _DESCRIBING.search(path) and not _TOKENIZER.search(path)]
    if not tensors and not others:
        if any(_TOKENIZER.search(path) for path in sizes):
            return Content("a tokenizer without a model", "fetch the model's weights too")
        return Content(f"{counted(len(sizes), 'describing file')} without tensors", "fetch the weights too")
    return None


def telling_files(sizes: Mapping[str, int]) -> list[str]:
    """Files whose first bytes may tell why a folder is not read: those of tensors and of metadata, outermost first.

    >>> telling_files({"a/model.pt": 1, "README.md": 1, ".metadata": 1})
    ['.metadata', 'a/model.pt']
    """
    wanted = (path for path in sizes if _TENSORS.search(path) or _METADATA.search(path))
    return sorted(wanted, key=lambda path: (path.count("/"), path))


def kinds_of_files(sizes: Mapping[str, int]) -> str:
    """The files by the ends of their names, most first.

    >>> kinds_of_files({"a.x": 1, "b.x": 1, "c": 1})
    '2 .x, 1 without an ending'
    """
    ends = Counter(_ending(path) for path in sizes)
    shown = [f"{n:,} {end or 'without an ending'}" for end, n in ends.most_common(4)]
    return ", ".join(shown) + (" ..." if len(ends) > len(shown) else "")


def _ending(path: str) -> str:
    name = path.rpartition("/")[2]
    return f".{name.rpartition('.')[2]}" if "." in name.lstrip(".") else ""
