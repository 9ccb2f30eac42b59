"""Values, checksums, zero runs and replicas, from payload bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckpt_tool.api.trust.verify import verify
from ckpt_tool.checks.report import VerifyReport
from ckpt_tool.engine.base import Progress
from ckpt_tool.errors import FormatError, StorageError
from ckpt_tool.formats.base import Checksum, Source
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.storage.memory import MemoryStore
from tests.checks.synthetic import FakeReader, checkpoint_of, chunk, make, stored, tensor
from tests.storage.recording import RecordingStore

RANDOM = np.random.default_rng(5)


def report_of(
    manifest: Manifest, files: dict[str, bytes], recorded: tuple[Checksum, ...] = (), n_workers: int = 2
) -> VerifyReport:
    """A full verification in 64 KiB blocks."""
    checkpoint = checkpoint_of(manifest, files, FakeReader(manifest, recorded))
    return verify(checkpoint, level="full", memory_budget_bytes=256 << 10, n_workers=n_workers)


def faults(report: VerifyReport) -> list[Finding]:
    """Findings but the one that says that no checksum is recorded."""
    return [finding for finding in report.findings if finding.kind != "not-covered"]


def normal(*shape: int) -> npt.NDArray[np.float32]:
    """Random numbers, none of them zero."""
    return RANDOM.normal(size=shape).astype("f4") + np.float32(10)


def test_one_nan_is_found_with_its_place() -> None:
    """One NaN at flat index 12,345 in shard 3: tensor, global index, file and byte."""
    values = normal(500, 100)
    values.reshape(-1)[12_345] = np.nan
    manifest, files = stored({"a": normal(3, 3), "model.w": values}, n_files=8)
    [found] = faults(report_of(manifest, files))
    assert (found.kind, found.severity, found.fqn) == ("nan", Severity.ERROR, "model.w")
    assert found.where is not None
    raw = np.frombuffer(files[found.where.path], "f4", 1, found.where.offset)
    assert np.isnan(raw[0])
    assert found.where.path == "part_1.bin"
    assert found.message == (
        f"1 of 50,000 elements is NaN, the first at index [123, 45], byte {found.where.offset:,} of part_1.bin"
    )


def test_clean_values_have_no_finding() -> None:
    """The largest finite numbers of every type are numbers."""
    arrays: dict[str, npt.NDArray[Any]] = {
        f"{t}": np.array([np.finfo(t).max, np.finfo(t).min, 0, 1], t) for t in ("f2", "f4", "f8")
    }
    arrays |= {"c8": np.ones(4, "c8"), "u1": np.full(9, 255, "u1"), "i4": np.full(9, -1, "i4"), "b": np.ones(3, "?")}
    report = report_of(*stored(arrays))
    assert faults(report) == []
    assert report.checked_nbytes == sum(array.nbytes for array in arrays.values())


def test_infinities_are_warned_of_and_counted() -> None:
    """A mask may hold them, weights should not; those of all chunks are counted together, the first one placed."""
    values = normal(40, 1000)
    values[3, 7] = -np.inf
    values[35, 1] = np.inf
    [found] = faults(report_of(*stored({"model.w": values}, n_files=3)))
    assert (found.kind, found.severity) == ("inf", Severity.WARNING)
    assert found.message.startswith("2 of 40,000 elements are infinite, the first at index [3, 7], byte 12,028 of")


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "complex64"])
def test_nan_in_every_block_of_every_type(name: str) -> None:
    """A NaN in the last element of a tensor of several blocks is one NaN, whatever the width."""
    width = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "complex64": 8}[name]
    n = 300_000 // width
    raw = np.zeros(n * width, np.uint8)
    raw[-2:] = 0xFF  # little endian: the exponent of the last component
    manifest = make([tensor("w", (n,), name)], [chunk("w", Box((0,), (n,)), FileRange("a.bin", 3, n * width))])
    [found] = faults(report_of(manifest, {"a.bin": b"abc" + raw.tobytes()}))
    assert found.message.startswith(f"1 of {n:,} elements is NaN, the first at index [{n - 1}],")
    assert found.where == FileRange("a.bin", 3 + (n - 1) * width, width)


def test_big_endian_values() -> None:
    """Byte order is looked at, so that NaN is found and numbers are not taken for it."""
    values = np.array([1.5, np.nan, 2.0], ">f4")
    box, where = Box((0,), (3,)), FileRange("a.bin", 0, 12)
    manifest = make([tensor("w", (3,))], [chunk("w", box, where, int(ChunkFlag.BIG_ENDIAN))])
    [found] = faults(report_of(manifest, {"a.bin": values.tobytes()}))
    assert found.where == FileRange("a.bin", 4, 4)
    fine = np.array([0, 1, 0x0000_807F], ">u4")  # read the wrong way round the last one is infinite
    assert faults(report_of(manifest, {"a.bin": fine.tobytes()})) == []


def test_gaps_of_a_strided_chunk_are_nobodys() -> None:
    """NaN between the columns of a view is not the tensor's; NaN in a column is, at its own index."""
    base = normal(50, 8)
    base[:, 5] = np.nan
    box, where = Box((0, 0), (50, 2)), FileRange("a.bin", 0, 4 * (49 * 8 + 2))
    manifest = make([tensor("w", (50, 2))], [chunk("w", box, where, strides=(8, 1))])
    assert faults(report_of(manifest, {"a.bin": base.tobytes()})) == []
    base[7, 1] = np.nan
    [found] = faults(report_of(manifest, {"a.bin": base.tobytes()}))
    assert found.message.startswith("1 of 100 elements is NaN, the first at index [7, 1],")


