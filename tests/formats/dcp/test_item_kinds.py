"""Checksums of items by kind are those of each item's own directory, and an item that differs is read by itself."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
import torch

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._dcp.item_kinds import ItemKinds, MemberSum
from ckpt_tool.formats._zip import directory
from ckpt_tool.formats._zip.container import Fault
from tests.formats.dcp.build import saved

EDGE = 4096


def told(kinds: ItemKinds, item: bytes) -> list[MemberSum | Fault]:
    """Of one item, by its edges."""
    head, tail = item[:EDGE], item[-EDGE:]
    return list(kinds.sums(lambda o, n: item[o : o + n], len(item), head, tail, where="x"))


def sums(kinds: ItemKinds, item: bytes) -> list[MemberSum]:
    """Without faults."""
    return [found for found in told(kinds, item) if not isinstance(found, Fault)]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the items whose directories were parsed."""
    seen: list[int] = []
    read_directory = directory.read_directory

    def counted(read: directory.Read, nbytes: int, *, where: str, tail_nbytes: int) -> directory.ZipDirectory:
        seen.append(nbytes)
        return read_directory(read, nbytes, where=where, tail_nbytes=tail_nbytes)

    monkeypatch.setattr("ckpt_tool.formats._dcp.item_kinds.read_directory", counted)
    return seen


def items(n: int) -> list[bytes]:
    """Items of three kinds, in turn."""
    generator = torch.Generator().manual_seed(3)
    shapes = [((40, 50), torch.float32), ((7,), torch.bfloat16), ((), torch.int64)]
    made = []
    for number in range(n):
        shape, dtype = shapes[number % 3]
        made.append(saved((torch.rand(shape, generator=generator) * 100).to(dtype)))
    return made


def test_each_kind_is_parsed_once(parsed: list[int]) -> None:
    """Thirty items of three kinds: the same checksums as one by one, from three directories."""
    made = items(30)
    kinds = ItemKinds()
    found = [sums(kinds, item) for item in made]
    assert len(parsed) == 3
    assert found == [sums(ItemKinds(), item) for item in made]
    assert all(len(each) == 2 for each in found)


def test_any_other_byte_is_another_kind(parsed: list[int]) -> None:
    """A byte of a header, of the directory or of the end that is not a checksum's sends the item to be parsed."""
    item = items(1)[0]
    kinds = ItemKinds()
    sums(kinds, item)
    start = item.index(b"PK\x01\x02")
    rng = random.Random(1)
    checksums = {at + 16 + k for at in range(start, len(item)) if item[at : at + 4] == b"PK\x01\x02" for k in range(4)}
    for place in [*rng.sample(range(600), 20), *rng.sample(sorted(set(range(start, len(item))) - checksums), 40)]:
        changed = item[:place] + bytes([item[place] ^ 1]) + item[place + 1 :]
        before = len(parsed)
        try:
            found = sums(kinds, changed)
        except FormatError:
            found = []
        except NotImplementedError:
            found = []
        assert len(parsed) == before + 1, place
        try:
            alone = sums(ItemKinds(), changed)
        except (FormatError, NotImplementedError):
            alone = []
        assert found == alone


def test_a_changed_checksum_is_told(tmp_path: Path, parsed: list[int]) -> None:
    """The checksum of another payload is read, not the kind's."""
    item = items(1)[0]
    kinds = ItemKinds()
    first = {name: crc for name, _, _, crc in sums(kinds, item)}
    at = item.index(b"PK\x01\x02")
    while b"data/0" not in item[at : at + 80]:
        at = item.index(b"PK\x01\x02", at + 4)
    changed = item[: at + 16] + b"\1\2\3\4" + item[at + 20 :]
    second = {name: crc for name, _, _, crc in sums(kinds, changed)}
    assert second == {**first, "data/0": 0x04030201}
    assert len(parsed) == 2, "the descriptor behind the payload still has the old one"


def test_no_flipped_bit_goes_unseen() -> None:
    """Whatever byte of an item it hits: a fault, a refusal, or another checksum than that of the bytes."""
    kinds = ItemKinds()
    item = items(2)[1]
    assert told(kinds, item) == sums(ItemKinds(), item)
    unseen = []
    for place in range(len(item)):
        changed = item[:place] + bytes([item[place] ^ 1 << place % 8]) + item[place + 1 :]
        try:
            found = told(kinds, changed)
        except (FormatError, NotImplementedError):
            continue
        checked = [f for f in found if not isinstance(f, Fault)]
        is_right = all(zlib.crc32(changed[start : start + n]) == crc for _, start, n, crc in checked)
        if len(checked) == len(found) == 2 and is_right:
            unseen.append(place)
    assert unseen == []
