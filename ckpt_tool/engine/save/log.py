"""A log of operations: who did what to how many bytes, when and for how long, as columns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import astuple, fields
from typing import Any

from ckpt_tool.records import dataclass

__all__ = ["Operation", "OperationLog"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one rank."""

    rank: int
    step: int
    """The number that the caller gave the save, or how many there were before it."""
    operation: str
    """``walk objects wait allocate stage``; in the writer process ``lay out``, ``write``, ``plan``, ``commit``."""
    nbytes: int
    start: float
    """Seconds since 1970."""
    seconds: float


class OperationLog:
    """Operations in the order in which they were told of."""

    def __init__(self, operations: Iterable[Operation] = ()) -> None:
        self._rows = list(operations)

    def __len__(self) -> int:
        """Number of operations."""
        return len(self._rows)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """As records."""
        return tuple(self._rows)

    def extend(self, operations: Iterable[Operation]) -> None:
        """Append."""
        self._rows += operations

    def columns(self) -> dict[str, list[Any]]:
        """One list for each field of `Operation`."""
        rows = [astuple(row) for row in self._rows]
        return {field.name: [row[i] for row in rows] for i, field in enumerate(fields(Operation))}

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table``: rank int32, step int64, operation utf8, nbytes int64, start and seconds float64."""
        import pyarrow as pa

        schema = pa.schema(
            [
                ("rank", pa.int32()), ("step", pa.int64()), ("operation", pa.utf8()), ("nbytes", pa.int64()),
                ("start", pa.float64()), ("seconds", pa.float64()),
            ]
        )  # fmt: skip
        return pa.table(self.columns(), schema=schema)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the columns as an Arrow file, or as JSON where the name ends in ``.json``."""
        if os.fspath(path).endswith(".json"):
            with open(path, "w", encoding="utf-8") as file:
                json.dump(self.columns(), file)
            return
        import pyarrow as pa

        table = self.to_arrow()
        with pa.OSFile(os.fspath(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as target:
            target.write_table(table)
