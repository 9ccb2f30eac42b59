from __future__ import annotations

import pytest

from tests.consumers.written import Written, write_all


@pytest.fixture(scope="session")
def dcp_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """Every checkpoint as DCP, in another layout than its own."""
    return write_all(tmp_path_factory.mktemp("dcp"), "dcp")
