"""Answers put together from engine outputs: one cut, and deltas that add up to the final text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import EngineError, InvariantBroken, NonFiniteLogits
from slipstream.frontend.assemble import Assembler, Delta
from slipstream.frontend.model_info import ModelInfo
from slipstream.frontend.prepare import Frontend, Prepared
from slipstream.types import CompletionOutput, EngineOutput, FinishReason, SamplingParams
from tests.frontend.engine_double import settled
from tests.text.test_stops import naive_held, naive_match
from tests.text.vocabularies import END, EOS, FakeTokenizer, byte_level

PIECES = [b"ab", b"ba", b"abc", b"\xc3\xa9a", b"b\xc3", b"\xa9b", b"nine", b" ten", b" ele"]
TOKENIZER = FakeTokenizer(PIECES)
INFO = ModelInfo("tiny", TOKENIZER, None, TOKENIZER.vocab_size, 4096, (EOS, END))
EXAMPLE = SamplingParams(max_tokens=100, logprobs=0)


def answer(
    tokens: list[int], params: SamplingParams = EXAMPLE, run_lens: tuple[int, ...] | list[int] = (), info: ModelInfo = INFO
) -> tuple[CompletionOutput, list[Delta]]:
    """The answer, and its deltas, to a model that goes on with `tokens`."""
    prepared = Frontend(info).prepare("r", "x", params)
    assembler = Assembler(prepared, info)
    deltas = [
        assembler.push(output) for output in settled(prepared.requests[0], tokens, run_lens, info.tokenizer, info.eos_token_ids)
    ]
    return assembler.outputs[0], deltas


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def sent(deltas: list[Delta]) -> list[str]:
    return [delta.text for delta in deltas]


def test_deltas_and_answer() -> None:
    output, deltas = answer([*ids("ab!"), EOS])
    assert sent(deltas) == ["ab", "!", ""]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]
    assert output.text == "ab!"
    assert output.token_ids == [*ids("ab!"), EOS]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.logprobs is not None
    assert [one.token_id for one in output.logprobs] == output.token_ids


def test_logprobs_only_where_asked_for() -> None:
    output, deltas = answer([*ids("ab!"), EOS], replace(EXAMPLE, logprobs=None))
    assert output.logprobs is None
    assert {delta.logprobs for delta in deltas} == {None}


ONE, TEN = "one ", "nine ten eleven"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("run_lens", [(), (3,), (2, 5), (40,)])
def test_a_stop_string_over_several_tokens_is_never_sent(run_lens: tuple[int, ...], include: bool) -> None:
    params = replace(EXAMPLE, stop=(TEN,), include_stop_str_in_output=include)
    output, deltas = answer(ids(f"{ONE}{TEN} twelve"), params, run_lens)
    assert output.text == "".join(sent(deltas)) == (ONE + TEN if include else ONE)
    assert (output.finish_reason, output.stop_reason) == ("stop", TEN)
    assert output.token_ids == ids(f"{ONE}{TEN}")
    for number in range(len(deltas)):
        so_far = "".join(sent(deltas)[: number + 1])
        assert include or ONE.startswith(so_far)


def test_a_half_match_is_flushed_when_it_fails_and_when_the_answer_ends() -> None:
    params = replace(EXAMPLE, stop=("nine ten apple",))
    _, deltas = answer(ids("nine ten eleven"), params)
    assert sent(deltas) == ["", "", "nine ten ele", "v", "e", ""]  # the last n may begin it anew
    for ending, reason in (([EOS], "stop"), ([], "length")):
        tokens = ids("nine ten")
        output, deltas = answer([*tokens, *ending], replace(params, max_tokens=len(tokens) + len(ending)))
        assert sent(deltas)[:-1] == [""] * (len(deltas) - 1)
        assert (output.text, output.finish_reason) == ("nine ten", reason)


def test_an_early_stop_in_a_long_run() -> None:
    line = "alpha beta gamma delta epsilon\n"
    for include, text in ((False, "alpha "), (True, "alpha beta")):
        params = replace(EXAMPLE, stop=("beta",), include_stop_str_in_output=include)
        for run_lens in ((), (64,)):
            assert answer(ids(line * 2), params, run_lens)[0].text == text


def test_text_behind_the_stop_string_in_its_own_token_is_dropped() -> None:
    for stop, text in (("b", "a"), ("ab", ""), ("bc", "a")):
        output, _ = answer([TOKENIZER.pieces.index(b"abc")], replace(EXAMPLE, stop=(stop,)))
        assert (output.text, len(output.token_ids)) == (text, 1)


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        ({}, "a"),
        ({"include_stop_str_in_output": True}, "a"),  # special: skipped anyway
        ({"skip_special_tokens": False}, "a"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<eos>"),
    ],
)
def test_the_text_of_eos(given_: dict[str, Any], text: str) -> None:
    output, _ = answer([*ids("a"), EOS], replace(EXAMPLE, **given_))
    assert (output.text, output.token_ids, output.stop_reason) == (text, [*ids("a"), EOS], None)


def test_the_text_of_a_stop_id() -> None:
    stop = ids("c")[0]
    for include, text in ((False, "ab"), (True, "abc")):
        output, _ = answer([*ids("ab"), stop], replace(EXAMPLE, stop_token_ids=(stop,), include_stop_str_in_output=include))
        assert (output.text, output.stop_reason, output.token_ids) == (text, stop, [*ids("ab"), stop])


def test_eos_inside_an_answer_that_ignores_it() -> None:
    tokens = [*ids("a"), EOS, *ids("b"), END]
    for skip, text in ((True, "ab"), (False, "a<eos>b<|end|>")):
        output, _ = answer(tokens, replace(EXAMPLE, ignore_eos=True, max_tokens=4, skip_special_tokens=skip))
        assert (output.text, output.finish_reason, len(output.token_ids)) == (text, "length", 4)


def test_stop_strings_are_matched_against_the_text_the_client_sees() -> None:
    tokens = [*ids("a"), END, *ids("b"), EOS]
    for skip, text in ((True, "ab"), (False, "a")):
        params = replace(EXAMPLE, ignore_eos=True, stop=("<|end|>",), max_tokens=4, skip_special_tokens=skip)
        assert answer(tokens, params)[0].text == text
    assert answer(tokens, replace(EXAMPLE, ignore_eos=True, stop=("ab",), max_tokens=4))[0].text == ""


def test_a_stop_string_within_min_tokens_stays_in_the_text() -> None:
    params = replace(EXAMPLE, stop=("!",), min_tokens=3)
    output, deltas = answer(ids("!a!b!c"), params)
    assert (output.text, len(output.token_ids)) == ("!a!b", 5)
    assert sent(deltas) == ["!", "a", "!", "b", ""]


def test_a_stop_string_only_counts_up_to_the_cap() -> None:
    tokens = ids("w x y z")
    for cap in range(1, 8):
        output, _ = answer(tokens, replace(EXAMPLE, stop=("y",), max_tokens=cap), (7,))
        assert (output.text, output.finish_reason) == (("w x ", "stop") if cap >= 5 else ("w x y z"[:cap], "length"))
        assert len(output.token_ids) == min(cap, 5)


def test_half_a_character_at_the_end_shows_as_broken() -> None:
    output, deltas = answer(TOKENIZER.encode("é")[:1], replace(EXAMPLE, max_tokens=1))
    assert (output.text, sent(deltas)) == ("\ufffd", ["\ufffd"])


def test_a_grammar_that_closed_keeps_its_text_even_over_a_stop_string() -> None:
    prepared, assembler = prepared_and_assembler(replace(EXAMPLE, stop=("}",)))
    name = prepared.requests[0].request_id
    delta = assembler.push(EngineOutput(name, tuple(ids("{}")), finish_reason=FinishReason.STOP))
    assert (delta.text, delta.finish_reason) == ("{}", "stop")


def prepared_and_assembler(params: SamplingParams = EXAMPLE) -> tuple[Prepared, Assembler]:
    prepared = Frontend(INFO).prepare("r", "xyz", params)
    return prepared, Assembler(prepared, INFO)


def test_several_answers_and_usage() -> None:
    prepared, assembler = prepared_and_assembler(replace(EXAMPLE, n=3))
    names = [request.request_id for request in prepared.requests]
    for index in (2, 0, 1):
        assert not assembler.is_finished
        delta = assembler.push(
            EngineOutput(names[index], tuple(ids("ab!")), finish_reason=FinishReason.LENGTH, num_cached_tokens=7 - index)
        )
        assert delta.index == index
    assert assembler.is_finished
    assert (assembler.num_prompt_tokens, assembler.num_output_tokens, assembler.num_cached_tokens) == (3, 6, 7)
    result = assembler.request_output()
    assert (result.request_id, result.prompt, result.prompt_token_ids) == ("r", "xyz", ids("xyz"))
    assert [output.index for output in result.outputs] == [0, 1, 2]


def test_an_abort_flushes_what_was_held() -> None:
    prepared, assembler = prepared_and_assembler(replace(EXAMPLE, stop=("nine ten apple",)))
    name = prepared.requests[0].request_id
    assert assembler.push(EngineOutput(name, tuple(ids("nine")))).text == ""
    delta = assembler.push(EngineOutput(name, finish_reason=FinishReason.ABORT))
    assert (delta.text, delta.finish_reason, assembler.is_finished) == ("nine", "abort", True)


@pytest.mark.parametrize(("name", "kind"), [("NonFiniteLogits", NonFiniteLogits), ("Strange", EngineError)])
def test_errors_are_raised_as_what_they_were(name: str, kind: type[Exception]) -> None:
    prepared, assembler = prepared_and_assembler()
    with pytest.raises(kind, match="no good") as caught:
        assembler.push(
            EngineOutput(prepared.requests[0].request_id, finish_reason=FinishReason.ERROR, error=(name, "no good\nhint: try"))
        )
    assert type(caught.value) is kind
    assert str(caught.value) == "no good\nhint: try"
    assert assembler.is_finished


def test_an_engine_that_breaks_the_one_cut_is_found_out() -> None:
    params = replace(EXAMPLE, stop=("b",))
    name = "r#0"
    missed = EngineOutput(name, tuple(ids("b") * 2))
    invented = EngineOutput(name, tuple(ids("a")), finish_reason=FinishReason.STOP, stop_reason="b")
    other = EngineOutput(name, tuple(ids("b")), finish_reason=FinishReason.STOP, stop_reason="a")
    for wrong in (missed, invented, other):
        with pytest.raises(InvariantBroken, match=r"rule 5\.6"):
            prepared_and_assembler(params)[1].push(wrong)
    _, assembler = prepared_and_assembler()
    assembler.push(EngineOutput(name, finish_reason=FinishReason.ABORT))
    with pytest.raises(InvariantBroken, match="must end once"):
        assembler.push(EngineOutput(name, finish_reason=FinishReason.ABORT))


piece_ids = st.sampled_from(
    [*range(259, TOKENIZER.vocab_size), 3 + ord("a"), 3 + ord("b"), 3 + 0xC3, 3 + 0xA9, 3 + 0xF0, EOS, END]
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    tokens = draw(st.lists(piece_ids, min_size=1, max_size=25))
    cap = draw(st.integers(1, 28))
    params = SamplingParams(
        max_tokens=cap,
        min_tokens=draw(st.integers(0, min(cap, 5))),
        stop=tuple(draw(st.lists(st.text("abén t", min_size=1, max_size=5), max_size=3))),
        stop_token_ids=tuple(draw(st.lists(piece_ids, max_size=2))),
        include_stop_str_in_output=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        logprobs=0,
    )
    return tokens, params


def final_text(output: CompletionOutput, params: SamplingParams) -> str:
    """The whole answer's text, from its ids and reasons alone."""
    kept, stopped = list(output.token_ids), output.finish_reason == "stop"
    by_id = stopped and not isinstance(output.stop_reason, str)
    if by_id and not params.include_stop_str_in_output:
        kept.pop()
    text = TOKENIZER.decode(kept, params.skip_special_tokens)
    if stopped and isinstance(output.stop_reason, str):
        # Behind the text that was certain one token earlier: earlier completions, within min_tokens, do not count.
        held_back = TOKENIZER.decode(kept[:-1], params.skip_special_tokens).rstrip("\ufffd")
        match = naive_match(text, [output.stop_reason], after=len(held_back))
        assert match is not None
        text = text[: match.end if params.include_stop_str_in_output else match.start]
    return text


