"""Where parameters lie in gradient buffers, against a buffer that is filled one parameter after another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats.megatron.buckets import BucketEnds, coalesced_starts, starts_in_buckets

numels = st.lists(st.integers(1, 400), min_size=1, max_size=12)


def filled(
    sizes: list[int], bucket_numel: int | None, n_data_parallel: int
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """(bucket and start of each parameter, sizes of buckets without padding, starts in memory)."""
    placed: list[tuple[int, int]] = []
    ends: list[int] = []
    memory_starts: list[int] = []
    memory = opened = 0
    for size in sizes:
        while memory % 64:
            memory += 1
        placed.append((len(ends), memory - opened))
        memory_starts.append(memory)
        memory += size
        if bucket_numel is not None and memory - opened >= bucket_numel:
            ends.append(memory - opened)
            while memory % n_data_parallel or memory % 128:
                memory += 1
            opened = memory
    return placed, [*ends, *([memory - opened] if memory > opened else [])], memory_starts


@given(numels, st.one_of(st.none(), st.integers(1, 900)), st.integers(1, 6))
def test_known_buckets_place_every_parameter(sizes: list[int], bucket_numel: int | None, dp: int) -> None:
    """From the sizes of the buckets alone, each parameter is found in its bucket."""
    placed, ends, _ = filled(sizes, bucket_numel, dp)
    assert starts_in_buckets(sizes, ends) == placed


@given(numels, st.integers(1, 900), st.integers(1, 6))
def test_other_bucket_sizes_do_not_fit(sizes: list[int], bucket_numel: int, dp: int) -> None:
    """Buckets of a total that is one element off fit no parameters."""
    _, ends, _ = filled(sizes, bucket_numel, dp)
    assert starts_in_buckets(sizes, [*ends[:-1], ends[-1] + 1]) is None
    assert starts_in_buckets([*sizes, 1], ends) is None


@given(numels, st.one_of(st.none(), st.integers(1, 900)), st.integers(1, 6))
def test_stated_bucket_size_places_every_parameter(sizes: list[int], bucket_numel: int | None, dp: int) -> None:
    """Coalesced buckets: the stated size is enough, places in memory are not needed."""
    placed, ends, _ = filled(sizes, bucket_numel, dp)
    expected = [sum(ends[:bucket]) + start for bucket, start in placed]
    assert coalesced_starts(sizes, sum(ends), BucketEnds(dp, bucket_numel)) == expected


@given(numels, st.one_of(st.none(), st.integers(1, 900)), st.integers(1, 6), st.booleans())
def test_places_in_memory_are_never_contradicted(
    sizes: list[int], bucket_numel: int | None, dp: int, is_known: bool
) -> None:
    """With places in memory the answer is right, or refused because several bucket sizes fit; never wrong."""
    placed, ends, memory = filled(sizes, bucket_numel, dp)
    expected = [sum(ends[:bucket]) + start for bucket, start in placed]
    stated = BucketEnds(dp, bucket_numel if is_known else None, is_stated=is_known)
    found: list[int] | str | None
    try:
        found = coalesced_starts(sizes, sum(ends), stated, memory)
    except LayoutError:
        found = "refused"
    assert found == expected or (found == "refused" and not is_known)


def test_parameters_without_gaps_need_no_bucket_size() -> None:
    """Where every size is a multiple of 64 all splits place parameters alike: there is nothing to know."""
    sizes = [64, 640, 128, 320] * 400
    ends = BucketEnds(8, None, is_stated=False)
    assert coalesced_starts(sizes, sum(sizes), ends) == [sum(sizes[:n]) for n in range(1600)]
    assert coalesced_starts(sizes, sum(sizes) + 64, ends) is None


def test_shared_embeddings_have_buckets_of_their_own() -> None:
    """A parameter that is kept apart closes the bucket before it, and its own."""
    assert coalesced_starts([100, 30, 50], 208, BucketEnds(1, None), apart=[1]) == [0, 128, 158]
    assert starts_in_buckets([100, 30, 50], [128, 30, 50]) == [(0, 0), (1, 0), (2, 0)]
    with pytest.raises(AssertionError):
        assert coalesced_starts([100, 30, 50], 180, BucketEnds(1, None)) == [0, 100, 130]
