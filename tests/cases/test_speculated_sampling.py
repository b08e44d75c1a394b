"""Reported failures of sampling under speculation and overlap, as tests: penalties, masks, random streams and logprobs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from slipstream.seeds import seed_i
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_model
from slipstream.types import FinishReason, SamplingParams
from tests.cases.stage import (
    EVERY_MODE,
    MODES,
    PRINTABLE,
    WITH_EAGLE,
    Parrot,
    Watch,
    assert_drafts_count,
    generated,
    greedy,
    oracle,
    streamed,
    text_ids,
)
from tests.engine.harness import EOS, Answer, Job, assert_equal, reference, run

MOO = "Say moo again and again: moo moo"
each_mode = pytest.mark.parametrize("mode", MODES)
each_mode_with_eagle = pytest.mark.parametrize("mode", WITH_EAGLE)
each_mode_and_off = pytest.mark.parametrize("mode", EVERY_MODE)
each_lag = pytest.mark.parametrize("lag", [0, 1])

# S17

PENALTIES = {
    "frequency": {"frequency_penalty": 1.0},
    "presence": {"presence_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.3},
}


@cache
def wanted_of_s17(penalty: str) -> Answer:
    return oracle(tiny_model("qwen2"), Job(text_ids(MOO), greedy(48, **PENALTIES.get(penalty, {}))))


@pytest.mark.parametrize("penalty", PENALTIES)
@each_lag
@each_mode
def test_s17_penalties_advance_with_every_token(mode: str, lag: int, penalty: str) -> None:
    """A penalty is as strong in the middle of a run as it is without drafts."""
    job = Job(text_ids(MOO), greedy(48, **PENALTIES[penalty]))
    got = run(tiny_model("qwen2"), [job], lag=lag, eos=(), drafters={mode: MODES[mode](7)})
    assert_equal(got, [wanted_of_s17(penalty)], (mode, lag, penalty))
    assert got[0].token_ids != wanted_of_s17("none").token_ids, "the penalty must change this answer"
    assert_drafts_count(mode, got)


class Stairs(Parrot):
    """A model that likes each of its first tokens a few units better than the next one, wherever it is."""

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.arange(self.vocab_size, 0, -1, dtype=self.dtype).mul(4.5).expand(len(hidden), -1)


@each_lag
@each_mode
def test_s17_a_token_counts_as_often_as_the_run_says_it(mode: str, lag: int) -> None:
    """One and the same token several times in a run: each of them makes the next one less likely."""
    model = Stairs(HashLM(vocab_size=64, context_len=128), [0] * 128)
    jobs = [Job((5, 9, 2), greedy(40, frequency_penalty=penalty)) for penalty in (1.0, 2.0)]
    got = run(model, jobs, lag=lag, eos=(), drafters={mode: MODES[mode](7)})
    assert got[0].token_ids[:8] == [0, 0, 0, 0, 0, 1, 0, 1] and got[1].token_ids[:4] == [0, 0, 0, 1]
    assert_equal(got, reference(model, jobs, eos=()), (mode, lag))
    assert_drafts_count(mode, got)


@each_lag
@each_mode_with_eagle
def test_s17_min_tokens_ends_at_its_token(mode: str, lag: int) -> None:
    """EOS is the favourite from token 3 on and forbidden for 20 tokens: it comes as token 21, not later and not earlier."""
    base = HashLM(vocab_size=64, context_len=128)
    prompt = (5, 9, 2, 7, 1)
    script = [0] * 7 + [EOS] * 121
    model = Parrot(base, script)
    jobs = [Job(prompt, greedy(60, min_tokens=20)), Job(prompt, greedy(60)), Job(prompt, greedy(60, min_tokens=2))]
    watch = Watch()
    got = run(model, jobs, lag=lag, drafters={mode: WITH_EAGLE[mode](7)}, executor=watch.over())
    assert_equal(got, reference(model, jobs), (mode, lag))
    assert [len(answer.token_ids) for answer in got] == [21, 3, 3]
    for answer in got:
        assert answer.token_ids.index(EOS) == len(answer.token_ids) - 1 and answer.finish_reason is FinishReason.STOP
    if mode != "rand":
        assert watch.was_cut_inside("r0", got[0]), "token 21 must lie inside a run"


@each_lag
@each_mode
def test_s17_min_tokens_on_a_real_model(mode: str, lag: int) -> None:
    """An answer that would end at token 3 goes on to token 21 at least, as it does without drafts."""
    model = tiny_model("qwen2")
    eos = (wanted_of_s17("none").token_ids[2],)
    assert wanted_of_s17("none").token_ids.index(eos[0]) == 2
    # The EOS of the short answer, and a bias that makes it the favourite again now and then.
    jobs = [Job(text_ids(MOO), greedy(60, min_tokens=least, logit_bias={eos[0]: 4.0})) for least in (0, 20)]
    got = run(model, jobs, lag=lag, eos=eos, drafters={mode: MODES[mode](7)})
    assert_equal(got, reference(model, jobs, eos=eos), (mode, lag))
    assert len(got[0].token_ids) <= 3 and 21 <= len(got[1].token_ids) < 60
    assert got[1].token_ids.index(eos[0]) == len(got[1].token_ids) - 1


# S19


@each_mode_and_off
def test_s19_unseeded_requests_have_streams_of_their_own(mode: str) -> None:
    """Sixteen times the same prompt, one after the other and at once: unseeded all differ, with a seed none do."""
    model = tiny_model("llama")
    cell = {"lag": 1, "eos": (), "batch": 16, "drafters": {mode: EVERY_MODE[mode](3)}}
    sampled = SamplingParams(max_tokens=12, allowed_token_ids=PRINTABLE)
    seeded = SamplingParams(max_tokens=12, allowed_token_ids=PRINTABLE, seed=5)
    # A new engine for each half: what an engine draws must not start over when the server does.
    at_once = [one.outputs[0].text for one in generated(model, [MOO] * 16, sampled, **cell)]
    in_series = [streamed(model, MOO, sampled, **cell).text for _ in range(4)]
    in_series += [one.outputs[0].text for one in generated(model, [MOO] * 12, sampled, **{**cell, "batch": 1})]
    assert len({*at_once, *in_series}) == 32
    same = [one.outputs[0].text for one in generated(model, [MOO] * 16, seeded, **cell)]
    same += [one.outputs[0].text for one in generated(model, [MOO] * 4, seeded, **{**cell, "batch": 1})]
    assert set(same) == {seeded_text()[:12]}


def test_s19_another_process_draws_other_seeds() -> None:
    """A server that is started anew must not begin the stream of its seeds anew."""
    script = "from slipstream.seeds import draw_seed; print(draw_seed())"
    drawn = {subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout for _ in range(3)}
    assert len(drawn) == 3


@cache
def seeded_text() -> str:
    """What the plain engine says with seed 5."""
    answer = oracle(tiny_model("llama"), Job(text_ids(MOO), SamplingParams(max_tokens=24, allowed_token_ids=PRINTABLE), seed=5))
    return bytes(answer.token_ids).decode()


@each_lag
@each_mode
def test_s19_each_of_n_answers_has_its_own_stream(mode: str, lag: int) -> None:
    """n answers of a seeded prompt differ; the first is that of n = 1, and each is what its own seed gives alone."""
    model = tiny_model("llama")
    params = SamplingParams(n=5, max_tokens=24, allowed_token_ids=PRINTABLE, seed=5)
    (got,) = generated(model, [MOO], params, lag=lag, drafters={mode: MODES[mode](3)})
    texts = [answer.text for answer in got.outputs]
    assert len(set(texts)) == 5 and texts[0] == seeded_text()
    assert [answer.token_ids for answer in got.outputs] == alone_with_seeds_of_n()


@cache
def alone_with_seeds_of_n() -> list[list[int]]:
    """The plain engine's answers to the seeds that n answers of seed 5 have."""
    params = SamplingParams(max_tokens=24, allowed_token_ids=PRINTABLE)
    jobs = [Job(text_ids(MOO), params, seed=seed_i(5, index)) for index in range(5)]
    return [answer.token_ids for answer in reference(tiny_model("llama"), jobs)]


