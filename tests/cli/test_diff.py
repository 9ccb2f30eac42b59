from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool.cli.app import main
from ckpt_tool.cli.render_diff import report_lines
from ckpt_tool.compare.reasons import Reason
from ckpt_tool.compare.report import DiffReport, Measures, ObjectDiff, Side, TensorDiff
from ckpt_tool.errors import UsageError
from tests.cli.synthetic import text

FIXTURES = Path(__file__).parents[2] / "fixtures"
SINGLE = FIXTURES / "torch/hf_single/ckpt"
SHARDED = FIXTURES / "torch/hf_sharded/ckpt"


def measures(n: int, **fields: Any) -> Measures:
    """``n`` of 8 elements differ."""
    values: dict[str, Any] = {
        "n_compared": 8, "n_differing": n, "n_nan_payload": 0, "n_non_finite": 0, "n_signed_zero": 0, "max_abs": 0.5,
        "max_rel": 0.25, "max_ulp": 1234, "first_index": (1, 0), "first_a": "1.0", "first_b": "1.5",
        "bounds": ((1, 2), (0, 4)),
    }  # fmt: skip
    return Measures(**{**values, **fields})


def tensor(fqn: str, status: str, **fields: Any) -> TensorDiff:
    """A float32 tensor of 2 x 4."""
    values: dict[str, Any] = {
        "fqn_b": None, "dtype_a": "float32", "dtype_b": "float32", "shape_a": (2, 4), "shape_b": (2, 4),
    }  # fmt: skip
    return TensorDiff(fqn, **{**values, "status": status, **fields})


def report(*tensors: TensorDiff, **fields: Any) -> DiffReport:
    """A report of tensors."""
    values: dict[str, Any] = {
        "objects": (), "notes": (),
        "is_quick": False, "compared_nbytes": 1 << 20, "seconds": 0.5,
    }  # fmt: skip
    side = Side("run", "dcp", len(tensors), 4096)
    return DiffReport(tensors=tensors, **{"a": side, "b": side, **values, **fields})


def shown(found: DiffReport, *, limit: int | None = 10, with_same: bool = False) -> list[str]:
    """Lines of a report, without the two that name the sides."""
    return text(report_lines(found, width=100, limit=limit, with_same=with_same)).splitlines()[2:]


