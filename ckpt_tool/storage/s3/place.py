"""A folder or an object of S3 as a place for parts: every file is one multipart upload, invisible until it is joined.

Parts are between 5 MiB and 5 GiB, 10,000 at most, the last as small as it likes; uploads stay until they are completed
or aborted (S3 User Guide, "Amazon S3 multipart upload limits"). Knows no markers and no checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from xml.etree import ElementTree as ET

from ckpt_tool.errors import NotFound, StorageError, UsageError
from ckpt_tool.storage.parts.commit import is_control
from ckpt_tool.storage.parts.place import Begun, Part, PartLimits
from ckpt_tool.storage.s3.answers import tree_of, xml_text, xml_time
from ckpt_tool.storage.s3.client import S3Client, split_s3_url
from ckpt_tool.storage.target import Bytes

__all__ = ["S3Place"]

PART_LIMITS = PartLimits(min_bytes=5 << 20, usual_bytes=16 << 20, max_parts=10_000)


class S3Place:
    """Objects below ``url``, or with ``single_file`` that one object and control files beside it.

    Raises:
        UsageError: a bucket without a key.
    """

    is_named_last = False

    def __init__(self, url: str, *, single_file: bool) -> None:
        self.url = url
        self.limits = PART_LIMITS
        bucket, key = split_s3_url(url)
        self._key = key.rstrip("/")
        if not bucket or not self._key:
            raise UsageError("is a whole bucket, and is not written to", where=url, hint="name a folder in it")
        self._client = S3Client(bucket)
        self._single_file = single_file
        self._is_unsure = False
        self._control = f"{self._key}.partial/" if single_file else f"{self._key}/"

    def old_files(self) -> Sequence[str]:
        """Paths of objects under the final name; ``""`` is an object of that name itself."""
        return self.look()[0]

    def look(self) -> tuple[Sequence[str], dict[str, int]]:
        """``old_files`` and ``files`` at once, which are listed together."""
        one, below = self._client.head(self._key), self._listed(f"{self._key}/")
        old = [*([] if one is None else [""]), *(path for path in below if not is_control(path))]
        if not self._single_file:
            return old, below
        return old, self._listed(self._control) | ({} if one is None else {"": one.nbytes})

    def old_head(self, length: int) -> bytes | None:
        """The first bytes of an object of that name; one request. What has its name in front is another."""
        return self._client.get(self._key, length)

    def files(self) -> dict[str, int]:
        """Size of each object of this target, control files included."""
        found = self._listed(self._control)
        if self._single_file:
            one = self._client.head(self._key)
            found |= {} if one is None else {"": one.nbytes}
        return found

    def begun(self) -> dict[str, Begun]:
        """Uploads under way, with their parts."""
        best: dict[str, Begun] = {}
        for path, found in self.under_way():
            other = best.get(path)
            if other is not None and len(other.parts) >= len(found.parts):
                self.drop(path, found.token)
                continue
            if other is not None:
                self.drop(path, other.token)
            best[path] = found
        return best

    def under_way(self) -> list[tuple[str, Begun]]:
        """Uploads under way, as they are."""
        start = len(self._key) if self._single_file else len(self._key) + 1
        found = []
        for key, token, begun in self._uploads():
            if not self._single_file or key == self._key:
                parts, modified = self._parts(key, token)
                found.append((key[start:], Begun(token, parts, max(modified, begun))))
        return found

    def begin(self, path: str) -> str:
        """Begin an upload."""
        n_retries = self._client.traffic.n_retries
        answer = self._client.request("POST", self._key_of(path), query={"uploads": ""})
        self._is_unsure |= self._client.traffic.n_retries != n_retries  # an answer that is lost names an upload too
        return xml_text(tree_of(answer.data, self.url), "UploadId")

    def put_part(self, path: str, token: str, number: int, data: Bytes) -> str:
        """Send one part; the server refuses it when it arrives changed."""
        query = {"partNumber": str(number), "uploadId": token}
        return self._client.request("PUT", self._key_of(path), query=query, body=data).headers.get("etag", "")

    def join(self, path: str, token: str, parts: Mapping[int, Part], *, is_new: bool) -> bool:
        """Complete the upload.

        An answer that is lost leaves open whether it was completed; then the object tells.
        """
        key = self._key_of(path)
        body = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{part.tag}</ETag></Part>" for number, part in parts.items()
        )
        try:
            answer = self._client.request(
                "POST", key, query={"uploadId": token}, headers={"if-none-match": "*"} if is_new else {},
                body=f"<CompleteMultipartUpload>{body}</CompleteMultipartUpload>".encode(), allowed=frozenset({412}),
                checks_body=True,
            )  # fmt: skip
        except NotFound:
            found = self._client.head(key)
            if found is None or found.nbytes != sum(part.nbytes for part in parts.values()):
                raise
            return True
        return answer.status != 412 or not self._parts(key, token)[0]

    def drop(self, path: str, token: str) -> None:
        """Abort an upload, whether it is still there or not."""
        self._client.request("DELETE", self._key_of(path), query={"uploadId": token}, allowed=frozenset({404}))

    def put(self, path: str, data: Bytes, *, is_new: bool = False) -> bool:
        """Write an object in one request."""
        return self._client.put(self._key_of(path), data, is_new=is_new)

    def get(self, path: str) -> bytes | None:
        """A whole object."""
        return self._client.get(self._key_of(path))

    def delete(self, path: str) -> None:
        """Remove an object."""
        self._client.delete(self._key_of(path))

    def clear(self) -> None:
        """Nothing: there are no folders."""

    def finish(self, *, replace: bool) -> None:  # noqa: ARG002 - uploads that are completed replace what is there
        """Abort uploads that nobody knows of; objects have their names from the beginning."""
        if self._is_unsure:
            with suppress(StorageError):  # they cost storage, but the checkpoint is whole
                for path, begun in self.begun().items():
                    self.drop(path, begun.token)

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _key_of(self, path: str) -> str:
        if not path:
            return self._key
        return f"{self._control}{path}" if is_control(path) else f"{self._key}/{path}"

    def _listed(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for page in self._client.pages(prefix):
            found |= {o.key[len(prefix) :]: o.nbytes for o in page.objects if not o.key.endswith("/")}
        return found

    def _uploads(self) -> Iterator[tuple[str, str, float]]:
        """Key and token of each upload below the key, and when it was begun."""
        prefix = self._key if self._single_file else f"{self._key}/"
        query = {"uploads": "", "prefix": prefix}
        for tree in self._trees("", query, {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}):
            for node in tree.iter("Upload"):
                yield xml_text(node, "Key"), xml_text(node, "UploadId"), xml_time(node, "Initiated") or 0.0

    def _parts(self, key: str, token: str) -> tuple[dict[int, Part], float]:
        """Parts of an upload, and when the last of them came."""
        found: dict[int, Part] = {}
        modified = 0.0
        for tree in self._trees(key, {"uploadId": token}, {"part-number-marker": "NextPartNumberMarker"}):
            for node in tree.iter("Part"):
                found[int(xml_text(node, "PartNumber"))] = Part(int(xml_text(node, "Size")), xml_text(node, "ETag"))
                modified = max(modified, xml_time(node, "LastModified") or 0.0)
        return found, modified

    def _trees(self, key: str, query: dict[str, str], markers: Mapping[str, str]) -> Iterator[ET.Element]:
        """Answers of a listing, one after another."""
        while True:
            answer = self._client.request("GET", key, query=query, allowed=frozenset({404}))
            if answer.status == 404:  # completed or aborted in the meantime
                return
            tree = tree_of(answer.data, self.url)
            yield tree
            if xml_text(tree, "IsTruncated") != "true":
                return
            after = {name: xml_text(tree, tag) for name, tag in markers.items()}
            if all(query.get(name) == value for name, value in after.items()):
                raise StorageError("the listing of uploads does not end", where=self.url)
            query = query | after
