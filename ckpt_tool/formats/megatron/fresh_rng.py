"""Random states as Megatron has them at the start of a run, made of the seed alone.

Source: Megatron-LM core 0.19, ``training/initialize.py`` (``_set_random_seed``) and ``tensor_parallel/random.py``;
torch 2.13, ``aten/src/ATen/CPUGeneratorImpl.cpp`` (the state of the generator on the CPU).
"""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np

from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import LayoutError
from ckpt_tool.formats._pickle.nodes import Stub
from ckpt_tool.formats._torch_file.written import fresh_tensor
from ckpt_tool.formats.megatron.target_grid import TargetGrid

__all__ = ["CPU_STATE_NBYTES", "fresh_random_state", "fresh_random_states"]

CPU_STATE_NBYTES = 5056
_N_WORDS = 624


def fresh_random_states(
    args: Stub, grid: TargetGrid, stage: int, tensor_rank: int, expert_rank: int = 0, *, first_key: int = 0
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """A rank's ``rng_state``, and the payloads of its tensors, whose storages are numbered from ``first_key`` on.

    Raises:
        LayoutError: the arguments do not tell the seed.
    """
    seed = args.attribute("seed")
    if type(seed) is not int:
        raise LayoutError("args do not tell the seed that random states start from", hint="give it: --arg seed=N")
    n_states = grid.data_parallel_size if args.attribute("data_parallel_random_init") else 1
    states = [fresh_random_state(seed + 10 * rank, stage, tensor_rank, expert_rank) for rank in range(n_states)]
    payloads: list[bytes] = []

    def with_tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: with_tensors(entry) for name, entry in value.items()}
        if not isinstance(value, bytes):
            return value
        payloads.append(value)
        return fresh_tensor(first_key + len(payloads) - 1, dtype("uint8"), (len(value),))

    return [with_tensors(state) for state in states], payloads


def fresh_random_state(seed: int, stage: int, tensor_rank: int, expert_rank: int = 0) -> dict[str, Any]:
    """One rank's entry of ``rng_state``; bytes stand where it has tensors of uint8.

    Args:
        seed: ``args.seed``.
        stage: pipeline stage.
        tensor_rank: tensor-parallel rank, of experts too.
        expert_rank: expert-parallel rank.
    """
    own = seed + 100 * stage
    seeds = {
        "data-parallel-rng": own,
        "model-parallel-rng": own + 2718 + tensor_rank,
        "expert-parallel-rng": own + 1024 + 100 * expert_rank + tensor_rank,
    }
    return {
        "random_rng_state": random.Random(own).getstate(),  # noqa: S311 - the generator that Megatron saves
        "np_rng_state": np.random.RandomState(own).get_state(),
        "torch_rng_state": _cpu_state(own),
        "cuda_rng_state": _cuda_state(own),
        "rng_tracker_states": {name: _cuda_state(number) for name, number in seeds.items()},
    }


def _cuda_state(seed: int) -> bytes:
    """Philox: the seed, and how much was drawn."""
    return struct.pack("<qq", seed, 0)


def _cpu_state(seed: int) -> bytes:
    """Mersenne twister as torch seeds it, with nothing drawn yet."""
    words = [seed & 0xFFFFFFFF]
    for number in range(1, _N_WORDS):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + number) & 0xFFFFFFFF)
    head = struct.pack("<QiiQ", seed, 1, 1, 0)
    return (head + struct.pack(f"<{_N_WORDS}Q", *words)).ljust(CPU_STATE_NBYTES, b"\0")
