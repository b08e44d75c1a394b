"""Bugs that a review found, one test each. They were wrong once; they must not be wrong again."""

from __future__ import annotations

import copy

import pytest

from slipstream.layers.decoder import Decoder
from slipstream.layers.embedding import Embedding
from slipstream.testing.drafters import DrafterFactory, rand_chain, rand_tree
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_model
from slipstream.testing.toy_grammar import DigitsMatcher, digits
from slipstream.types import FinishReason, SamplingParams
from tests.engine.harness import Job, assert_equal, make_engine, reference, run

LAGS = pytest.mark.parametrize("lag", [0, 1])


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


@LAGS
@pytest.mark.parametrize("params", [greedy(1), greedy(8, stop_token_ids=tuple(range(64)))])
def test_a_broken_grammar_is_an_error_even_where_its_first_token_would_end_the_answer(lag: int, params: SamplingParams) -> None:
    """A row without a matcher is sampled unmasked: whatever ends its run, nothing of it may get out."""
    job = Job((1, 2), params, grammar=digits("nonsense"))
    (answer,) = run(HashLM(vocab_size=64, context_len=64), [job], lag=lag)
    assert answer.finish_reason is FinishReason.ERROR and not answer.token_ids
    assert answer.error is not None and answer.error[0] == "EngineError" and "FIRST-LAST:END" in answer.error[1]


@LAGS
def test_logits_that_are_not_finite_are_not_blamed_on_the_grammar(lag: int) -> None:
    """Sampled from NaN, token 0 or another that the matcher rejects may be committed; the matcher must not see it."""
    model = HashLM(vocab_size=64, context_len=64, nan_token_id=2)
    (answer,) = run(model, [Job((1, 2), greedy(8), grammar=digits("10-19:3"))], lag=lag)
    assert answer.error is not None and answer.error[0] == "NonFiniteLogits"


@pytest.mark.parametrize("drafter", [rand_chain(3, beyond=40), rand_tree(5, beyond=40)])
def test_a_matcher_never_sees_an_id_that_a_drafter_made_up(drafter: DrafterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matcher may well raise for an id outside its vocabulary; that ended the request, where plain decoding answers it."""
    accept = DigitsMatcher.accept

    def strict(self: DigitsMatcher, token: int) -> bool:
        if not 0 <= token < 64:
            raise ValueError(f"no such token: {token}")
        return accept(self, token)

    monkeypatch.setattr(DigitsMatcher, "accept", strict)
    model = HashLM(vocab_size=64, context_len=64)
    jobs = [Job((1, 2), SamplingParams(max_tokens=12), seed=seed, grammar=digits("10-19:3")) for seed in range(4)]
    assert_equal(run(model, jobs, lag=1, drafters={"d": drafter}), reference(model, jobs), "made-up ids")


@LAGS
def test_an_engine_whose_device_failed_keeps_saying_so(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It once forgot the failed step: with everything aborted it looked idle, but its slot was lost and the next request hung."""
    model = HashLM(vocab_size=64, context_len=64)
    engine = make_engine(model, lag=lag, batch=1)
    engine.add(Job((1, 2), greedy(8)).request("a"))
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", lambda hidden: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            for _ in range(2):
                engine.step()
    engine.abort("a")
    for _ in range(3):
        assert engine.has_work, "what is broken is not idle"
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.close()


def test_masks_that_leave_no_token_are_named_in_the_error() -> None:
    params = greedy(4, min_tokens=2, allowed_token_ids=(3,))  # 3 is EOS, which min_tokens holds back
    (answer,) = run(HashLM(vocab_size=64, context_len=64), [Job((1, 2), params)])
    assert answer.finish_reason is FinishReason.ERROR and answer.error is not None
    assert "allowed_token_ids" in answer.error[1] and "min_tokens" in answer.error[1]


@pytest.mark.parametrize("drafter", [rand_chain(3), rand_tree(5)])
def test_a_drafted_token_whose_states_are_not_finite_spoils_nothing(drafter: DrafterFactory) -> None:
    """Plain decoding never computes that token; a rejected draft of it once made its whole row NaN."""
    whole = tiny_model("llama")
    assert isinstance(whole, Decoder)
    job = Job((5, 6, 7, 8), greedy(12, ignore_eos=True))
    (wanted,) = reference(whole, [job], eos=())
    model, weight = copy.copy(whole), whole.embedding.weight.clone()
    weight[[token for token in range(whole.vocab_size) if token not in {*wanted.token_ids, *job.prompt}]] = float("nan")
    model.embedding = Embedding(weight)
    assert_equal(reference(model, [job], eos=()), [wanted], "plain")
    assert_equal(run(model, [job], eos=(), drafters={"d": drafter}), [wanted], "drafted")
