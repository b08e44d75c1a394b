"""Servers for the tests that leave them as they found them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import LiveServer
from tests.tiny_checkpoints import edit_json, save, tiny

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<|im_start|>"


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with LiveServer(max_num_seqs=8, max_queue=56) as live:
        yield live


@pytest.fixture(scope="session")
def real_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template and two EOS ids."""
    folder = save(tiny("llama", eos_token_id=[2, 40]), tmp_path_factory.mktemp("tiny"))
    edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    return folder


def serve_real(folder: Path, *flags: Any) -> LiveServer:
    """`slipstream serve` with the real engine."""
    fixed = ["--port", "0", "--dtype", "float64", "--served-model-name", "fake", "--num-threads", "1", "--max-num-seqs", "8"]
    return LiveServer(command=("-m", "slipstream.cli.main", "serve", str(folder), "--debug", *fixed, *map(str, flags)))


@pytest.fixture(scope="session")
def real_server(real_folder: Path) -> Iterator[LiveServer]:
    with serve_real(real_folder) as live:
        yield live
        live.until_idle()
        assert live.gauge("kv_cache_usage_perc") == 0
        live.signal(signal.SIGTERM)
        assert live.wait() == 0