# S21

TALL = [Job(text_ids(MOO[: 9 + 7 * n]), greedy((30, 3, 17, 9)[n], logprobs=5)) for n in range(4)]
WARM = [Job(job.prompt, SamplingParams(max_tokens=job.params.max_tokens, logprobs=5), seed=n) for n, job in enumerate(TALL)]


@cache
def wanted_of_s21(heat: str) -> list[Answer]:
    return reference(tiny_model("llama"), TALL if heat == "greedy" else WARM, eos=())


@pytest.mark.parametrize("heat", ["greedy", "temperature 1"])
@each_lag
@each_mode
def test_s21_a_logprob_for_every_token(mode: str, lag: int, heat: str) -> None:
    """Four requests of different lengths: one entry a token, its own, with the five best tokens in order."""
    jobs = TALL if heat == "greedy" else WARM
    got = run(tiny_model("llama"), jobs, lag=lag, eos=(), drafters={mode: MODES[mode](7)})
    wanted = wanted_of_s21(heat)
    assert_equal(got, wanted, (mode, lag, heat))
    assert_drafts_count(mode, got, at_least=0.5)
    for answer, other in zip(got, wanted, strict=True):
        assert len(answer.logprobs) == len(answer.token_ids)
        for token, entry, same in zip(answer.token_ids, answer.logprobs, other.logprobs, strict=True):
            assert entry.token_id == token and entry.logprob < 0.0
            assert len(entry.top_ids) == len(set(entry.top_ids)) == len(entry.top_logprobs) == 5
            assert all(one >= two for one, two in pairwise(entry.top_logprobs))
            assert entry.top_logprobs == pytest.approx(same.top_logprobs, abs=1e-5)
            if token in entry.top_ids:
                assert entry.logprob == pytest.approx(entry.top_logprobs[entry.top_ids.index(token)], abs=1e-6)
            if heat == "greedy":
                assert entry.top_ids[0] == token