def crc_case(nbytes: int) -> tuple[Manifest, bytes, Checksum]:
    """One tensor with a checksum over it and the 5 bytes before."""
    data = RANDOM.integers(0, 255, nbytes + 5, dtype=np.uint8).tobytes()
    manifest = make(
        [tensor("w", (nbytes,), "uint8")], [chunk("w", Box((0,), (nbytes,)), FileRange("a.bin", 5, nbytes))]
    )
    return manifest, data, Checksum(FileRange("a.bin", 0, nbytes + 5), zlib.crc32(data), "w")


@pytest.mark.parametrize("nbytes", [0, 1, 65_536 - 5, 65_536, 500_000])
def test_matching_checksum_covers_its_bytes(nbytes: int) -> None:
    """Of one block or of many, by one worker or by more."""
    manifest, data, checksum = crc_case(nbytes)
    for n_workers in (1, 3):
        report = report_of(manifest, {"a.bin": data}, (checksum,), n_workers)
        assert report.findings == ()
        assert report.covered_nbytes == nbytes + 5


@pytest.mark.parametrize("byte", [0, 4, 5, 70_000, 500_004])
def test_flipped_bit_is_found(byte: int) -> None:
    """Any bit of the range: tensor, file and byte range are named."""
    manifest, data, checksum = crc_case(500_000)
    damaged = bytearray(data)
    damaged[byte] ^= 4
    report = report_of(manifest, {"a.bin": bytes(damaged)}, (checksum,))
    [found] = report.findings
    assert (found.kind, found.severity, found.fqn, found.where) == (
        "crc-mismatch",
        Severity.ERROR,
        "w",
        FileRange("a.bin", 0, 500_005),
    )
    assert report.covered_nbytes == 0
    assert not report.is_ok


def test_checksum_of_zero_means_not_recorded() -> None:
    """A zip written without checksums records 0 for bytes that have another one."""
    manifest, data, checksum = crc_case(100)
    report = report_of(manifest, {"a.bin": data}, (Checksum(checksum.where, 0, "w"),))
    [found] = report.findings
    assert (found.kind, found.severity) == ("crc-not-recorded", Severity.INFO)
    assert report.covered_nbytes == 0


def test_files_without_checksums_are_counted() -> None:
    """What nobody can check is said to be so."""
    manifest, files = stored({"w": normal(6)}, n_files=3)
    first = Checksum(FileRange("part_0.bin", 0, 8), zlib.crc32(files["part_0.bin"]), "w")
    [found] = report_of(manifest, files, (first,)).findings
    assert (found.kind, found.severity) == ("not-covered", Severity.INFO)
    assert found.message.startswith("not covered: 2 of 3 files of tensors record no checksum")