@pytest.fixture
def changed(tmp_path: Path) -> tuple[Path, Path]:
    """Two files that differ in one element."""
    saved = {"layers.0.w": np.arange(12, dtype="f4").reshape(3, 4), "b": np.ones(2, "f4")}
    save_file(saved, tmp_path / "a.safetensors")
    other = saved["layers.0.w"].copy()
    other[1, 2] = 7
    save_file({**saved, "layers.0.w": other}, tmp_path / "b.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


def test_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Two layouts of one model end with 0 and one line that says so."""
    assert main(["diff", str(SINGLE), str(SHARDED)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("safetensors, 36 tensors, 36.5 KiB")
    assert printed[-1].startswith("same: 36 same; 73.0 KiB compared in ")
    assert len(printed) == 4


def test_different(changed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A changed element ends with 1 and a table with count, distances, index and both values."""
    assert main(["diff", *map(str, changed)]) == 1
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "differs x1" in printed
    assert "layers.0.w float32 [3, 4] 1 (8.3%) 1 0.143 2,097,152 [1, 2]: 6.0 | 7.0" in printed
    assert printed[-1].startswith("different: 1 same, 1 differs; ")


def test_json(changed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The document is JSON alone; equal tensors are in it with --all."""
    assert main(["diff", *map(str, changed), "--json"]) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["schema"], document["same"], printed.err) == ("ckpt-tool/diff/1", False, "")
    assert [each["fqn"] for each in document["tensors"]] == ["layers.0.w"]
    assert document["tensors"][0]["first"] == {"index": [1, 2], "a": "6.0", "b": "7.0"}
    assert main(["diff", *map(str, changed), "--json", "--all"]) == 1
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 2


def test_quiet(changed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Quiet, a status and a name a line."""
    assert main(["diff", *map(str, changed), "-q"]) == 1
    assert capsys.readouterr() == ("differs layers.0.w\n", "")
    assert main(["diff", *map(str, changed), "-q", "--exclude", "layers.*"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        ("", {}),
        (
            "--include w* --exclude *.b --section model --names exact --strip-prefix m. --strip-prefix n.",
            {
                "include": ["w*"], "exclude": ["*.b"], "section": "model", "names": "exact",
                "strip_prefixes": ["m.", "n."],
            },
        ),
        (
            r"--map-names re:^a=>b --map-names (.*)=>\1 --everything --allow-cast --quick --no-reasons",
            {
                "map_names": [("re:^a", "b"), ("(.*)", r"\1")], "everything": True, "allow_cast": True, "quick": True,
                "reasons": False,
            },
        ),
        ("--memory 64MiB --workers 3", {"memory_budget_bytes": 64 << 20, "n_workers": 3}),
    ],
)  # fmt: skip
def test_arguments(argv: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """``ckpt diff`` hands every option on, and the defaults of those that are not given."""
    asked: dict[str, Any] = {}

    def recorder(a: str, b: str, **given: Any) -> None:
        asked.update(given, a=a, b=b)
        raise UsageError("recorded")

    monkeypatch.setattr("ckpt_tool.api.trust.diff.diff", recorder)
    assert main(["diff", "A", "B", *argv.split()]) == 2
    assert asked == {
        "a": "A", "b": "B", "include": (), "exclude": (), "section": None, "map_names": [], "strip_prefixes": (),
        "names": "auto", "family": "auto", "naming": None, "facts": {}, "true_vocab": None,
        "everything": False, "allow_cast": False, "quick": False, "reasons": True,
        "memory_budget_bytes": 1 << 30, "n_workers": None, "progress": None, **options,
    }  # fmt: skip


def test_map_without_arrow(capsys: pytest.CaptureFixture[str]) -> None:
    """A map of names that is none ends with 2 and shows how to write one."""
    assert main(["diff", "A", "B", "--map-names", "model."]) == 2
    assert "write it as 're:" in capsys.readouterr().err


def test_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """A side that is no checkpoint ends with 3, as with every command."""
    assert main(["diff", str(SINGLE), str(FIXTURES)]) == 3
    assert capsys.readouterr().out == ""


def test_other_shapes_are_one_row() -> None:
    """Shapes that differ are one row with both and the name."""
    embedding = tensor("embed.weight", "shape", shape_a=(1024, 8), shape_b=(512, 8))
    assert shown(report(embedding)) == [
        "",
        "other shape x1",
        "  embed.weight  float32 [1024, 8] | [512, 8]",
        "",
        "different: 0 same, 1 other shape; 1.00 MiB compared in 0.50 s",
    ]


def test_layers_are_folded() -> None:
    """Layers that differ alike are one line with sums and the worst of each measure; reasons are said once."""
    why = Reason("negated", "B is A with every sign flipped")
    found = report(
        tensor("h.0.w", "differs", measures=measures(8, max_abs=0.25), reason=why),
        tensor("h.1.w", "differs", measures=measures(4), reason=why),
        tensor("h.2.w", "differs", measures=measures(1, max_ulp=None), fqn_b="w"),
        tensor("b", "same"),
    )
    assert shown(found) == [
        "",
        "differs x2  negated",
        "  tensor                        differing  max abs  max rel  max ulp  first",
        "  h.0,1.w  x2  float32 [2, 4]  12 (75.0%)      0.5     0.25    1,234  [1, 0]: 1.0 | 1.5",
        "  why: B is A with every sign flipped",
        "",
        "differs x1",
        "  tensor                   differing  max abs  max rel  first",
        "  [h.2.]w  float32 [2, 4]  1 (12.5%)      0.5     0.25  [1, 0]: 1.0 | 1.5",
        "",
        "different: 1 same, 3 differs; 1.00 MiB compared in 0.50 s",
    ]


def test_ten_thousand_tensors_are_a_few_lines() -> None:
    """Ten thousand differences of a few kinds read as a few lines."""
    rows = [tensor(f"h.{n}.{kind}.w", "differs", measures=measures(2)) for n in range(2500) for kind in "qkvo"]
    assert len(shown(report(*rows))) < 10


def test_special_values_and_samples() -> None:
    """NaN, infinities and signed zeros are counted beside the first value; a sampled reason says so."""
    odd = measures(3, n_nan_payload=2, n_non_finite=1, n_signed_zero=1)
    why = Reason("rank-order", "blocks", is_confirmed=False)
    printed = "\n".join(shown(report(tensor("w", "differs", measures=odd, reason=why))))
    assert "1.0 | 1.5; 1 not finite, 2 NaN of other bits, 1 zeros of other sign" in printed
    assert "why: blocks (by a sample of rows)" in printed


def test_limits_lists_and_notes() -> None:
    """Lists are cut with a count; equal tensors are listed on request; what was left out is said."""
    rows = [tensor(f"{name}.w", "only-a", dtype_b=None, shape_b=None) for name in "abc"]
    found = report(
        *rows,
        tensor("x", "same"),
        objects=(ObjectDiff("lr", "differs", "0.1", "0.2"), ObjectDiff("step", "same", "1", "1")),
        a=Side("run", "dcp", 4, 4096, n_ignored_tensors=1, n_ignored_objects=2, n_unselected=4),
        notes=("paired",),
    )
    assert shown(found, limit=1, with_same=True) == [
        "",
        "only in A x3",
        "  a.w  float32 [2, 4]",
        "  … 2 more lines; --limit 0 shows all",
        "",
        "same x1",
        "  x  float32 [2, 4]",
        "",
        "objects x1",
        "  lr  differs  0.1  0.2",
        "",
        "note: paired",
        "note: not compared: 1 tensor of random and extra state and 2 objects of A; --everything does",
        "note: not selected: 4 tensors of A",
        "",
        "different: 1 same, 3 only in A, 1 other object; 1.00 MiB compared in 0.50 s",
    ]


def test_quick_says_what_it_did() -> None:
    """A quick diff does not claim that values are the same."""
    assert shown(report(tensor("w", "same"), is_quick=True, compared_nbytes=0)) == [
        "",
        "same names, shapes and types: 1 same in 0.50 s",
    ]
