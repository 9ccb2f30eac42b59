"""nanotron's layout: slices of parameters and of optimizers become the boxes that they are."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CkptError, FormatError, Unsupported
from ckpt_tool.formats.nanotron.reader import READER
from ckpt_tool.formats.nanotron.slices import parse_part
from ckpt_tool.geometry.box import Box
from tests.formats.conformance import FIXTURES, Case, ReaderTests, truth_of
from tests.formats.zoo import CHECKPOINTS, case, extracted
from tests.reports.made import as_bytes

EXTRA = Path(os.environ.get("CKPT_EXTRA_FIXTURES", "nowhere")) / "deepspeed/nanotron_tp2_dp2_z1"
REAL = extracted(FIXTURES / "nanotron/checkpoints.tar.xz") / "tp2_pp2_dp3"
SLOTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32": "fp32_param"}


def ours(name: str) -> str:
    """Our name of a tensor in the truth of the larger checkpoint."""
    slot, _, parameter = name.partition("/")
    return parameter if slot == "param" else f"optimizer.state.{parameter}.{SLOTS[slot]}"


class TestNanotron(ReaderTests):
    """Fused parameters over two ranks with ZeRO, one rank without, by the run and by the step; two stages' ZeRO."""

    reader = READER
    reader_import = "ckpt_tool.formats.nanotron.reader:READER"
    cases = (
        case("nanotron_tp2_dp2", max_read_requests=30),
        case("nanotron_tp2_dp2", "ckpt/3", max_read_requests=30),
        case("nanotron_plain", max_read_requests=14),
        Case("real", REAL / "ckpt", truth_of(REAL), without_truth=("*.step",), max_read_requests=64),
        *(
            [Case("extra", EXTRA / "ckpt", truth_of(EXTRA, ours), without_truth=("*.step",), max_read_requests=50)]
            if EXTRA.is_dir()
            else []
        ),
    )


def test_other_objects() -> None:
    """Groups, states of generators, and what the run says of itself."""
    with open_checkpoint(CHECKPOINTS / "nanotron_tp2_dp2/ckpt") as checkpoint:
        found = checkpoint.objects()
        assert found["optimizer.param_groups"][0]["betas"] == (0.9, 0.95)
        assert found["random.tp-0-of-1_dp-0-of-1_pp-0-of-1"] == {"torch": 1}
        assert checkpoint.manifest.info["step"] == 3
        assert checkpoint.manifest.notes == ("step 3, which latest.txt names",)


def test_a_reshard_of_it(tmp_path: Path) -> None:
    """Masters and moments too, to three ranks of DCP."""
    source = CHECKPOINTS / "nanotron_tp2_dp2/ckpt"
    reshard(source, tmp_path / "dcp", dp=3, default="replicate", rank_state="drop", durable=False)
    assert as_bytes(tmp_path / "dcp") == as_bytes(source)


def test_ranges_of_later_stages(tmp_path: Path) -> None:
    """The library tells those of the first stage alone: without a range there, nothing is worked out."""
    folder = shutil.copytree(REAL / "ckpt", tmp_path / "ckpt")
    path = folder / "optimizer/optimizer_config.json"
    sound = json.loads(path.read_text())
    ranges = sound["configs"]["param_name_to_dp_rank_offsets"]
    assert not any("final_layer_norm" in name for name in ranges)
    del ranges["model.decoder.0.pp_block.input_layernorm.weight"]
    path.write_text(json.dumps(sound))
    with pytest.raises(FormatError, match="no range of data rank"):
        open_checkpoint(folder)


def test_a_missing_part_is_found(tmp_path: Path) -> None:
    """One rank's file gone: it is named, and its rows are in no chunk."""
    folder = shutil.copytree(CHECKPOINTS / "nanotron_tp2_dp2/ckpt", tmp_path / "ckpt")
    (path,) = folder.glob("3/model/**/qkv_proj/*tp-rank-1-of-2.safetensors")
    path.unlink()
    errors = [finding for finding in verify(folder).findings if finding.severity.name == "ERROR"]
    assert {each.fqn for each in errors} >= {None, "model.decoder.0.pp_block.attn.qkv_proj.weight"}
    assert [each.where.path for each in errors if each.kind == "missing-file" and each.where is not None] == [
        path.relative_to(folder).as_posix()
    ]


def part(pairs: str, shape: str = "(8, 4)", local: tuple[int, ...] = (4, 4)) -> object:
    """What is made of slices."""
    return parse_part({"local_global_slices_pairs": pairs, "unsharded_shape": shape}, local, "f")


def test_slices() -> None:
    """Whole dimensions, numbers as numpy prints them, two pairs."""
    assert part("0,2,None|None,None,None#2,4,None|None,None,None;2,4,1|0,4,1#6,8,1|0,4,1", "(np.int64(8), 4)") == (
        parse_part(
            {
                "local_global_slices_pairs": "0,2,1|0,4,1#2,4,1|0,4,1;2,4,1|0,4,1#6,8,1|0,4,1",
                "unsharded_shape": "(8, 4)",
            },
            (4, 4),
            "f",
        )
    )
    found = parse_part({"local_global_slices_pairs": "None,None,None#3,7,None", "unsharded_shape": "(9,)"}, (4,), "f")
    assert found.joined(Box((1,), (2,))) == [(Box((1,), (2,)), Box((4,), (2,)))]


@pytest.mark.parametrize(
    "pairs",
    [
        "", "0,4,1|0,4,1", "0,4,1#0,4,1", "0,4,1|0,4,1#0,4,2|0,4,1", "0,4,1|0,4,1#6,10,1|0,4,1",
        "0,3,1|0,4,1#0,3,1|0,4,1", "0,4,1|0,4,1#0,3,1|0,4,1", "x,4,1|0,4,1#0,4,1|0,4,1", "0,4|0,4#0,4|0,4",
        "4,0,1|0,4,1#4,0,1|0,4,1", ";" * 5000,
    ],
)  # fmt: skip
def test_slices_that_do_not_fit(pairs: str) -> None:
    """Refused with their text."""
    with pytest.raises(FormatError):
        part(pairs)


def test_versions_without_slices() -> None:
    """Before 1.3 files do not say where their part belongs: nothing is guessed."""
    with pytest.raises(Unsupported, match=r"before 1\.3"):
        parse_part({"version": "1.2"}, (4,), "f")


def test_ranges_that_lie(tmp_path: Path) -> None:
    """A range of another length, none at all, and one beyond its part."""
    folder = shutil.copytree(CHECKPOINTS / "nanotron_tp2_dp2/ckpt", tmp_path / "ckpt")
    path = folder / "3/optimizer/optimizer_config.json"
    sound = json.loads(path.read_text())
    name = "model.decoder.0.pp_block.attn.o_proj.weight"
    for ranges, message in (
        ({"0": ["0", "11"], "1": ["11", "24"]}, "elements for the range"),
        ({"0": ["0", "12"]}, "no range of data rank 1"),
        ({"0": ["0", "12"], "1": ["20", "32"]}, "the range 20 to 32"),
    ):
        sound["configs"]["param_name_to_dp_rank_offsets"][name] = ranges
        path.write_text(json.dumps(sound))
        with pytest.raises(CkptError, match=message):
            open_checkpoint(folder)
