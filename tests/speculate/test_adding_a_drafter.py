"""docs/adding-a-drafter.md is right: its example, put where it says, is found, built and accepted; its table is complete."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import slipstream.speculate
from slipstream.config import EngineConfig
from slipstream.engine.compat import check_startup
from slipstream.errors import ConfigError
from slipstream.speculate.base import Drafter
from slipstream.speculate.registry import drafter_names
from slipstream.testing.hash_lm import HashLM
from tests.cases.stage import Parrot, greedy
from tests.engine.harness import Job, assert_equal, reference, run

GUIDE = (Path(__file__).parents[2] / "docs" / "adding-a-drafter.md").read_text("utf-8")


@pytest.fixture
def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as a file of the folder."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "again.py").write_text(code)
    monkeypatch.setattr(slipstream.speculate, "__path__", [*slipstream.speculate.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "slipstream.speculate.again", raising=False)


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize("lag", [0, 1])
def test_the_example_runs_and_is_accepted(lag: int) -> None:
    assert "again" in drafter_names()
    check_startup(EngineConfig(model="m", speculate=("again:width=2",)))
    model = Parrot(HashLM(vocab_size=64, context_len=128), [n // 9 for n in range(128)])
    jobs = [Job((0, 0, 0), greedy(40)), Job((0,) * 12, greedy(30, temperature=1.0), seed=2)]
    got = run(model, jobs, lag=lag, eos=(), speculate=("again:width=2",))
    assert_equal(got, reference(model, jobs, eos=()), lag)
    assert sum(answer.num_accepted for answer in got) > 30
    with pytest.raises(ConfigError, match="must have options of width, but got 'depth'"):
        run(model, jobs, speculate=("again:depth=2",))


def test_the_table_has_every_attribute_of_the_protocol() -> None:
    told = {name for row in re.findall(r"^\| (`.*?) \|", GUIDE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert told == set(Drafter.__annotations__)


def test_what_the_guide_names_is_there() -> None:
    root = Path(__file__).parents[2]
    for name in re.findall(r"`((?:tests|speculate)/[\w/]+\.py)`", GUIDE):
        assert (root / name).is_file() or (root / "src" / "slipstream" / name).is_file(), name
    from tests.engine.test_cache_and_pressure import NAMES
    from tests.engine.test_equality import DRAFTERS
    from tests.fuzz.schedule import drafters

    assert {"ngram", "draft_model"} <= set(NAMES) & set(DRAFTERS) and "ngram 3" in drafters("hash 1")
