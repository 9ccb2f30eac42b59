"""Lightning loads weights that were written for it.

``CKPT_PEER_LIGHTNING`` names the python of an environment with torch and pytorch-lightning (2.6.6
when this was written); run with ``-m peer``.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from ckpt_tool.api.convert.export import export

pytestmark = pytest.mark.peer

LOAD = """
import json, sys, torch, pytorch_lightning as pl
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    def test_step(self, batch, index):
        self.seen = self.net(batch[0])
model = Net.load_from_checkpoint(sys.argv[1])
trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 3)), batch_size=2)
again = Net()
trainer.test(again, data, ckpt_path=sys.argv[1], verbose=False)
print(json.dumps([{k: v.tolist() for k, v in one.state_dict().items()} for one in (model, again)]))
"""


def test_lightning_loads_it(tmp_path: Path) -> None:
    """``load_from_checkpoint``, and a test run by its path: every parameter and buffer."""
    state = {
        "net.0.weight": torch.randn(4, 3), "net.0.bias": torch.randn(4), "net.1.weight": torch.randn(4),
        "net.1.bias": torch.randn(4), "net.1.running_mean": torch.randn(4), "net.1.running_var": torch.rand(4),
        "net.1.num_batches_tracked": torch.tensor(5),
    }  # fmt: skip
    torch.save(state, tmp_path / "weights.pt")
    export(tmp_path / "weights.pt", tmp_path / "m.ckpt", to="lightning", names="source", durable=False)
    command = [os.environ["CKPT_PEER_LIGHTNING"], "-W", "ignore", "-c", LOAD, str(tmp_path / "m.ckpt")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    loaded, tested = json.loads(run.stdout.splitlines()[-1])
    assert loaded == tested == {name: value.tolist() for name, value in state.items()}