@given(cases(), st.lists(st.integers(1, 8), max_size=10))
def test_any_runs_give_one_answer_and_deltas_add_up_to_it(case: tuple[list[int], SamplingParams], run_lens: list[int]) -> None:
    tokens, params = case
    output, deltas = answer(tokens, params, run_lens)
    one_by_one, single = answer(tokens, params)
    assert "".join(sent(deltas)) == output.text == one_by_one.text == "".join(sent(single))
    assert output == one_by_one
    assert [token for delta in deltas for token in delta.token_ids] == output.token_ids == tokens[: len(output.token_ids)]
    assert [one.token_id for one in output.logprobs or ()] == output.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    if output.finish_reason is not None:
        assert output.text == final_text(output, params)


@given(cases())
def test_no_more_is_held_back_than_a_stop_string_may_need(case: tuple[list[int], SamplingParams]) -> None:
    tokens, params = case
    _, deltas = answer(tokens, params)
    so_far, seen = "", 0
    for delta in deltas:
        so_far += delta.text
        seen += len(delta.token_ids)
        if delta.finish_reason is None:
            text = TOKENIZER.decode(tokens[:seen], params.skip_special_tokens).rstrip("\ufffd")
            held = 0 if params.include_stop_str_in_output else naive_held(text, list(params.stop))
            assert len(so_far) >= len(text) - held


@given(st.text(max_size=40), st.lists(st.integers(1, 6), max_size=10))
def test_a_real_vocabulary_streams_its_own_text(text: str, run_lens: list[int]) -> None:
    tokenizer = byte_level()
    info = ModelInfo("tiny", tokenizer, None, tokenizer.vocab_size, 4096, (EOS,))
    tokens = [*tokenizer.encode(text), EOS]
    output, deltas = answer(tokens, replace(EXAMPLE, max_tokens=500), run_lens, info)
    kept = tokens[: tokens.index(EOS) + 1]  # the text itself may spell a special token
    assert output.text == "".join(sent(deltas)) == tokenizer.decode(kept, True)