class _FaultyStore(MemoryStore):
    """A disk with a bad block."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if offset <= 100_000 < offset + buffer.nbytes:
            raise StorageError("input/output error", where=path)
        super().read_into(path, offset, buffer)


def test_unreadable_block_is_a_finding_and_the_rest_is_checked() -> None:
    """A bad block of the disk: its bytes are named, what lies behind them is still looked at."""
    values = normal(200_000 // 4)
    values[-1] = np.nan
    manifest, files = stored({"w": values})
    checkpoint = checkpoint_of(manifest, files, store=_FaultyStore(files))
    found = verify(checkpoint, level="full", memory_budget_bytes=256 << 10).findings
    assert [finding.kind for finding in found if finding.severity is Severity.ERROR] == ["nan", "unreadable"]
    [bad] = [finding for finding in found if finding.kind == "unreadable"]
    assert bad.where is not None
    assert bad.where.offset <= 100_000 < bad.where.end
    assert bad.fqn == "w"


def test_quick_and_default_read_no_payload() -> None:
    """Not one byte of a tensor, whatever its values are."""
    manifest, files = stored({"w": normal(1000)})
    for level, expected in (("quick", 0), ("default", 0), ("full", 4000)):
        store = RecordingStore(MemoryStore(files))
        report = verify(checkpoint_of(manifest, files, store=store), level=level)
        assert (store.nbytes, report.checked_nbytes) == (expected, expected)


def test_every_byte_is_read_once() -> None:
    """Checksum, values and zero runs share one pass."""
    manifest, data, checksum = crc_case(300_000)
    store = RecordingStore(MemoryStore({"a.bin": data}))
    checkpoint = checkpoint_of(manifest, {}, FakeReader(manifest, (checksum,)), store)
    verify(checkpoint, level="full", memory_budget_bytes=256 << 10)
    assert store.nbytes == len(data)


def test_progress_counts_up_to_all_bytes() -> None:
    """Done never falls, and ends at the total, with several workers too."""
    manifest, files = stored({"w": normal(1000, 100)}, n_files=3)
    events: list[Progress] = []
    verify(
        checkpoint_of(manifest, files),
        level="full",
        memory_budget_bytes=256 << 10,
        n_workers=2,
        progress=events.append,
    )
    done = [event.done_nbytes for event in events]
    assert len(done) >= 6
    assert done == sorted(done)
    assert done[-1] == 400_000
    assert {event.total_nbytes for event in events} == {400_000}


class _HalfReader(FakeReader):
    """Cannot read the checksum of one tensor, wherever it comes up."""

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum]:
        """One for each chunk."""
        for row in range(len(manifest.chunks)):
            record = manifest.chunks.record(row, manifest.tensors, manifest.files)
            if record.fqn == "t7":
                raise FormatError("no directory", where=record.where.path)
            data = source.store.read(record.where.path, record.where.offset, record.where.length)
            yield Checksum(record.where, zlib.crc32(data), record.fqn)


def test_one_unreadable_checksum_does_not_hide_the_others() -> None:
    """All but the bytes of one tensor in each file are still proven."""
    manifest, files = stored({f"t{i}": normal(6) for i in range(20)}, n_files=2)
    reader = _HalfReader(manifest)
    report = verify(checkpoint_of(manifest, files, reader), level="full")
    assert [(f.kind, f.fqn, f.where.path if f.where else None) for f in report.findings] == [
        ("checksum-unreadable", "t7", "part_0.bin"),
        ("checksum-unreadable", "t7", "part_1.bin"),
    ]
    assert report.covered_nbytes == 19 * 24


def test_replicas_by_assumption_are_said_to_be_so() -> None:
    """Same key, different bytes, no placement: the message says why that may be."""
    manifest, files = replicas(normal(3, 4), normal(3, 4))
    assumed = manifest.replace(info={"replicated_by_assumption": ("model.w",)})
    [found] = [f for f in report_of(assumed, files).findings if f.kind == "different-replicas"]
    assert found.message.endswith("nothing in the files says how the ranks' parts belong together")


def adam(**changes: npt.NDArray[Any]) -> tuple[Manifest, dict[str, bytes]]:
    """A weight of 40 x 100 with its moments, some of them changed, in 3 files."""
    names = {"weight": "model.w", "exp_avg": "optim.state.w.exp_avg", "exp_avg_sq": "optim.state.w.exp_avg_sq"}
    return stored({fqn: changes.get(name, normal(40, 100)) for name, fqn in names.items()}, n_files=3)


def zeroed(start: int, stop: int) -> npt.NDArray[np.float32]:
    """A moment whose flat range is exactly zero."""
    values = normal(40, 100)
    values.reshape(-1)[start:stop] = 0
    return values


def test_zero_filled_tail_of_a_moment() -> None:
    """37 % of exp_avg_sq is zero where weight and exp_avg are not: written to wrong offsets."""
    [found] = faults(report_of(*adam(exp_avg_sq=zeroed(2520, 4000))))
    assert (found.kind, found.severity, found.fqn) == ("zero-run", Severity.WARNING, "optim.state.w.exp_avg_sq")
    assert found.message == (
        "1,480 of 4,000 elements (37%) of exp_avg_sq are exactly zero, from element 2,520 (index [25, 20]) on, "
        "while exp_avg is not zero there"
    )


def test_zeros_that_have_a_reason() -> None:
    """Nothing zero, a few zeros, rows that no gradient reached, padding rows."""
    assert faults(report_of(*adam())) == []
    assert faults(report_of(*adam(exp_avg=zeroed(50, 80)))) == []
    rows = report_of(*adam(exp_avg=zeroed(1000, 2000), exp_avg_sq=zeroed(1000, 2000)))
    assert {(found.kind, found.severity) for found in faults(rows)} == {("zero-rows", Severity.INFO)}
    padding = {name: zeroed(3000, 4000) for name in ("weight", "exp_avg", "exp_avg_sq")}
    assert faults(report_of(*adam(**padding))) == []


def replicas(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> tuple[Manifest, dict[str, bytes]]:
    """One box in two files."""
    shape = left.shape
    box = Box((2, *(0 for _ in shape[1:])), shape)
    whole = tensor("model.w", (shape[0] + 2, *shape[1:]))
    rest = Box((0, *(0 for _ in shape[1:])), (2, *shape[1:]))
    chunks = [
        chunk("model.w", rest, FileRange("c.bin", 0, 4 * rest.volume)),
        chunk("model.w", box, FileRange("a.bin", 0, left.nbytes)),
        chunk("model.w", box, FileRange("b.bin", 4, right.nbytes)),
    ]
    files = {"a.bin": left.tobytes(), "b.bin": b"abcd" + right.tobytes(), "c.bin": bytes(4 * rest.volume)}
    return make([whole], chunks), files


def test_equal_replicas() -> None:
    """Counted, and compared with no complaint."""
    values = normal(300, 1000)
    assert [found.kind for found in faults(report_of(*replicas(values, values)))] == ["replicas"]


def test_replicas_that_differ() -> None:
    """The first differing element in global coordinates, with both files."""
    values = normal(300, 1000)
    other = values.copy()
    other[250, 10] += 1
    other[299, 999] += 1
    found = [f for f in report_of(*replicas(values, other)).findings if f.kind == "different-replicas"]
    assert [(f.severity, f.fqn) for f in found] == [(Severity.ERROR, "model.w")]
    assert found[0].message == (
        "a.bin and b.bin hold different bytes for box [2:302, 0:1000], first at index [252, 10], "
        "byte 1,000,044 of b.bin"
    )


def test_replicas_with_other_strides_are_compared_by_element() -> None:
    """A transposed copy holds the same elements in another order."""
    values = normal(30, 20)
    box = Box((0, 0), (30, 20))
    chunks = [
        chunk("model.w", box, FileRange("a.bin", 0, 2400)),
        chunk("model.w", box, FileRange("b.bin", 0, 2400), strides=(1, 30)),
    ]
    manifest = make([tensor("model.w", (30, 20))], chunks)
    files = {"a.bin": values.tobytes(), "b.bin": np.ascontiguousarray(values.T).tobytes()}
    assert [found.kind for found in faults(report_of(manifest, files))] == ["replicas"]
    values[4, 5] = -1
    found = report_of(manifest, files | {"a.bin": values.tobytes()}).findings
    [differ] = [f for f in found if f.kind == "different-replicas"]
    assert "first at index [4, 5], byte 616 of b.bin" in differ.message
