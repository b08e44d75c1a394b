"""The benchmark of the prefix cache, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from bench.prefix import main
from slipstream.testing.tiny import tiny_checkpoint


def test_it_measures_both_sides_and_finds_the_prefix(tmp_path: Path) -> None:
    path = tmp_path / "prefix.json"
    sizes = "--num-requests 4 --prefix-len 200 --tail-len 5 --num-unshared 3 --input-len 20 --output-len 3"
    model = ["--model", str(tiny_checkpoint("llama")), "--dtype", "float64"]
    main([*model, *sizes.split(), "--cost-rounds", "2", "--json", str(path)])
    result = json.loads(path.read_text())
    on, off = (result["pays"]["medians"][name] for name in ("on", "off"))
    assert on["num_cached_tokens"] >= 192 and off["num_cached_tokens"] == 0
    assert result["costs"]["medians"]["on"]["num_cached_tokens"] == 0
    assert result["pays"]["answers_that_differ"] == result["costs"]["answers_that_differ"] == 0
    assert set(result["pays"]["off/on"]) == {"wall_s", "ttft_s", "cpu_s"}
