"""Range reads by obstore, where it is installed: many are under way at once without a thread of Python each.

It tries once. Whatever goes wrong, the own client asks again and tells what is wrong; keys that obstore would spell
otherwise are left to it from the start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from ckpt_tool.storage.remote.http_client import silence_s
from ckpt_tool.storage.s3.credentials import S3Settings, SettingsSource

__all__ = ["FastReads", "fast_reads", "takes_key"]

_PLAIN = re.compile(r"[A-Za-z0-9._=@-]+(?:/[A-Za-z0-9._=@-]+)*")
_WHOLE_REQUEST_S = 600


def takes_key(key: str) -> bool:
    """Whether obstore leaves a key as it is.

    >>> takes_key("run/step_5/.metadata"), takes_key("run//x"), takes_key("a b"), takes_key("a/../b")
    (True, False, False, False)
    """
    return _PLAIN.fullmatch(key) is not None and not {".", ".."} & set(key.split("/"))


def fast_reads(bucket: str, settings: S3Settings, source: SettingsSource) -> FastReads | None:
    """Reads of a bucket's objects, None where obstore is not installed or does not take these settings."""
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        return None
    options: dict[str, Any] = {
        "allow_http": True,
        "connect_timeout": f"{silence_s():.3f}s",
        "read_timeout": f"{silence_s():.3f}s",
        "timeout": f"{_WHOLE_REQUEST_S}s",
    }

    def credentials() -> dict[str, Any]:
        found, ends = source.granted()
        moment = None if ends is None else datetime.fromtimestamp(ends, timezone.utc)
        return {
            "access_key_id": found.access_key, "secret_access_key": found.secret_key, "token": found.token,
            "expires_at": moment,
        }  # fmt: skip

    try:
        if settings.ca_file is not None:
            with open(settings.ca_file, "rb") as file:
                options["root_certificate"] = file.read()
        store = S3Store(
            bucket,
            endpoint="".join(settings.address(bucket)) if settings.is_virtual else settings.endpoint,
            virtual_hosted_style_request=settings.is_virtual,
            region=settings.region,
            client_options=options,
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=_WHOLE_REQUEST_S)},
            **({"credential_provider": credentials} if settings.is_signed else {"skip_signature": True}),
        )
    except Exception:  # noqa: BLE001 - what it does not take, certificates or a proxy, the own client tells of
        return None
    return FastReads(obstore, store)


class FastReads:
    """One attempt each; None tells that it failed, in whatever way."""

    def __init__(self, package: Any, store: Any) -> None:
        self._package = package
        self._store = store

    def read(self, key: str, offset: int, length: int) -> Any:
        """A buffer with the range, None where it did not come whole."""
        try:
            data = self._package.get_range(self._store, key, start=offset, length=length)
        except Exception:  # noqa: BLE001 - asked again by the own client, which tells failures apart
            return None
        return data if len(data) == length else None

    def read_many(self, key: str, starts: Sequence[int], lengths: Sequence[int]) -> list[Any] | None:
        """A buffer for each range of one object, None where one of them did not come whole."""
        try:
            found = self._package.get_ranges(self._store, key, starts=starts, lengths=lengths, coalesce=0)
        except Exception:  # noqa: BLE001 - as above
            return None
        is_whole = all(len(data) == length for data, length in zip(found, lengths, strict=True))
        return list(found) if is_whole else None
