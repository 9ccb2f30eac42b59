"""Which storage takes parts, by its URL."""

from __future__ import annotations

from ckpt_tool.storage.parts.place import PartPlace
from ckpt_tool.storage.urls import scheme_of

__all__ = ["part_place"]


def part_place(url: str, *, single_file: bool, token: str | None = None) -> PartPlace | None:
    """The place of a URL whose storage takes parts, None for others.

    ``token`` tells writers of one name apart, where what is unfinished has a name of its own.
    """
    match scheme_of(url):
        case "s3" | "s3a":
            from ckpt_tool.storage.s3.place import S3Place

            return S3Place(url, single_file=single_file)
        case "hdfs" | "viewfs":
            from ckpt_tool.storage.hdfs.place import HdfsPlace

            return HdfsPlace(url, single_file=single_file, token=token)
        case _:
            return None
