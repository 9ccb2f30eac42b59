"""The page about jobs: its code runs as it stands, and does what the page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.job import page_jobs, workers
from tests.storage.s3_server import s3_environment, s3_server

pytestmark = pytest.mark.dist


def test_code_of_the_page(tmp_path: Path) -> None:
    """Every block of code, on two ranks."""
    with s3_server() as (endpoint, _):
        (tmp_path / page_jobs.ENVIRONMENT).write_text(json.dumps(s3_environment(endpoint)), encoding="utf-8")
        workers.start(page_jobs.run_page, 2, tmp_path)
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        blocks = told.pop("blocks")
        assert blocks == sorted(page_jobs.blocks()) == sorted(told)
        assert told == dict.fromkeys(blocks, True)
