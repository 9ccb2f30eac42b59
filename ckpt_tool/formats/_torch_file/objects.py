"""Objects that are carried over into files written anew: whether they can be, all of them looked at before any is."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._pickle.walk import storages
from ckpt_tool.manifest.model import Blob
from ckpt_tool.sizes import counted, shell_word, some_of

__all__ = ["check_objects"]

_SHOWN = 20


def check_objects(blobs: Sequence[Blob], kept: Collection[str] = ()) -> None:
    """Nothing, when every object can be pickled into a file of the target.

    Args:
        blobs: the objects; of some name several, as ranks have them.
        kept: names of those whose original bytes are carried over.

    Raises:
        Unsupported: some are not loaded, or have tensors inside, whose bytes are in the file that they came from; all
            are named.
    """
    pickled = [blob for blob in blobs if blob.fqn not in kept]
    absent = list(dict.fromkeys(blob.fqn for blob in pickled if not blob.is_loaded))
    if absent:
        raise _refused(absent, "whose value was not loaded")
    held = list(dict.fromkeys(blob.fqn for blob in pickled if storages(blob.value)))
    if held:
        raise _refused(held, "with tensors inside, whose bytes are not at hand")


def _refused(fqns: Sequence[str], why: str) -> Unsupported:
    return Unsupported(
        f"no other file can hold {counted(len(fqns), 'object')} {why}: {some_of(fqns, _SHOWN)}",
        hint=f"leave out what is not needed: {' '.join(f'--exclude {shell_word(fqn)}' for fqn in fqns[:_SHOWN])}",
    )
