"""torchrun megatron_job.py ACTION FOLDER: a sharded state dict of real megatron-core, cut over all ranks as by TP.

It has what Megatron's models have: layers stacked under one key, a gated weight behind a factory, a padded vocabulary,
an object for each rank, and what is not saved. ``load`` compares with what Megatron itself loads, bit for bit;
``load-theirs`` has Megatron load what ``save-ours`` has saved here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "fixtures/megatron/make"))

N_LAYERS, HIDDEN, WIDTH = 3, 8, 24


def state_of(rank: int, size: int, vocabulary: int, *, is_random: bool) -> dict[str, Any]:
    """A sharded state dict; random values are the same for every cut."""
    from megatron.core.dist_checkpointing import ShardedTensor  # type: ignore[import-not-found]
    from megatron.core.dist_checkpointing.mapping import (  # type: ignore[import-not-found]
        LocalNonpersistentObject,
        ShardedObject,
    )
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory  # type: ignore[import-not-found]

    generator = torch.Generator().manual_seed(0)

    def part(shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        whole = torch.randn(shape, generator=generator).to(dtype)
        cut = whole.chunk(size, dim)[rank].clone()
        return cut if is_random else torch.zeros_like(cut)

    sharded = ShardedTensor.from_rank_offsets
    state: dict[str, Any] = {
        "embedding": sharded(
            "embedding.word_embeddings.weight", part((vocabulary, HIDDEN), 0, torch.bfloat16), (0, rank, size),
            allow_shape_mismatch=True,
        ),
        "layers": {},
    }  # fmt: skip
    for layer in range(N_LAYERS):
        weight = part((HIDDEN, WIDTH), 1)
        gated = torch.cat([part((WIDTH, HIDDEN), 0), part((WIDTH, HIDDEN), 0)])
        norm = torch.randn(HIDDEN, generator=generator)
        state["layers"][f"{layer}"] = {
            "fc2": sharded("mlp.fc2.weight", weight, (0, layer, N_LAYERS), (2, rank, size), prepend_axis_num=1),
            "fc1": apply_swiglu_sharded_factory(
                sharded("mlp.fc1.weight", gated, (0, layer, N_LAYERS), (1, rank, size), prepend_axis_num=1),
                ((0, layer, N_LAYERS),),
            ),
            "norm": sharded(
                "norm.weight", norm if is_random else torch.zeros(HIDDEN), (0, layer, N_LAYERS), prepend_axis_num=1,
                replica_id=(0, rank, 0),
            ),
        }  # fmt: skip
    seeds = {"seed": 7, "state": [1.5, 2]} if is_random else None
    state["rng"] = ShardedObject("rng_state", seeds, (1,), (0,), replica_id=rank)
    state["local"] = LocalNonpersistentObject({"mine": rank})
    return state


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves by path; tensors as their bits."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}/{key}").items()}
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {path: (str(value.dtype), tuple(value.shape), bits)}
    return {path: value}


def unwrapped(value: Any) -> Any:
    """What Megatron's wrappers hold."""
    if isinstance(value, dict):
        return {key: unwrapped(inner) for key, inner in value.items()}
    return value.unwrap() if hasattr(value, "unwrap") else value.data


def main(action: str, folder: str) -> None:
    """Save, or load twice and compare."""
    import cpu_shim  # type: ignore[import-not-found]

    rank, size = cpu_shim.init_dist()
    from megatron.core import dist_checkpointing  # type: ignore[import-not-found]

    if action == "save":
        if rank == 0:
            Path(folder).mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state_of(rank, size, 40, is_random=True), folder)
        return
    import ckpt_tool

    if action == "save-ours":
        state = {**state_of(rank, size, 48, is_random=True), "iteration": 5, "groups": {0: {"lr": 0.5}}}
        ckpt_tool.save(state, folder, format="megatron", extra_state={"data": {"at": 10 + rank}}).wait()
        return
    if action == "load-theirs":
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        from megatron.core.dist_checkpointing.serialization import load_sharded_metadata  # type: ignore[import-not-found]

        own = {"own": ShardedObject("extra_state.data", None, (2,), (rank % 2,), replica_id=rank // 2)}
        asked = {**state_of(rank, size, 48, is_random=False), "iteration": 0, **(own if size > 1 else {})}
        names = load_sharded_metadata(folder)
        theirs = dist_checkpointing.load(asked, folder)
        if theirs.get("own", {"at": 10}) != {"at": 10 + rank % 2} or "extra_state.data/shard_1_2" not in names:
            raise SystemExit(f"rank {rank} of {size} has {theirs.get('own')} of {sorted(names)}")
        found, expected = flat(theirs), flat(unwrapped(state_of(rank, size, 48, is_random=True)))
        different = sorted(key for key in expected if found.get(key) != expected[key])
        if different or (theirs["iteration"], theirs["groups"]) != (5, {0: {"lr": 0.5}}):
            raise SystemExit(f"rank {rank} of {size}: {different} differ: {sorted(theirs)}")
        torch.distributed.barrier()
        if rank == 0:
            print(f"SAVED {len(expected)} leaves")
        return
    theirs = dist_checkpointing.load(state_of(rank, size, 48, is_random=False), folder)
    ours = state_of(rank, size, 48, is_random=False)
    memory = ours["layers"]["0"]["fc1"].data
    report = ckpt_tool.load(ours, folder)
    found, expected = flat(ours), flat(theirs)
    different = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
    if different or not report.n_tensors:
        raise SystemExit(f"rank {rank} of {size}: {different} differ: {report}")
    if ours["layers"]["0"]["fc1"] is not memory:
        raise SystemExit("a factory's tensor was replaced, although it is filled through its views")
    torch.distributed.barrier()
    if rank == 0:
        print(f"ALIKE {report.n_tensors} tensors, {report.n_values} values")


if __name__ == "__main__":
    main(*sys.argv[1:])