@each_lag
@each_mode
def test_s21_each_delta_brings_the_logprobs_of_its_tokens(mode: str, lag: int) -> None:
    """Streamed, logprobs travel with their tokens, also where a stop string cuts the run."""
    model = tiny_model("llama")
    plain = oracle(model, Job(text_ids(MOO), greedy(30, allowed_token_ids=PRINTABLE, logprobs=5)))
    text = bytes(plain.token_ids).decode()
    at = next(n for n in range(12, 30) if text.find(text[n - 3 : n]) == n - 3)
    params = greedy(30, allowed_token_ids=PRINTABLE, logprobs=5, stop=(text[at - 3 : at],))
    stream = streamed(model, MOO, params, lag=lag, drafters={mode: MODES[mode](7)})
    answer = stream.output.outputs[0]
    assert answer.text == stream.text == text[: at - 3] and answer.logprobs is not None
    for delta in stream.deltas:
        assert delta.logprobs is not None and tuple(entry.token_id for entry in delta.logprobs) == delta.token_ids
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids == plain.token_ids[:at]
    for entry, same in zip(answer.logprobs, plain.logprobs, strict=False):
        assert entry.logprob == pytest.approx(same.logprob, abs=1e-5) and entry.top_ids == same.top_ids


# S26

FEW = (1, 2, 3, 4, 5)


def adjacent_repeats(token_ids: list[int]) -> int:
    return sum(one == two for one, two in pairwise(token_ids))


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2.0}, {"repetition_penalty": 1.5}], ids=["frequency", "repetition"])
@each_mode_and_off
def test_s26_penalties_know_the_newest_token(mode: str, penalty: dict[str, float]) -> None:
    """Overlap does not hide the newest token from the penalties, behind a repeat either: the same answers as without."""
    model = HashLM(vocab_size=64, context_len=128)
    prompts = [(9 + n, 20, 30) for n in range(6)]
    jobs = [Job(prompt, greedy(40, allowed_token_ids=FEW, **penalty)) for prompt in prompts]
    got = run(model, jobs, lag=1, eos=(), drafters={mode: EVERY_MODE[mode](3)})
    alone = run(model, jobs, lag=0, eos=())
    assert_equal(got, alone, (mode, penalty))
    free = run(model, [Job(prompt, greedy(40, allowed_token_ids=FEW)) for prompt in prompts], lag=0, eos=())
    assert sum(answer.token_ids != other.token_ids for answer, other in zip(got, free, strict=True)) > 3
    assert sum(adjacent_repeats(answer.token_ids) for answer in got) > 6, "there must be repeats to look behind"


@each_mode_and_off
def test_s26_a_banned_word_of_two_tokens(mode: str) -> None:
    """The second token of a banned word is barred at once behind the first, and only there."""
    model = tiny_model("llama")
    free = oracle(model, Job(text_ids(MOO), greedy(40, allowed_token_ids=PRINTABLE)))
    first, second = free.token_ids[11:13]
    job = Job(text_ids(MOO), greedy(40, allowed_token_ids=PRINTABLE), bad_word_ids=((first, second),))
    got = run(model, [job], lag=1, eos=(), drafters={mode: EVERY_MODE[mode](7)})
    assert_equal(got, run(model, [job], lag=0, eos=()), mode)
    answer = got[0].token_ids
    assert answer[:12] == free.token_ids[:12] and answer[12] != second, "the word must be what the model wanted to say"
    assert (first, second) not in set(pairwise(answer))


@each_mode_and_off
def test_s26_a_banned_word_as_text(mode: str) -> None:
    """The same through the front, where the word is text."""
    model = tiny_model("llama")
    free = generated(model, [MOO], greedy(40, allowed_token_ids=PRINTABLE))[0].outputs[0].text
    word = next(free[n : n + 2] for n in range(10, 30) if " " not in free[n : n + 2] and free.find(free[n : n + 2]) == n)
    params = greedy(40, allowed_token_ids=PRINTABLE, bad_words=(word,))
    cell = {"lag": 1, "drafters": {mode: EVERY_MODE[mode](7)}}
    got = generated(model, [MOO], params, **cell)[0].outputs[0]
    assert word in free and word not in got.text and len(got.text) == 40
    assert replace(got, drafting={}) == generated(model, [MOO], params)[0].outputs[0]


@each_mode_and_off
def test_s26_a_stop_string_over_several_tokens(mode: str) -> None:
    """A stop string ends the answer at the same token with and without overlap, and the step in flight leaves no trace."""
    model = tiny_model("llama")
    free = generated(model, [MOO], greedy(40, allowed_token_ids=PRINTABLE))[0].outputs[0]
    at = next(n for n in range(12, 30) if free.text.find(free.text[n - 3 : n]) == n - 3)
    params = greedy(40, allowed_token_ids=PRINTABLE, stop=(free.text[at - 3 : at],), repetition_penalty=1.0)
    got = generated(model, [MOO], params, lag=1, drafters={mode: EVERY_MODE[mode](7)})[0].outputs[0]
    assert (got.text, got.token_ids, got.finish_reason) == (free.text[: at - 3], free.token_ids[:at], "stop")
