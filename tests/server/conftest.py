"""One server for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.live import LiveServer


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with LiveServer(max_num_seqs=8, max_queue=56) as live:
        yield live
