"""Damage that hypothesis looks for, and makes small where it finds any: readers answer, or refuse in words."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_tool.errors import CkptError
from tests.hostile.fuzz import FIXTURES
from tests.hostile.reading import looked_at

SEARCHED = (
    "torch/dcp_zstd", "torch/dcp_safetensors", "torch/hf_single", "torch/hf_sharded", "torch/verl_2d",
    "torch/fsdp1_per_rank_pt_2r", "torch_checkpointing/plain_odd", "deepspeed/ds_z0_fp32", "bytecheckpoint/ddp_2r",
    "torch/dcp_no_collectives",
)  # fmt: skip
N_EXAMPLES = 50
Edit = Callable[[bytearray], None]


def _put(at: float, value: bytes) -> Edit:
    def edit(data: bytearray) -> None:
        start = int(at * len(data))
        data[start : start + len(value)] = value

    return edit


def _cut(at: float, n: int) -> Edit:
    def edit(data: bytearray) -> None:
        start = int(at * len(data))
        del data[start : start + n]

    return edit


def _repeated(at: float, n: int, to: float) -> Edit:
    def edit(data: bytearray) -> None:
        start, target = int(at * len(data)), int(to * len(data))
        data[target:target] = data[start : start + n]

    return edit


PLACES = st.floats(0, 1, exclude_max=True) | st.floats(0, 0.02) | st.floats(0.97, 1, exclude_max=True)
VALUES = st.binary(min_size=1, max_size=8) | st.sampled_from(
    [b"\xff" * 4, b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7, b"PK\x01\x02", b"R.", b"\x81", b"]" * 40, b"NaN", b"-1"]
)
EDITS = st.builds(_put, PLACES, VALUES) | st.builds(_cut, PLACES, st.integers(1, 4096))
EDITS |= st.builds(_repeated, PLACES, st.integers(1, 512), PLACES)
WAYS = st.lists(EDITS, min_size=1, max_size=3)


@pytest.mark.parametrize("name", SEARCHED)
def test_readers_answer(name: str) -> None:
    """Whatever bytes of whatever file are others, more or fewer: a manifest, or an error that says what is wrong."""
    folder = FIXTURES / name / "ckpt"
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    filled = [path for path, data in files.items() if data]
    looked_at(files)

    @settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.sampled_from(filled), WAYS)
    def search(path: str, ways: list[Edit]) -> None:
        data = bytearray(files[path])
        for edit in ways:
            if data:
                edit(data)
        with suppress(CkptError):
            looked_at({**files, path: bytes(data)})

    search()
