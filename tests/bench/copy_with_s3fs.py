"""``python copy_with_s3fs.py SOURCE TARGET``: copy a folder to S3, or within S3 by way of this machine, with s3fs."""

from __future__ import annotations

import sys

import fsspec


def copy(source: str, target: str) -> None:
    """All files, as many at once as s3fs likes."""
    fs = fsspec.filesystem("s3")
    if not source.startswith("s3://"):
        fs.put(source, target, recursive=True)
        return
    root = source.removeprefix("s3://")
    content = fs.cat(fs.find(root))
    fs.pipe({target + path.removeprefix(root): data for path, data in content.items()})


if __name__ == "__main__":
    copy(sys.argv[1], sys.argv[2])
