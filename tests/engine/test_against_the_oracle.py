"""The engine at lag 0, batch of one, drafter off, against the root oracle: once per feature, on a real model and on HashLM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from slipstream.testing.byte_tokenizer import ByteTokenizer
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import CONTEXT_LEN, tiny_checkpoint, tiny_model
from tests import hash_oracle
from tests.engine.harness import Answer, Job, drain, make_engine
from tests.engine.test_equality import GREEDY_AND_SEEDED, params, prompt
from tests.oracle import Logits, OracleAnswer, generate, transformers_logits

EACH_PARAMETER = {
    "temperature": params(temperature=1.7),
    "top_k": params(temperature=1.0, top_k=3),
    "top_p": params(temperature=1.0, top_p=0.6),
    "min_p": params(temperature=1.0, min_p=0.2),
    "repetition_penalty": params(repetition_penalty=1.3),
    "presence_penalty": params(presence_penalty=1.0, temperature=0.5),
    "frequency_penalty": params(frequency_penalty=1.0),
    "all penalties": params(repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.7, temperature=1.0),
    "logit_bias": params(logit_bias={5: 6.0, 9: -100.0}),
    "allowed_token_ids": params(allowed_token_ids=tuple(range(10, 20))),
    "min_tokens": params(min_tokens=8, stop_token_ids=tuple(range(0, 40, 2))),
    "stop": params(40, stop=("A", "7!", "b")),
    "stop kept": params(40, stop=("A", "7!", "b"), include_stop_str_in_output=True),
    "stop_token_ids": params(40, stop_token_ids=(1, 2, 9, 30)),
    "ignore_eos": params(40, ignore_eos=True),
    "logprobs": params(temperature=1.0, logprobs=5),
    "everything": params(
        40, temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias={7: 1.5}, min_tokens=5, stop=("zz",), stop_token_ids=(4,), logprobs=2,
    ),
}  # fmt: skip

PLAIN = ByteTokenizer()
NOT_THE_ORACLES = (
    "n",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "bad_words",
    "seed",
    "prompt_logprobs",
    "speculate",
)


def text_of(ids: Sequence[int]) -> str:
    return PLAIN.decode(list(ids), skip_special_tokens=True)


def hash_logits(tokens: Sequence[int]) -> np.ndarray:
    return np.array(hash_oracle.logits_of(hash_oracle.hidden_states(tokens)[-1], vocab_size=64))


def asked(job: Job, logits: Logits, context_len: int, eos: tuple[int, ...]) -> OracleAnswer:
    fields = {name: getattr(job.params, name) for name in job.params.field_names() if name not in NOT_THE_ORACLES}
    fields |= {"seed": job.seed, "bad_word_ids": job.bad_word_ids}
    return generate(logits, job.prompt, context_len=context_len, eos=eos, text_of=text_of, **fields)


def answered(model: object, job: Job, eos: tuple[int, ...]) -> Answer:
    engine = make_engine(model, lag=0, batch=1, eos=eos)
    engine.add(job.request("r"))
    answers: dict[str, Answer] = {}
    drain(engine, answers)
    engine.close()
    return answers["r"]


def assert_same(got: Answer, wanted: OracleAnswer) -> None:
    assert got.error is None and got.finish_reason is not None
    assert (got.token_ids, got.finish_reason.value, got.stop_reason) == (
        wanted.token_ids,
        wanted.finish_reason,
        wanted.stop_reason,
    )
    for mine, (logprob, best) in zip(got.logprobs, wanted.logprobs, strict=True):
        assert mine.logprob == pytest.approx(logprob, abs=1e-4)
        assert list(mine.top_ids) == [token for token, _ in best]
        assert list(mine.top_logprobs) == pytest.approx([value for _, value in best], abs=1e-4)


@pytest.fixture(scope="module")
def llama() -> Logits:
    return transformers_logits(str(tiny_checkpoint("llama")))


@pytest.mark.parametrize("feature", EACH_PARAMETER)
def test_each_feature_on_a_real_model(llama: Logits, feature: str) -> None:
    job = Job(prompt(4, 21), EACH_PARAMETER[feature], seed=17, bad_word_ids=((4,), (4, 5), (9, 9, 9)))
    eos = (ByteTokenizer.eos_token_id,)
    assert_same(answered(tiny_model("llama"), job, eos), asked(job, llama, CONTEXT_LEN, eos))


@pytest.mark.parametrize("number", range(len(GREEDY_AND_SEEDED)))
def test_plain_requests_on_a_real_model(llama: Logits, number: int) -> None:
    job = GREEDY_AND_SEEDED[number]
    assert_same(answered(tiny_model("llama"), job, ()), asked(job, llama, CONTEXT_LEN, ()))


def test_qwen2() -> None:
    logits = transformers_logits(str(tiny_checkpoint("qwen2")))
    job = Job(prompt(5, 30), params(30, temperature=0.9), seed=3)
    assert_same(answered(tiny_model("qwen2"), job, ()), asked(job, logits, CONTEXT_LEN, ()))


@pytest.mark.parametrize("feature", EACH_PARAMETER)
def test_each_feature_on_hash_lm(feature: str) -> None:
    model = HashLM(vocab_size=64, context_len=256)
    job = Job(prompt(6, 12), EACH_PARAMETER[feature], seed=23, bad_word_ids=((4,), (4, 5)))
    assert_same(answered(model, job, (3,)), asked(job, hash_logits, 256, (3,)))


def test_the_end_of_the_context() -> None:
    model = HashLM(vocab_size=64, context_len=40)
    job = Job(prompt(1, 30), params(1000, ignore_eos=True))
    assert_same(answered(model, job, (3,)), asked(job, hash_logits, 40, (3,)))
