"""A table comes back from its JSON as it was, and what is no table, or a changed one, is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckpt_tool.errors import CkptError, FormatError, IntegrityError, Unsupported
from ckpt_tool.manifest.digest import ContentDigest
from ckpt_tool.manifest.digest_table import DigestRow, DigestTable, FileDigest, parse_table

TABLE = DigestTable(
    "dcp",
    (
        DigestRow("w", "model", ContentDigest("float32", (2, 3), 0xAB, 5)),
        DigestRow("s", "optimizer", ContentDigest("int64", (), 0)),
    ),
    (FileDigest("a", 3, 7), FileDigest("b", 0, None, "00ff")),
)


def test_round_trip() -> None:
    """JSON and back changes nothing."""
    assert parse_table(json.dumps(TABLE.to_json()), where="m") == TABLE


def test_document() -> None:
    """The document is as it is described."""
    document = TABLE.to_json()
    assert list(document) == ["schema", "format", "tensors", "files", "check"]
    assert document["tensors"][0] == {
        "fqn": "w", "dtype": "float32", "shape": [2, 3], "section": "model", "crc32": "000000ab",
        "wide": "00000000000000000000000000000005",
    }  # fmt: skip
    assert document["files"] == [{"path": "a", "nbytes": 3, "crc32": "00000007"}, {"path": "b", "nbytes": 0, "sha256": "00ff"}]  # fmt: skip  # noqa: E501


def test_is_wide() -> None:
    """A table is wide when each of its rows is."""
    assert not TABLE.is_wide
    assert DigestTable("dcp", TABLE.rows[:1]).is_wide


def changed(**fields: Any) -> str:
    """The document with other fields."""
    return json.dumps({**TABLE.to_json(), **fields})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("not json", FormatError, "got no JSON"),
        ("[]", FormatError, "got schema None"),
        (changed(schema="ckpt-tool/verify/1"), FormatError, "got schema 'ckpt-tool/verify/1'"),
        (changed(schema="ckpt-tool/digests/2"), Unsupported, "expected schema ckpt-tool/digests/1"),
        (changed(tensors=[{"fqn": "w"}]), FormatError, "lacks what belongs in it"),
        (changed(tensors=[{**TABLE.to_json()["tensors"][0], "shape": [-1]}]), FormatError, "lacks what belongs"),
        (changed(tensors=[{**TABLE.to_json()["tensors"][0], "shape": [1 << 70]}]), FormatError, "lacks what belongs"),
        (changed(tensors=[{**TABLE.to_json()["tensors"][0], "crc32": "1"}]), FormatError, "lacks what belongs"),
        (changed(tensors=7), FormatError, "lacks what belongs"),
        ("[" * 100_000, FormatError, "got no JSON"),
        (changed(files=[{"path": "a", "nbytes": 3}]), FormatError, "lacks what belongs"),
        (changed(files=[]), IntegrityError, "the manifest itself was changed"),
        (changed(check="00000000"), IntegrityError, "expected '00000000'"),
    ],
)
def test_refused(text: str, error: type[CkptError], message: str) -> None:
    """Each is told from a checkpoint that does not agree."""
    with pytest.raises(error, match=message):
        parse_table(text, where="m.json")
