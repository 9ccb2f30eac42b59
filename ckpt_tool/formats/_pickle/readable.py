"""The text of a few well-known values of the standard library, which stay stubs in the object itself.

Their own constructors are called only with integers that were checked: some of them compute without end on text
(``Fraction("1e999999999")``).
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable

from ckpt_tool.formats._pickle.nodes import Stub

__all__ = ["readable"]

_MAX_NUMBER_TEXT = 100


def readable(stub: Stub) -> str | None:
    """The usual text of a date, time, duration, UUID, decimal or fraction; None for all else.

    >>> from ckpt_tool.formats._pickle.nodes import Global
    >>> readable(Global("datetime", "timedelta")(1, 3600, 0))
    '1 day, 1:00:00'
    """
    reader = _READERS.get(stub.cls.qualified)
    try:
        return None if reader is None else reader(stub)
    except (ArithmeticError, IndexError, TypeError, ValueError):
        return None


def _packed(stub: Stub, nbytes: int) -> bytes:
    """The bytes that datetime's classes pickle as (CPython ``Lib/_pydatetime.py``, ``_getstate``)."""
    packed = stub.args[0]
    if not isinstance(packed, bytes) or len(packed) != nbytes:
        raise ValueError("not a packed date or time")
    return packed


def _datetime(stub: Stub) -> str:
    packed = _packed(stub, 10)
    year, month = packed[0] * 256 + packed[1], packed[2] & 0x7F
    day, hour, minute, second = packed[3:7]
    microsecond = int.from_bytes(packed[7:10], "big")
    return dt.datetime(year, month, day, hour, minute, second, microsecond).isoformat(" ")  # noqa: DTZ001 as stored


def _date(stub: Stub) -> str:
    packed = _packed(stub, 4)
    return dt.date(packed[0] * 256 + packed[1], packed[2], packed[3]).isoformat()


def _time(stub: Stub) -> str:
    packed = _packed(stub, 6)
    return dt.time(packed[0] & 0x7F, packed[1], packed[2], int.from_bytes(packed[3:6], "big")).isoformat()


def _timedelta(stub: Stub) -> str:
    days, seconds, microseconds = stub.args
    if not all(type(part) is int for part in stub.args):
        raise ValueError("not a duration")
    return str(dt.timedelta(days, seconds, microseconds))


def _uuid(stub: Stub) -> str:
    number = stub.attribute("int")
    if type(number) is not int:
        raise ValueError("not a UUID")
    return str(uuid.UUID(int=number))


def _number(stub: Stub) -> str:
    text = stub.args[0]
    if len(stub.args) == 2 and all(type(part) is int and part.bit_length() <= 256 for part in stub.args):
        return f"{stub.args[0]}/{stub.args[1]}"
    if not isinstance(text, str) or len(text) > _MAX_NUMBER_TEXT:
        raise ValueError("not a number of common length")
    return text


_READERS: dict[str, Callable[[Stub], str]] = {
    "datetime.datetime": _datetime,
    "datetime.date": _date,
    "datetime.time": _time,
    "datetime.timedelta": _timedelta,
    "uuid.UUID": _uuid,
    "decimal.Decimal": _number,
    "fractions.Fraction": _number,
}
