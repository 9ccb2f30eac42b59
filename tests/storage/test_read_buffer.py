"""The buffer that bytes of files are read into."""

from __future__ import annotations

from ckpt_tool.storage.read_buffer import ReadBuffer


def test_reads_do_not_go_a_little_further_into_their_page_than_in_their_file() -> None:
    """What processors copy slowly; and elements lie where they are to."""
    buffer = ReadBuffer()
    for offset in range(-64, 8192, 31):
        for shift in (0, 8, 15, 63):
            place = buffer.take(100 + offset % 7, offset, shift)
            assert len(place) == 100 + offset % 7
            assert place.ctypes.data % 64 == shift
            assert not 0 < (place.ctypes.data - offset) % 4096 < 64


def test_memory_is_kept() -> None:
    """It grows, and smaller pieces lie in what is there."""
    buffer = ReadBuffer()
    first = buffer.take(1000)
    assert buffer.take(500).ctypes.data == first.ctypes.data
    assert len(buffer.take(100_000)) == 100_000
