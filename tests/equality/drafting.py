"""The drafters of the table, what each must show, and a chooser under which they sleep, wake and change in mid-request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.config import EngineConfig
from slipstream.models.base import CausalLM
from slipstream.speculate.choice import OFF, Choice, RowDrafting, Shape, Widest
from slipstream.speculate.draft_model import DraftModel
from slipstream.speculate.ngram import NGram
from slipstream.speculate.off import Off
from slipstream.speculate.registry import Target
from slipstream.testing import drafters as d
from slipstream.testing.drafters import DrafterFactory
from slipstream.testing.hash_lm import HashLM
from tests.equality.jobs import HASH_LM
from tests.speculate.eagle_heads import eagle

NEVER_RIGHT = {  # but by chance; on a real model the head knows nothing
    "hash": ("off", "rand_chain", "rand_tree"),
    "llama": ("off", "rand_chain", "rand_tree", "eagle_chain", "eagle_tree", "eagle"),
}
ALWAYS_RIGHT = {"hash": ("off", "self_chain", "eagle_chain"), "llama": ("off", "self_chain", "draft_model")}
# As the target, but it likes even ids: right mostly, not always.
NEARLY = HashLM(64, HASH_LM.context_len, eos_token_ids=tuple(range(0, 64, 2)), eos_bias=1.0)


def factories(drafter: str, k: int) -> dict[str, DrafterFactory]:
    """The engine's drafters, by name; paths have k tokens at most."""
    if "+" in drafter:
        first, second = drafter.split("+")
        return {first: _factory(first, k), second: _factory("eagle_tree" if second == "eagle" else second, k)}
    return {drafter: _factory(drafter, k)}


def _factory(name: str, k: int) -> DrafterFactory:
    match name:
        case "off":
            return lambda target: Off()
        case "ngram":
            return lambda target: NGram(k, 1, 3)
        case "draft_model":
            return lambda target: DraftModel(_draft_of(target), target, k)
        case "eagle_chain":
            return eagle(1, k, kind=1)
        case "eagle_tree":
            return eagle(2, k, 2 * k)
        case "self_chain":
            return d.self_chain(k)
        case "self_tree":
            return d.self_tree(k, 3)
        case "rand_chain":
            return d.rand_chain(k, beyond=9)
        case "rand_tree":
            return d.rand_tree(2 * k, beyond=9)
        case "partial_chain":
            return d.partial(k)
        case "partial_tree":
            return d.partial(k, siblings=2)
        case _:
            raise ValueError(f"a drafter must be one of the table's, but got {name!r}")


def _draft_of(target: Target) -> CausalLM:
    return NEARLY if isinstance(target.model, HashLM) else target.model


def can_be_right(model: str, drafter: str) -> bool:
    """Whether some of what it drafts must have been accepted."""
    return drafter not in NEVER_RIGHT[model]


def must_be_wrong(model: str, drafter: str) -> bool:
    """Whether some of what it drafts must have been refused."""
    return drafter not in ALWAYS_RIGHT[model]


class Turns(Widest):
    """A light drafter and one with state. Each row goes through these, a step each, from a place of its own on:

    proposes   heavy  heavy  light  light  off          the heavy one cannot propose in the step in which it wakes
    watches    heavy  heavy  heavy  light  off          it sleeps in the last two; a draft model in the last three
    """

    CYCLE = ("heavy", "heavy", "both", "light", "none")

    def __init__(self, shapes: Mapping[str, Shape], config: EngineConfig) -> None:
        super().__init__(shapes, OFF)
        self._shapes = shapes
        self._light, self._heavy = sorted((name for name in shapes if name != OFF), key=lambda name: shapes[name].has_state)
        self._seen: dict[int, tuple[RowDrafting, int]] = {}  # with the row, so that no other one gets its id

    def first_observer(self, num_rows: int) -> str:
        """Now this one, now that one; the same between two steps."""
        return (self._heavy, self._light, OFF)[num_rows % 3]

    def choose(self, rows: Sequence[RowDrafting], most: Sequence[int], num_other_tokens: int) -> list[Choice]:
        """The next place in the cycle of each row."""
        return [self._choice_of(row, limit) for row, limit in zip(rows, most, strict=True)]

    def _choice_of(self, row: RowDrafting, limit: int) -> Choice:
        _, turn = self._seen.get(id(row), (row, len(self._seen)))
        self._seen[id(row)] = row, turn + 1
        what = self.CYCLE[turn % len(self.CYCLE)]
        drafter = {"heavy": self._heavy if row.observer == self._heavy else OFF, "none": OFF}.get(what, self._light)
        observer = {"light": self._light, "none": OFF}.get(what, self._heavy)
        return Choice(drafter, min(limit, self._shapes[drafter].num_nodes), observer)
