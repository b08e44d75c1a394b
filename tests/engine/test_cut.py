"""The one cut, as a table: every way an answer can end, alone and against each other, inside an accepted run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.cut import Cut, cut
from slipstream.types import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS, OTHER_EOS, STOP_ID = 2, 5, 7
RUN = [10, 11, 12, 13]

TABLE: list[tuple[str, list[int], dict[str, Any], Cut]] = [
    ("nothing ends it", RUN, {}, Cut(4)),
    ("an empty run goes on", [], {}, Cut(0)),
    ("one token goes on", [10], {"num_before": 5}, Cut(1)),
    # EOS
    ("EOS first", [EOS, 11, 12], {}, Cut(1, STOP)),
    ("EOS inside the run", [10, EOS, 12], {}, Cut(2, STOP)),
    ("EOS last", [10, 11, EOS], {}, Cut(3, STOP)),
    ("the other EOS id", [10, OTHER_EOS, 12], {}, Cut(2, STOP)),
    ("the earlier of two EOS", [10, OTHER_EOS, EOS], {}, Cut(2, STOP)),
    ("EOS ignored", [10, EOS, 12], {"ignore_eos": True}, Cut(3)),
    ("both EOS ids ignored", [EOS, OTHER_EOS, 12], {"ignore_eos": True}, Cut(3)),
    ("EOS ignored, up to the cap", [10, EOS, 12], {"ignore_eos": True, "max_output": 3}, Cut(3, LENGTH)),
    # stop ids
    ("stop id", [10, STOP_ID, 12], {}, Cut(2, STOP, STOP_ID)),
    ("stop id counts with ignore_eos", [10, STOP_ID, 12], {"ignore_eos": True}, Cut(2, STOP, STOP_ID)),
    ("an EOS id as stop id counts with ignore_eos", [EOS, 11], {"ignore_eos": True, "stop_token_ids": (EOS,)}, Cut(1, STOP, EOS)),
    ("EOS before stop id at one token", [EOS, 11], {"stop_token_ids": (EOS,)}, Cut(1, STOP)),
    ("stop id before EOS in the run", [STOP_ID, EOS], {}, Cut(1, STOP, STOP_ID)),
    ("EOS before stop id in the run", [EOS, STOP_ID], {}, Cut(1, STOP)),
    # stop strings
    ("stop string first", RUN, {"stop_hits": [(0, "x")]}, Cut(1, STOP, "x")),
    ("stop string inside", RUN, {"stop_hits": [(1, "x"), (3, "y")]}, Cut(2, STOP, "x")),
    ("two hits at one token: the first listed", RUN, {"stop_hits": [(1, "x"), (1, "y")]}, Cut(2, STOP, "x")),
    ("stop string before EOS in the run", [10, 11, EOS], {"stop_hits": [(1, "x")]}, Cut(2, STOP, "x")),
    ("EOS before stop string in the run", [10, EOS, 12], {"stop_hits": [(2, "x")]}, Cut(2, STOP)),
    ("EOS before stop string at one token", [10, EOS, 12], {"stop_hits": [(1, "x")]}, Cut(2, STOP)),
    ("stop id before stop string at one token", [10, STOP_ID], {"stop_hits": [(1, "x")]}, Cut(2, STOP, STOP_ID)),
    # grammar
    ("grammar closes inside", RUN, {"grammar_end": 2}, Cut(2, STOP)),
    ("grammar closes with the first token", RUN, {"grammar_end": 1}, Cut(1, STOP)),
    ("grammar before stop id at one token", [10, STOP_ID], {"grammar_end": 2}, Cut(2, STOP)),
    ("grammar before stop string at one token", RUN, {"grammar_end": 2, "stop_hits": [(1, "x")]}, Cut(2, STOP)),
    ("stop string before the grammar in the run", RUN, {"grammar_end": 3, "stop_hits": [(1, "x")]}, Cut(2, STOP, "x")),
    ("grammar before length at one token", RUN, {"grammar_end": 2, "max_output": 2}, Cut(2, STOP)),
    ("a grammar that closes behind the cap", RUN, {"grammar_end": 3, "max_output": 2}, Cut(2, LENGTH)),
    ("a closed grammar does not wait for min_tokens", RUN, {"grammar_end": 2, "min_tokens": 9}, Cut(2, STOP)),
    # length, and a stop against it
    ("the cap cuts the run", RUN, {"max_output": 2}, Cut(2, LENGTH)),
    ("the cap at the end of the run", RUN, {"max_output": 4}, Cut(4, LENGTH)),
    ("the cap behind the run", RUN, {"max_output": 5}, Cut(4)),
    ("the cap counts what came before", RUN, {"num_before": 6, "max_output": 8}, Cut(2, LENGTH)),
    ("already at the cap", RUN, {"num_before": 8, "max_output": 8}, Cut(0, LENGTH)),
    ("an empty run at the cap", [], {"num_before": 8, "max_output": 8}, Cut(0, LENGTH)),
    ("EOS at the cap is a stop", [10, EOS, 12], {"max_output": 2}, Cut(2, STOP)),
    ("stop id at the cap is a stop", [10, STOP_ID, 12], {"max_output": 2}, Cut(2, STOP, STOP_ID)),
    ("stop string at the cap is a stop", RUN, {"max_output": 2, "stop_hits": [(1, "x")]}, Cut(2, STOP, "x")),
    ("EOS behind the cap is not seen", [10, 11, EOS], {"max_output": 2}, Cut(2, LENGTH)),
    ("stop string behind the cap is not seen", RUN, {"max_output": 2, "stop_hits": [(2, "x")]}, Cut(2, LENGTH)),
    ("stop string before the cap", RUN, {"max_output": 3, "stop_hits": [(1, "x")]}, Cut(2, STOP, "x")),
    # min_tokens
    ("EOS within min_tokens", [EOS, 11, 12], {"min_tokens": 1}, Cut(3)),
    ("EOS at token min_tokens + 1", [10, EOS, 12], {"min_tokens": 1}, Cut(2, STOP)),
    ("EOS again behind min_tokens", [EOS, EOS, 12], {"min_tokens": 1}, Cut(2, STOP)),
    ("stop id within min_tokens", [STOP_ID, STOP_ID], {"min_tokens": 1}, Cut(2, STOP, STOP_ID)),
    ("stop string within min_tokens", RUN, {"min_tokens": 2, "stop_hits": [(0, "x"), (2, "y")]}, Cut(3, STOP, "y")),
    ("min_tokens counts what came before", [EOS, 11], {"num_before": 3, "min_tokens": 3}, Cut(1, STOP)),
    ("min_tokens not yet reached", [EOS, 11], {"num_before": 2, "min_tokens": 3}, Cut(2)),
    ("min_tokens up to the cap", [EOS, EOS], {"min_tokens": 2, "max_output": 2}, Cut(2, LENGTH)),
]


def cut_of(run: list[int], **given: Any) -> Cut:
    defaults = {"num_before": 0, "max_output": 100, "eos_token_ids": frozenset({EOS, OTHER_EOS}), "stop_token_ids": (STOP_ID,)}
    return cut(run, **{**defaults, **given})


@pytest.mark.parametrize(("run", "given_", "wanted"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(run: list[int], given_: dict[str, Any], wanted: Cut) -> None:
    assert cut_of(run, **given_) == wanted


@pytest.mark.parametrize("run_len", [1, 2, 4, 8])
@pytest.mark.parametrize("cap", range(3, 14))
def test_stop_against_cap_however_long_the_runs_are(run_len: int, cap: int) -> None:
    # The stop string completes at output token 5; max_tokens goes from before it to behind it.
    stop_at, kept, reason = 5, 0, None
    while reason is None:
        run = list(range(10 + kept, 10 + kept + run_len))
        hits = [(stop_at - 1 - kept, "x")] if kept < stop_at <= kept + run_len else []
        ended = cut_of(run, num_before=kept, max_output=cap, stop_hits=hits)
        kept, reason = kept + ended.num_tokens, ended.finish_reason
    assert (kept, reason) == ((5, STOP) if cap >= 5 else (cap, LENGTH))


tokens = st.lists(st.sampled_from([EOS, OTHER_EOS, STOP_ID, 10, 11, 12]), max_size=20)


@given(
    tokens,
    st.lists(st.integers(1, 8), min_size=20, max_size=20),
    st.integers(1, 22),
    st.integers(0, 8),
    st.booleans(),
    st.dictionaries(st.integers(0, 19), st.sampled_from(["x", "y"]), max_size=3),
    st.one_of(st.none(), st.integers(0, 19)),
)
def test_how_tokens_are_dealt_into_runs_changes_nothing(
    answer: list[int], sizes: list[int], cap: int, min_tokens: int, ignore_eos: bool, hits: dict[int, str], grammar: int | None
) -> None:
    def ended(run_sizes: list[int]) -> tuple[int, FinishReason | None, str | int | None]:
        at = 0
        for size in run_sizes:
            run = answer[at : at + size]
            if not run:
                break
            end = cut_of(
                run,
                num_before=at,
                max_output=cap,
                min_tokens=min_tokens,
                ignore_eos=ignore_eos,
                stop_hits=[(i - at, hits[i]) for i in sorted(hits) if at <= i < at + len(run)],
                grammar_end=grammar + 1 - at if grammar is not None and at <= grammar < at + len(run) else -1,
            )
            assert end.finish_reason is not None or end.num_tokens == len(run)
            at += end.num_tokens
            if end.finish_reason is not None:
                return at, end.finish_reason, end.stop_reason
        return at, None, None

    assert ended(sizes) == ended([1] * 20)
