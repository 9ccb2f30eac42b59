"""Objects with tensors inside, whose bytes only the file has that they came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tool
from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._torch_file.objects import check_objects
from ckpt_tool.manifest.model import Blob

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP checkpoint, two of whose objects have tensors inside."""
    state: dict[str, Any] = {
        "w": torch.ones(3, 4),
        "sampler": {"order": (1, torch.arange(4))},
        "loader": {"seen": (2, torch.arange(3))},
        "step": 5,
    }
    target = tmp_path_factory.mktemp("held") / "ckpt"
    dcp.save(state, checkpoint_id=target, no_dist=True)
    return target


@pytest.mark.parametrize("to", ["torch-save", "torch-ranks", "bytecheckpoint", "torch-checkpointing"])
def test_all_are_named_at_once(to: str, held: Path, tmp_path: Path) -> None:
    """Whoever writes none of them says so of all, with the options that leave them out, which then suffice."""
    with pytest.raises(Unsupported, match="can hold 2 objects with tensors inside") as caught:
        ckpt_tool.reshard(held, tmp_path / "out", to=to, durable=False)
    hint = caught.value.hint or ""
    assert {"loader.seen", "sampler.order"} == {word for word in hint.split() if "." in word}, hint
    excluded = [word for word in hint.split() if "." in word]
    ckpt_tool.reshard(held, tmp_path / "out", to=to, exclude=excluded, durable=False)
    with ckpt_tool.open(tmp_path / "out") as opened:
        assert np.array_equal(next(iter(opened.values())).numpy(), np.ones((3, 4), np.float32))


def test_many_are_some_and_a_number() -> None:
    """Of a hundred objects twenty are named."""
    blobs = [Blob(f"o{number}", "value", None) for number in range(100)]
    with pytest.raises(Unsupported, match=r"100 objects whose value was not loaded: o0, .*, o19 and 80 more"):
        check_objects(blobs)
    check_objects(blobs, kept={blob.fqn for blob in blobs})
