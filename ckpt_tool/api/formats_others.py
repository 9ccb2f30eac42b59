"""What is known of the formats that are no framework's own training state: arrays, exports, other ecosystems."""

from __future__ import annotations

from ckpt_tool.api.proofs import Proof, read, written

__all__ = ["OTHERS"]


def _zoo(program: str, **checkpoints: str) -> tuple[Proof, ...]:
    """Proofs of reading checkpoints of the archive that they share."""
    return read(program, **{what: f"zoo/checkpoints.tar.xz!{name}/ckpt" for what, name in checkpoints.items()})


OTHERS: dict[str, tuple[str, tuple[Proof, ...]]] = {
    "npz": (
        "NumPy's .npz",
        (
            *_zoo("numpy 2.4.6", savez="npz_plain", savez_compressed="npz_deflated"),
            written("numpy 2.4.6", "numpy.load", "npz/test_writer.py"),
        ),
    ),
}
