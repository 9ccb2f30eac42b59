"""What a file really is, told from its first bytes; for messages about files that are not what their name says.

Knows magic numbers and nothing of how to read any of these formats.
"""

from __future__ import annotations

import re

from ckpt_tool.formats._pickle.legacy import begins_legacy, is_legacy
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["HEAD_NBYTES", "Content", "content_of", "is_stand_in", "what_is"]

HEAD_NBYTES = 512
"""First bytes that are enough to tell (a tar archive names itself at byte 257)."""

_LFS = re.compile(rb"(?:\xef\xbb\xbf)?version https://git-lfs\.github\.com/spec/")
_LFS_SIZE = re.compile(rb"^size ([0-9]{1,20})\r?$", re.MULTILINE)
_HTML = re.compile(rb"\s*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_XML_ERROR = re.compile(rb"\s*<\?xml.{0,200}<Error>", re.DOTALL)
# What servers answer in words: huggingface.co "Entry not found", wget "ERROR 403: Forbidden", JSON of APIs.
_REPLY = re.compile(
    rb"\s*(?:\{\s*\"error\"|(?:http/\S+ |error:? )?[45]\d\d\b|(?:[a-z]+ )?not found\b|unauthorized\b|forbidden\b"
    rb"|access (?:is )?denied\b|access to (?:model|dataset)\b|invalid (?:username|credentials|token)\b"
    rb"|internal (?:server )?error\b|bad gateway\b|service unavailable\b|too many requests\b|rate limit)",
    re.IGNORECASE,
)
_POINTERS = (
    (re.compile(rb"/annex/objects/"), "a git-annex pointer", "the pointer alone is here: run git annex get FILE"),
    (re.compile(rb"(?:md5: \w+\r?\n)?outs:\r?\n- "), "a DVC pointer", "the pointer alone is here: run dvc pull"),
    (re.compile(rb"# xet version "), "a Xet pointer", "the pointer alone is here: fetch it with hf download"),
)
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]+")

_LEAST_ZIP_NBYTES = 30 + 46 + 22
"""The two headers of one member, and the end record."""
_CUT = "the copy or the save did not finish; fetch or save it again"
_DOWNLOAD = "the download failed: fetch it again, with a token if the repository asks for one"


@dataclass(frozen=True, slots=True)
class Content:
    """What a file is, and what to do about it."""

    what: str
    """With its article: ``a zip archive``."""
    fix: str | None = None
    """What to do when another format was expected."""
    is_stand_in: bool = False
    """It lies in the place of another file: a pointer to it, a reply of a server, zeros, nothing."""


_MAGIC: tuple[tuple[bytes, Content], ...] = (
    (b"\x00\x05\x16\x07", Content("what macOS keeps beside a file, not the file itself", "name it without ._")),
    (b"\x1f\x8b", Content("a gzip file", "unpack it with gunzip")),
    (b"\x28\xb5\x2f\xfd", Content("a zstd file", "unpack it with zstd -d")),
    (b"BZh", Content("a bzip2 file", "unpack it with bunzip2")),
    (b"\xfd7zXZ\x00", Content("an xz file", "unpack it with unxz")),
    (b"GGUF", Content("a GGUF file", "name it .gguf")),
    (
        b"\x93NUMPY",
        Content("a numpy array", "save it under a name with numpy.savez, which makes an .npz of arrays"),
    ),
    (b"\x89HDF\r\n", Content("an HDF5 file", "name it .h5")),
    (b"PAR1", Content("a Parquet file")),
    (b"ARROW1", Content("an Arrow file")),
    (b"%PDF", Content("a PDF")),
    (b"bplist00", Content("a property list, as iCloud leaves in a file's place", "have the file downloaded first")),
    (b"Rar!\x1a\x07", Content("a RAR archive", "unpack it with unrar x")),
    (b"SQLite format 3\0", Content("a database (SQLite)")),
    (b"7z\xbc\xaf\x27\x1c", Content("a 7z archive", "unpack it with 7z x")),
    (b"\x89PNG\r\n", Content("a picture (PNG)")),
    (b"\xff\xd8\xff", Content("a picture (JPEG)")),
    (b"\x7fELF", Content("a program or a library (ELF)")),
)


