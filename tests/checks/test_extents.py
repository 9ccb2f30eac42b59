"""Byte ranges of chunks against the files that are there."""

from __future__ import annotations

import pytest

from ckpt_tool.checks.extents import extent_findings, length_findings, loss_findings, measure
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag, FileTable
from tests.checks.synthetic import chunk, kinds, listing_of, make, tensor


def two_files() -> Manifest:
    """``w`` lies half in ``a.bin`` and half in ``b.bin``, ``v`` in ``b.bin``."""
    return make(
        [tensor("w", (4, 2)), tensor("v", (3,))],
        [
            chunk("w", Box((0, 0), (2, 2)), FileRange("a.bin", 0, 16)),
            chunk("w", Box((2, 0), (2, 2)), FileRange("b.bin", 0, 16)),
            chunk("v", Box((0,), (3,)), FileRange("b.bin", 16, 12)),
        ],
    )


def test_whole_files_have_no_finding() -> None:
    """Every byte is there, and more than that is no harm."""
    manifest = two_files()
    extents = measure(manifest, listing_of(a=16, b=100))
    assert list(extent_findings(manifest, listing_of(a=16, b=100), extents)) == []
    assert list(loss_findings(manifest, extents)) == []
    assert list(length_findings(manifest)) == []


def test_missing_file_names_what_it_holds() -> None:
    """One finding for the file with its tensors counted, one for each tensor with the share that is lost."""
    manifest = two_files()
    extents = measure(manifest, listing_of(a=16))
    [missing] = extent_findings(manifest, listing_of(a=16), extents)
    assert (missing.kind, missing.severity) == ("missing-file", Severity.ERROR)
    assert missing.message == "b.bin is missing; it holds 2 chunks of 2 tensors: 'w', 'v'"
    lost = list(loss_findings(manifest, extents))
    assert kinds(lost) == [("lost-data", "w"), ("lost-data", "v")]
    assert lost[0].message == "4 of 8 elements (50.0%) have no bytes left, the first lost box is [2:4, 0:2] in b.bin"


def test_truncated_file_says_both_sizes_and_the_difference() -> None:
    """Only the chunk that reaches beyond the end is lost."""
    manifest = two_files()
    listing = listing_of(a=16, b=20)
    extents = measure(manifest, listing)
    [cut] = extent_findings(manifest, listing, extents)
    assert (cut.kind, cut.fqn, cut.where) == ("truncated-file", "v", FileRange("b.bin", 20, 8))
    assert cut.message == "b.bin has 20 bytes, expected at least 28 (8 missing); cut off are 1 chunk of 1 tensor: 'v'"
    assert kinds(loss_findings(manifest, extents)) == [("lost-data", "v")]


def test_file_that_is_one_byte_short_is_found() -> None:
    """The last byte counts, and the file that ends with it is whole."""
    manifest = two_files()
    for nbytes, expected in ((28, []), (27, [("truncated-file", "v")])):
        listing = listing_of(a=16, b=nbytes)
        assert kinds(extent_findings(manifest, listing, measure(manifest, listing))) == expected


def test_empty_file_has_its_own_kind() -> None:
    """A file of no bytes that should hold some is what a killed save leaves."""
    listing = listing_of(a=16, b=0)
    found = extent_findings(two_files(), listing, measure(two_files(), listing))
    assert kinds(found) == [("empty-file", "w")]


def test_replica_elsewhere_means_no_loss() -> None:
    """A file is missing, but another one holds the same box."""
    box = Box((0,), (3,))
    manifest = make(
        [tensor("v", (3,))],
        [chunk("v", box, FileRange("a.bin", 0, 12)), chunk("v", box, FileRange("b.bin", 0, 12))],
    )
    extents = measure(manifest, listing_of(b=12))
    assert kinds(extent_findings(manifest, listing_of(b=12), extents)) == [("missing-file", "v")]
    assert list(loss_findings(manifest, extents)) == []
    assert kinds(loss_findings(manifest, measure(manifest, listing_of()))) == [("lost-data", "v")]


@pytest.mark.parametrize(("offset", "length"), [(-8, 12), (0, -1), (2**62, 12), (8, 2**63 - 1), (2**63 - 1, 2**63 - 1)])
def test_hostile_extents_are_never_there(offset: int, length: int) -> None:
    """Negative and enormous numbers do not wrap around into the file."""
    manifest = make([tensor("v", (3,))], [chunk("v", Box((0,), (3,)), FileRange("a.bin", offset, length))])
    assert measure(manifest, listing_of(a=100)).has_chunk.tolist() == [False]
    [finding] = extent_findings(manifest, listing_of(a=100), measure(manifest, listing_of(a=100)))
    assert finding.severity is Severity.ERROR


def test_objects_count_as_held() -> None:
    """A missing file that holds only an object is missed as well."""
    manifest = make([], [], [Blob("step", "torch_save", FileRange("a.bin", 0, 9))])
    [finding] = extent_findings(manifest, listing_of(), measure(manifest, listing_of()))
    assert (finding.kind, finding.fqn) == ("missing-file", "step")


def test_decoded_content_is_judged_by_its_encoded_part() -> None:
    """A compressed item is there when the bytes that it is decoded from are."""
    manifest = make([tensor("v", (3,))], [chunk("v", Box((0,), (3,)), FileRange("a.bin@4", 0, 12))])
    entry = FileEntry("a.bin@4", -1, "zstd", FileRange("a.bin", 4, 20))
    manifest = manifest.replace(files=FileTable((entry,)))
    assert measure(manifest, listing_of(a=24)).has_chunk.tolist() == [True]
    listing = listing_of(a=23)
    [finding] = extent_findings(manifest, listing, measure(manifest, listing))
    assert (finding.kind, finding.where) == ("truncated-file", FileRange("a.bin", 23, 1))


@pytest.mark.parametrize(
    ("length", "flags", "expected"),
    [
        (24, 0, []),
        (20, 0, [("length-mismatch", "v")]),
        (28, 0, [("length-mismatch", "v")]),
        (28, ChunkFlag.UNRESOLVED, []),
        (20, ChunkFlag.UNRESOLVED, [("length-mismatch", "v")]),
    ],
)
def test_length_is_volume_times_itemsize(length: int, flags: int, expected: list[tuple[str, str]]) -> None:
    """Payload has exactly the bytes of its box, a container item at least these."""
    manifest = make([tensor("v", (3, 2))], [chunk("v", Box((0, 0), (3, 2)), FileRange("a.bin", 0, length), flags)])
    assert kinds(length_findings(manifest)) == expected


def test_length_of_a_strided_chunk_is_its_span() -> None:
    """Elements of two columns of eight: from the first to the last, gaps included."""
    where = FileRange("a.bin", 0, 4 * (2 * 8 + 2))
    manifest = make([tensor("v", (3, 2))], [chunk("v", Box((0, 0), (3, 2)), where, strides=(8, 1))])
    assert list(length_findings(manifest)) == []
