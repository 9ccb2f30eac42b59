"""What a call asks of remote storage: counted in a block around it.

>>> from ckpt_tool.api.traffic import counting
>>> with counting() as traffic:
...     pass  # any call of the api
>>> traffic.to_json()["n_requests"]
0
"""

from __future__ import annotations

from ckpt_tool.storage.traffic import Traffic, counting, current_traffic

__all__ = ["Traffic", "counting", "current_traffic"]