def what_is(head: bytes) -> str | None:
    """What a file that starts with ``head`` is, None when nothing known fits.

    >>> what_is(b"version https://git-lfs.github.com/spec/v1"), what_is(b"GGUF" + bytes(4))
    ('a git-LFS pointer', 'a GGUF file')
    """
    found = content_of(head)
    return None if found is None else found.what


def content_of(head: bytes) -> Content | None:
    """As `what_is`, with what to do about it.

    Args:
        head: the first `HEAD_NBYTES` bytes, or all of a shorter file.
    """
    if not head:
        return Content("an empty file", _CUT, is_stand_in=True)
    if not head.strip(b"\0"):
        fix = "the disk filled up or the copy was cut; fetch or save it again"
        return Content("only zero bytes at its start", fix, is_stand_in=True)
    found = next((content for magic, content in _MAGIC if head.startswith(magic)), None)
    return found or _container(head) or _text(head)


def is_stand_in(head: bytes) -> bool:
    """Whether a file with this head lies in the place of another: a pointer, a reply of a server, zeros, nothing.

    >>> is_stand_in(b"<!DOCTYPE html>"), is_stand_in(b"GGUF")
    (True, False)
    """
    found = content_of(head)
    return found is not None and found.is_stand_in


def _container(head: bytes) -> Content | None:
    """Binary formats that take more than a prefix to tell."""
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        if re.match(rb"PK\x03\x04.{26}[^\0]{1,200}/(?:data\.pkl|\.format_version|version|byteorder)", head, re.DOTALL):
            return Content("a torch.save file (zip)", "name it .pt or .bin; it is read without being executed")
        if re.match(rb"PK\x03\x04.{26}[^\0/]{1,200}/(?:data/weights/|archive_format)", head, re.DOTALL):
            fix = "save its weights: torch.save(torch.export.load(FILE).state_dict, 'weights.pt')"
            return Content("a program of torch.export", fix)
        if len(head) < _LEAST_ZIP_NBYTES and not head.startswith(b"PK\x05\x06"):
            return Content("only the beginning of a zip archive, such as torch.save writes", _CUT)
        return Content("a zip archive", "unpack it, or name it .pt if torch.save wrote it")
    if is_legacy(head):
        return Content("a torch.save file (the stream of torch before 1.6)", "name it .pt or .bin")
    if begins_legacy(head):
        return Content("only the beginning of a torch.save file (the stream of torch before 1.6)", _CUT)
    if head[0] == 0x80 and head[1:2] in {b"\x02", b"\x03", b"\x04", b"\x05"}:
        fix = "torch.save did not write it: save its tensors with that, or with numpy.savez"
        return Content("a pickle", fix)
    if head[257:262] == b"ustar":
        return Content("a tar archive", "unpack it with tar -x")
    if len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 40:
        return Content("a safetensors file", "name it .safetensors")
    return None


def _text(head: bytes) -> Content | None:
    """Kinds of text."""
    if _LFS.match(head):
        size = _LFS_SIZE.search(head)
        of = f", of a file of {counted(int(size[1]), 'byte')}" if size else ""
        fix = f'the pointer alone was cloned{of}: run "git lfs pull" in the repository'
        return Content("a git-LFS pointer", fix, is_stand_in=True)
    for pattern, what, fix in _POINTERS:
        if pattern.match(head):
            return Content(what, fix, is_stand_in=True)
    if _HTML.match(head):
        return Content("an HTML page", _DOWNLOAD, is_stand_in=True)
    if _XML_ERROR.match(head):
        return Content("an XML error reply of an object store", _DOWNLOAD, is_stand_in=True)
    if _REPLY.match(head) and _TEXT.fullmatch(head):
        return Content("an error reply of a server", _DOWNLOAD, is_stand_in=True)
    if head.startswith(b"\xef\xbb\xbf"):
        head = head[3:]
    stripped = head.lstrip()
    if stripped.startswith((b'{"', b"[", b"{\n", b"{\r\n", b"{ ", b"{}")):
        return Content("JSON text", "it describes tensors or settings and holds none; name the folder instead")
    return Content("plain text") if _TEXT.fullmatch(head) else None
