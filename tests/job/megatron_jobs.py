"""A job that trains as Megatron does: tensor-parallel weights, and an optimizer cut into flat ranges over replicas.

Gradients are taken of whole weights on every rank, and the optimizer works element by element, so that losses do not
depend on how many ranks there are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt_tool
from tests.frameworks.wrappers import Held, Sharded
from tests.job.workers import joined

FORMATS = ("megatron", "dcp")
WEIGHTS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "embedding.weight": ((12, 5), 0),
    "layers.fc1.weight": ((2, 14, 6), 1),
    "layers.fc2.weight": ((2, 6, 14), 2),
    "norm.weight": ((2, 6), None),
}
"""Global shape, and the dimension that tensor parallelism cuts; the first dimension of the last three is the layer."""
SLOTS = ("param", "exp_avg", "exp_avg_sq")


class Trainer:
    """One rank of a job: its cut of the weights, and its range of the optimizer's state."""

    def __init__(self, rank: int, size: int, seed: int) -> None:
        """Weights of a seed, the same however many ranks there are."""
        self.tp = 2 if size % 2 == 0 else 1
        self.dp = size // self.tp
        self.tensor_rank, self.replica = rank % self.tp, rank // self.tp
        self.rank, self.size, self.step = rank, size, 0
        made = torch.Generator().manual_seed(seed)
        whole = {name: torch.randn(shape, generator=made) for name, (shape, _) in WEIGHTS.items()}
        self.local = {name: self.cut(name, each).clone() for name, each in whole.items()}
        self.flat = torch.cat([each.reshape(-1) for each in self.local.values()])
        share = -(-len(self.flat) // self.dp)
        self.start, self.stop = share * self.replica, min(share * (self.replica + 1), len(self.flat))
        master = self.flat[self.start : self.stop].clone()
        self.slots = dict(zip(SLOTS, (master, torch.zeros_like(master), torch.zeros_like(master)), strict=True))

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a weight."""
        dim = WEIGHTS[name][1]
        return whole if dim is None else whole.chunk(self.tp, dim)[self.tensor_rank]

    def train(self, n_steps: int) -> list[float]:
        """Losses of some steps."""
        losses = []
        for _ in range(n_steps):
            self.step += 1
            whole = {name: each.requires_grad_() for name, each in self._whole().items()}
            data = torch.randn(8, 5, generator=torch.Generator().manual_seed(self.step)) @ whole["embedding.weight"].t()
            hidden = data[:, :6]
            for layer in range(2):
                inner = torch.tanh(hidden @ whole["layers.fc1.weight"][layer].t())
                hidden = hidden + (inner @ whole["layers.fc2.weight"][layer].t()) * whole["norm.weight"][layer]
            loss = hidden.square().mean()
            loss.backward()
            gradients = [self.cut(name, each.grad).reshape(-1) for name, each in whole.items() if each.grad is not None]
            self._update(torch.cat(gradients)[self.start : self.stop])
            losses.append(float(loss.detach()))
        return losses

    def _update(self, gradient: torch.Tensor) -> None:
        """One step of Adam on this rank's range, and what the others made of theirs."""
        master, mean, square = (self.slots[slot] for slot in SLOTS)
        mean.mul_(0.9).add_(gradient, alpha=0.1)
        square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        master.sub_(0.01 * mean / (square.sqrt() + 1e-8))
        for tensor_rank, start, part in _everyone((self.tensor_rank, self.start, master)):
            if tensor_rank == self.tensor_rank:
                self.flat[start : start + len(part)] = part
        for (name, local), part in zip(self.local.items(), self._split(self.flat), strict=True):
            self.local[name].copy_(part.view(local.shape))

    def _split(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts: tuple[torch.Tensor, ...] = flat.split([each.numel() for each in self.local.values()])
        return parts

    def _whole(self) -> dict[str, torch.Tensor]:
        cuts = _everyone(self.local)[: self.tp]
        dims = {name: dim for name, (_, dim) in WEIGHTS.items()}
        return {
            name: cuts[0][name].clone() if dim is None else torch.cat([cut[name] for cut in cuts], dim)
            for name, dim in dims.items()
        }

    def state(self) -> dict[str, Any]:
        """What ``sharded_state_dict`` of a model and of its optimizer give, wrappers around this rank's memory."""
        return {
            "model": {name: self._sharded(name, name, each) for name, each in self.local.items()},
            "optimizer": {slot: dict(self._ranges(slot)) for slot in SLOTS},
            "groups": {0: {"lr": 0.01, "betas": (0.9, 0.99)}},
            "iteration": self.step,
            "rng": Held("rng_state", {"seed": 7, "state": torch.arange(3)}, (1,), (0,)),
        }

    def _ranges(self, slot: str) -> Iterator[tuple[str, Sharded]]:
        """The weights that this rank's range meets, each with its part of it, as in ``fully_sharded_model_space``."""
        at = 0
        for name, local in self.local.items():
            start, stop = max(self.start, at), min(self.stop, at + local.numel())
            if start < stop:
                data = self.slots[slot][start - self.start : stop - self.start]
                held = slice(start - at, stop - at)
                yield name, self._sharded(f"optimizer.state.{slot}.{name}", name, data, held)
            at += local.numel()

    def _sharded(self, key: str, name: str, data: torch.Tensor, held: slice | None = None) -> Sharded:
        shape, dim = WEIGHTS[name]
        local = tuple(self.local[name].shape)
        offset = tuple(self.tensor_rank * n if at == dim else 0 for at, n in enumerate(local))
        return Sharded(key, data, shape, offset, flattened_range=held, local_shape=local, replica_id=self.replica)


def _everyone(value: Any) -> list[Any]:
    """What every rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def resumed(rank: int, size: int, url: str) -> list[float]:
    """Losses after loading into a job that was something else."""
    trainer = Trainer(rank, size, seed=99)
    state = trainer.state()
    report = ckpt_tool.load(state, url)
    trainer.step = state["iteration"]
    trainer.flat.copy_(torch.cat([each.reshape(-1) for each in trainer.local.values()]))
    if report.missing or state["groups"][0] != {"lr": 0.01, "betas": (0.9, 0.99)}:
        return []
    return trainer.train(3) if torch.equal(state["rng"]["state"], torch.arange(3)) else []


def save_all(rank: int, size: int, rendezvous: str, out: str) -> None:
    """Train, save in each format, go on, and resume."""
    with joined(rank, size, rendezvous):
        found = {}
        for name in FORMATS:
            trainer = Trainer(rank, size, seed=1)
            trainer.train(3)
            handle = ckpt_tool.save(
                trainer.state(), f"{out}/{size}/{name}", format=name, extra_state={"rank": [rank], "rng": torch.ones(2)}
            )
            losses = trainer.train(3)
            handle.wait()
            dist.barrier()
            found[name] = [losses, resumed(rank, size, f"{out}/{size}/{name}")]
        Path(f"{out}/saved-{size}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def load_all(rank: int, size: int, rendezvous: str, out: str) -> None:
    """Resume from what jobs of other sizes have saved."""
    with joined(rank, size, rendezvous):
        sizes = [each for each in os.listdir(out) if each.isdecimal()]
        found = {f"{each}/{name}": resumed(rank, size, f"{out}/{each}/{name}") for each in sizes for name in FORMATS}
        Path(f"{out}/loaded-{size}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
