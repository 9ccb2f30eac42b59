"""The package's own names: few, lazy, and silent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt_tool

SOURCE = Path("fixtures/torch/dcp_fsdp2_4r_fp32/ckpt")


def test_every_exported_name_resolves() -> None:
    """Each name of the package can be got, and is listed by dir()."""
    for name in ckpt_tool._EXPORTS:
        assert callable(getattr(ckpt_tool, name))
        assert name in dir(ckpt_tool)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(ckpt_tool, "nothing")  # noqa: B009 - the lookup is what is tested


def test_unknown_keywords_are_refused(tmp_path: Path) -> None:
    """Those that conversions share are checked as those of a signature are."""
    for plan in (ckpt_tool.plan_export, ckpt_tool.plan_reshard):
        with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'overwritten'"):
            plan(SOURCE, tmp_path / "out", overwritten=True)  # type: ignore[call-arg]


def test_open_is_a_lazy_mapping() -> None:
    """Names, shapes, numpy slicing with the right bytes, objects, torch tensors on request."""
    with ckpt_tool.open(SOURCE) as checkpoint:
        assert "model.lm_head.weight" in checkpoint
        view = checkpoint["model.lm_head.weight"]
        whole = view.numpy()
        assert view.shape == whole.shape == (97, 24)
        assert np.array_equal(view[3:5, :2], whole[3:5, :2])
        assert np.array_equal(view[-1], whole[-1])
        assert view[0, 0] == whole[0, 0]
        assert np.array_equal(np.asarray(view), whole)
        assert view.torch().tolist() == whole.tolist()
        assert checkpoint.objects()["optim.param_groups.0.lr"] == pytest.approx(0.001, rel=10)
        with pytest.raises(KeyError):
            checkpoint["no.such.tensor"]


def test_library_is_silent(tmp_path: Path) -> None:
    """Importing and converting prints nothing, and neither needs torch."""
    code = (
        "import sys, ckpt_tool\n"
        f"ckpt_tool.reshard({str(SOURCE)!r}, {str(tmp_path / 'out')!r}, tp=2, default='replicate', durable=False)\n"
        f"ckpt_tool.verify({str(tmp_path / 'out')!r}, level='full')\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
