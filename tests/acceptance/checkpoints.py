"""Real checkpoints with the tensors that they must read as: the bundled ones, and a folder of more where one is named.

``CKPT_EXTRA_FIXTURES`` may name a folder of the same form: ``<family>/<name>/ckpt`` beside ``truth.safetensors``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Case", "cases", "truth"]

ROOTS = [Path("fixtures")] + ([Path(os.environ["CKPT_EXTRA_FIXTURES"])] if "CKPT_EXTRA_FIXTURES" in os.environ else [])


@dataclass(frozen=True)
class Case:
    """A checkpoint and its truth."""

    name: str
    url: Path
    truth_file: Path
    names: Callable[[str], str | None]
    """The fqn of a key of the truth file; ``@state/parameter`` where files number state; None for what they lack."""


def same(key: str) -> str | None:
    """Truth keys that are fqns."""
    return key


def by_kind(model: str, optimizer: str) -> Callable[[str], str | None]:
    """Truth keys ``kind/name``: parameters and buffers below ``model``, state as ``optimizer`` formats it."""

    def rename(key: str) -> str | None:
        kind, name = key.split("/", 1)
        return model + name if kind in {"param", "buffer"} else optimizer.format(name=name, kind=kind)

    return rename


def without_optimizer(key: str) -> str | None:
    """Truth of a job whose files hold the model alone."""
    return None if key.startswith("optim") else key


def of_sections(key: str) -> str | None:
    """ByteCheckpoint's truth: ``model/<name>`` and ``optim/<parameter>/<state>``."""
    section, name = key.split("/", 1)
    return f"model.{name}" if section == "model" else f"optimizer.state.{name.replace('/', '.')}"


def of_ranks(key: str) -> str | None:
    """Truth of torch-checkpointing, without ``<name>@<rank>``: a rank's own values are dropped with the rank."""
    return None if "@" in key else key


def peft(key: str) -> str | None:
    """PEFT takes the adapter's name out of the keys that it saves (peft 0.21, ``get_peft_model_state_dict``)."""
    return key.replace("modules_to_save.default.", "").replace(".default.", ".")


# Families and names are those of the folders. What is not here has truth keys that are fqns, and its files in `ckpt`.
SPECIAL: Mapping[str, tuple[str, Callable[[str], str | None]]] = {
    "torch/fsdp1_per_rank_pt_2r": ("ckpt", without_optimizer),
    "deepspeed/accelerate_fsdp2": ("ckpt", by_kind("model.", "optimizer.state.{name}.{kind}")),
    "deepspeed/accelerate_ranks": ("ckpt", by_kind("", "optim.state.{name}.{kind}")),
    "deepspeed/torchtitan_dp2tp2": ("ckpt/checkpoint/step-3", by_kind("", "optimizer.state.{name}.{kind}")),
    "deepspeed/verl_fsdp": ("ckpt", by_kind("", "@{kind}/{name}")),
    # Lightning numbers optimizer state, and two readings of the numbers fit (a frozen tensor has an other's shape)
    "deepspeed/lightning": (
        "ckpt/step3.ckpt",
        lambda key: key.replace("param/", "state_dict.") if key.startswith("param/") else None,
    ),
    # torch's own consolidation writes zeros for 0-dim tensors (torch 2.13), so these files never held the true value
    "torch/hf_dcp_consolidated": ("ckpt", lambda key: None if key == "buf_scalar" else key),
    "deepspeed/peft_lora": ("ckpt", peft),
    "deepspeed/hf_st_tied": ("ckpt", lambda key: None if key == "lm_head.weight" else key),
}
FAMILIES = {"bytecheckpoint": of_sections, "torch_checkpointing": of_ranks}
NOT_HERE = re.compile(r"deepspeed/(ds_|nanotron|orbax|torchsnapshot)|megatron/")


def cases() -> Iterator[Case]:
    """All cases, the first of each name."""
    seen: set[str] = set()
    for root in ROOTS:
        for folder in sorted(root.glob("*/*")):
            name = f"{folder.parent.name}/{folder.name}"
            if name in seen or NOT_HERE.match(name) or not (folder / "truth.safetensors").exists():
                continue
            seen.add(name)
            place, names = SPECIAL.get(name, ("ckpt", FAMILIES.get(folder.parent.name, same)))
            yield Case(name, folder / place, folder / "truth.safetensors", names)
            if name == "torch/dcp_old_t2.1.2":
                yield Case(f"{name}/ranks", folder, folder / "pt_truth.safetensors", same)


def truth(case: Case) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Safetensors dtype, shape and bytes of each fqn, read without the package."""
    data = case.truth_file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for key, entry in json.loads(data[8:start]).items():
        fqn = None if key == "__metadata__" else case.names(key)
        if fqn is not None:
            first, last = entry["data_offsets"]
            found[fqn] = (entry["dtype"], tuple(entry["shape"]), data[start + first : start + last])
    return found
