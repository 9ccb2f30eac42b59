"""Rules of tensor parallelism, against numpy doing what DeepSpeed's merge does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats.deepspeed.patterns import Patterns
from ckpt_tool.formats.deepspeed.sharding import Join, Rules

Array = npt.NDArray[np.int64]


def joined(join: Join, shards: dict[int, Array]) -> list[Any]:
    """The whole tensor out of its shards; -1 where nothing is."""
    whole = np.full(join.shape, -1, dtype=np.int64)
    for rank, pairs in join.pairs.items():
        for pair in pairs:
            assert (whole[pair.whole.slices] == -1).all()
            whole[pair.whole.slices] = shards[rank][pair.local.slices]
    return list(whole.tolist())


def join_of(info: dict[str, Any], shards: dict[int, Array], name: str = "w") -> Join:
    """The join that the record gives."""
    return Rules.parse(info, "info").join(name, {rank: shard.shape for rank, shard in shards.items()})


FULL = np.arange(24 * 6).reshape(24, 6)
AFFINE = {
    "affine_map": {
        "version": 1,
        "params": {
            r"^w$": {
                "logical_shape": [24, 6],
                "ranks": {
                    rank: {
                        "shard_shape": [12, 6],
                        "pieces": [
                            {"shape": [4, 6], "source": [(p * 8 + rank * 4) * 6, [6, 1]], "dest": [p * 24, [6, 1]]}
                            for p in range(3)
                        ],
                    }
                    for rank in (0, 1)
                },
            }
        },
    }
}


@pytest.mark.parametrize(
    ("info", "shards", "expected"),
    [
        ({}, [FULL[:13], FULL[13:]], FULL),
        ({"parameter_with_row_parallelism_patterns": ["w"]}, [FULL[:, :2], FULL[:, 2:]], FULL),
        ({"tp_replicated_parameter_patterns": [r"^w$"]}, [FULL, FULL], FULL),
        ({"parameter_to_average_patterns": [r"^w$"]}, [FULL, FULL], FULL),
        (
            {"parameter_with_2_sub_params_cat_dim_0": ["w"]},
            [np.concatenate([FULL[:6], FULL[12:18]]), np.concatenate([FULL[6:12], FULL[18:]])],
            FULL,
        ),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": [[8, 8, 8], 6], "partition_dim": 0}]},
            [
                np.concatenate([FULL[p : p + 4] for p in (0, 8, 16)]),
                np.concatenate([FULL[p : p + 4] for p in (4, 12, 20)]),
            ],
            FULL,
        ),
        (
            {
                "parameter_with_sub_params": [{"patterns": ["w"], "shape": [[16, 4, 4], 6], "partition_dim": 0}],
                "sub_param_shard_widths": {"w": [[10, 6], [2, 2], [2, 2]]},
            },
            [
                np.concatenate([FULL[:10], FULL[16:18], FULL[20:22]]),
                np.concatenate([FULL[10:16], FULL[18:20], FULL[22:24]]),
            ],
            FULL,
        ),
        ({"vocabulary_parameter_patterns": ["w"], "original_vocab_size": 21}, [FULL[:12], FULL[12:]], FULL[:21]),
        (AFFINE, [np.concatenate([FULL[p : p + 4] for p in (r, r + 8, r + 16)]) for r in (0, 4)], FULL),
    ],
    ids=["default", "rows", "replicated", "averaged", "halves", "parts", "widths", "vocabulary", "affine"],
)
def test_shards_join(info: dict[str, Any], shards: list[Array], expected: Array) -> None:
    """Every rule puts every element where it was before the cut."""
    by_rank = dict(enumerate(shards))
    assert joined(join_of(info, by_rank), by_rank) == expected.tolist()


def test_replicas_are_taken_once() -> None:
    """Of equal shards the first rank's is taken, and the others are known to be copies."""
    join = join_of({"tp_replicated_parameter_patterns": ["w"]}, {0: FULL, 1: FULL})
    assert join.replicated_on == (1,)


@pytest.mark.parametrize(
    ("info", "shards", "error", "match"),
    [
        ({"tp_replicated_parameter_patterns": ["w"]}, [FULL, FULL[:3]], FormatError, "replicated, but shards have"),
        ({}, [FULL, FULL[:, :3]], FormatError, "cannot be joined along dimension 0"),
        ({"parameter_with_2_sub_params_cat_dim_0": ["w"]}, [FULL[:3], FULL], FormatError, "not 2 equal parts"),
        (AFFINE, [FULL, FULL], FormatError, "does not describe the shard"),
        ({"affine_map": {"params": {"w": {"logical_shape": "x"}}}}, [FULL, FULL], FormatError, "logical_shape"),
    ],
)
def test_shards_that_do_not_fit(info: dict[str, Any], shards: list[Array], error: type[Exception], match: str) -> None:
    """The message names the parameter and both shapes."""
    with pytest.raises(error, match=match):
        join_of(info, dict(enumerate(shards)))


def test_scaled_pieces_are_refused() -> None:
    """A shard that holds multiples of the elements is more than copies of bytes."""
    piece = {"shape": [24, 6], "source": [0, [6, 1]], "dest": [0, [6, 1]], "scale": 0.5}
    scaled = {"logical_shape": [24, 6], "ranks": {0: {"shard_shape": [24, 6], "pieces": [piece]}}}
    with pytest.raises(Unsupported, match=r"scaled by 0\.5"):
        join_of({"affine_map": {"params": {"^w$": scaled}}}, {0: FULL})


def test_patterns_match_from_the_start() -> None:
    """As ``re.match``: a prefix is enough, and literal names are found whatever characters they have."""
    patterns = Patterns({r"^a\.b\-c\.weight$": "literal", r"\d+\.mlp": "regex"})
    assert [patterns.get(name) for name in ("a.b-c.weight", "axb-c.weight", "12.mlp.w", "x.12.mlp")] == [
        "literal", None, "regex", None,
    ]  # fmt: skip


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)*$", "((a*)b*)*c", "a" * 2000, "a*a*a*a*a*a*a*a*a*b"])
def test_patterns_that_could_take_forever_are_refused(pattern: str) -> None:
    """A pattern comes out of a file, and must not be able to stop the program."""
    with pytest.raises(Unsupported, match="unbounded time"):
        Patterns({pattern: 1})


def test_a_pattern_that_is_none() -> None:
    """A broken expression is the file's fault."""
    with pytest.raises(FormatError, match="is none"):
        Patterns({"(": 1})
