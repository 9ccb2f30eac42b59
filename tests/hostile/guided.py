"""python -m tests.hostile.guided MINUTES [TARGET...]: bytes that a coverage-guided search finds, in all so long.

Atheris (``pip install atheris``) runs what it finds through the readers and keeps what reaches new branches, so it gets
behind checks that blind changes seldom pass: a length that must fit, an opcode after another. Each target is one file
of a checkpoint, in a process of its own; a run that finds something leaves the bytes beside and ends with 1. Without
Atheris nothing is searched, and that is said.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import ModuleType

FIXTURES = Path(__file__).parents[2] / "fixtures"
# The file that is searched in, and the folder whose other files lie beside it; its own bytes are where a search begins.
TARGETS = {
    "zip": ("torch/pt_files/ckpt", "train_namespace.pt"),
    "legacy": ("torch/pt_files/ckpt", "train_namespace_legacy.pt"),
    "dcp": ("torch/dcp_zstd/ckpt", ".metadata"),
    "dcp-item": ("torch/dcp_no_flatten/ckpt", "__0_0.distcp"),
    "safetensors": ("torch/hf_single/ckpt", "model.safetensors"),
    "index": ("torch/hf_sharded/ckpt", "model.safetensors.index.json"),
    "rank-files": ("ckpt/rank_files_v1/ckpt", "ckpt_layout.json"),
    "deepspeed": ("deepspeed/ds_z1_fp32/ckpt", "global_step3/mp_rank_00_model_states.pt"),
    "bytecheckpoint": ("bytecheckpoint/ddp_2r/ckpt/global_step_2", "model/.metadata"),
    "torch-checkpointing": ("torch_checkpointing/plain_odd/ckpt", "metadata.pkl"),
}
_ALONE = frozenset({"zip", "legacy"})
"""Targets whose folder holds other checkpoints."""
MAX_S, MAX_MIB, MAX_BYTES = 30, 3000, 1 << 16
"""Of the clock's time, which runs on while others have the machine."""


def files_of(target: str) -> tuple[dict[str, bytes], str]:
    """The files of a checkpoint, and the name of that which is searched in."""
    name, searched = TARGETS[target]
    folder = FIXTURES / name
    paths = [folder / searched] if target in _ALONE else sorted(folder.rglob("*"))
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}
    return files, searched


def search(target: str, seconds: int, atheris: ModuleType) -> None:
    """Search in this process, which ends with it."""
    with atheris.instrument_imports(include=["ckpt_tool"]):
        from ckpt_tool.errors import CkptError
        from tests.hostile.fuzz import Watch
        from tests.hostile.reading import looked_at

    files, searched = files_of(target)
    watch = Watch()

    def one(data: bytes) -> None:
        watch.is_on = True
        with suppress(CkptError):
            looked_at({**files, searched: data})
        watch.is_on = False
        if watch.seen:
            raise AssertionError(watch.seen[0])

    corpus = Path(tempfile.mkdtemp(prefix="ckpt-guided-"))
    (corpus / "first").write_bytes(files[searched])
    looked_at(files)
    one(b"")  # all readers are asked: what they import takes time and is no file's doing
    limits = [f"-timeout={MAX_S}", f"-rss_limit_mb={MAX_MIB}", f"-max_len={max(MAX_BYTES, 2 * len(files[searched]))}"]
    argv = [sys.argv[0], f"-max_total_time={seconds}", f"-artifact_prefix=guided-{target}-", *limits, str(corpus)]
    atheris.Setup(argv, one)
    atheris.Fuzz()


def main(minutes: float, targets: list[str]) -> int:
    """One process for each target, one after another; 1 when one of them found something."""
    if importlib.util.find_spec("atheris") is None:
        print("not searched: atheris is not installed (pip install atheris)")
        return 0
    failed, seconds = 0, max(int(60 * minutes / len(targets)), 1)
    for target in targets:
        argv = [sys.executable, "-m", "tests.hostile.guided", "--one", str(seconds), target]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        said = done.stderr.splitlines()
        told = [line for line in said if line.startswith("Done")]
        print(f"{target}: {' '.join(told) if done.returncode == 0 else done.stderr[-4000:]}", flush=True)
        failed += done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        import atheris

        search(sys.argv[3], int(sys.argv[2]), atheris)
    else:
        sys.exit(main(float(sys.argv[1]), sys.argv[2:] or list(TARGETS)))
