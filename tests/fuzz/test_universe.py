"""The right answers of the fuzzer are right: the engine's reference cell equals the root oracle, on HashLM and on real models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest

from slipstream.testing.tiny import FAMILIES, tiny_checkpoint
from tests.fuzz.universe import CONTEXT, DIGITS, EOS, EOS_BIAS, NAN, NUM_JOBS, NUM_REAL_JOBS, TOKENIZER, VOCAB, jobs, right_answer
from tests.hash_oracle import hidden_states, logits_of
from tests.oracle import Floats, Logits, OracleAnswer, generate, transformers_logits

PARTS = 6
PARAMS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "stop",
    "stop_token_ids", "ignore_eos", "logprobs", "logit_bias", "allowed_token_ids",
)  # fmt: skip


class NotFinite(Exception):
    """The oracle's model was asked for logits behind the token that has none."""


@lru_cache(maxsize=4)
def oracle_model(name: str) -> Logits:
    """Logits behind a sequence, by nothing of ours."""
    if not name.startswith("hash"):
        return transformers_logits(str(tiny_checkpoint(name)))
    num_layers = int(name.split()[1])
    return lambda tokens: np.array(logits_of(hidden_states(tokens, num_layers)[-1], VOCAB, (EOS,), EOS_BIAS))


def oracle_answer(model: str, number: int) -> tuple[OracleAnswer | None, list[int]]:
    """The oracle's answer (None: it met logits that are not finite) and the tokens up to there."""
    job, seen = jobs()[number], [0]
    end = EOS if job.grammar is None else int(job.grammar[1].partition(":")[2])

    def logits_of_job(tokens: Sequence[int]) -> Floats:
        seen[:] = tokens
        if tokens[-1] == NAN and model.startswith("hash"):
            raise NotFinite
        logits = oracle_model(model)(tokens).copy()
        if job.grammar is not None:
            digits = list(range(DIGITS[0], DIGITS[1] + 1))
            allowed = digits if len(tokens) == len(job.prompt) else [*digits, end]
            logits[[token for token in range(len(logits)) if token not in allowed]] = -np.inf
        return logits

    try:
        answer = generate(
            logits_of_job,
            job.prompt,
            context_len=CONTEXT,
            eos=(EOS, end),
            text_of=lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True),
            seed=job.seed,
            max_tokens=job.params.max_tokens or CONTEXT,
            bad_word_ids=job.bad_word_ids,
            **{name: getattr(job.params, name) for name in PARAMS},
        )
    except NotFinite:
        return None, seen[len(job.prompt) :]
    return answer, answer.token_ids


def compare(model: str, number: int) -> None:
    """One right answer against the oracle's."""
    got = right_answer(model, number)
    wanted, tokens = oracle_answer(model, number)
    assert got.token_ids == tokens, (number, jobs()[number])
    if wanted is None:
        assert got.error is not None and got.error[0] == "NonFiniteLogits", (number, jobs()[number])
        return
    assert got.finish_reason is not None and got.error is None
    assert (got.finish_reason.value, got.stop_reason) == (wanted.finish_reason, wanted.stop_reason), (number, jobs()[number])
    for mine, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
        assert abs(mine.logprob - theirs[0]) < 1e-4
        assert list(mine.top_ids) == [token for token, _ in theirs[1]]


@pytest.mark.parametrize("part", range(PARTS))
def test_the_reference_equals_the_oracle(part: int) -> None:
    for number in range(part, NUM_JOBS, PARTS):
        compare(f"hash {1 + number % 2}", number)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_equals_the_oracle_on_real_models(family: str) -> None:
    for number in range(NUM_REAL_JOBS):
        compare(family, number)


def test_the_universe_ends_in_every_way() -> None:
    answers = [right_answer("hash 1", number) for number in range(NUM_JOBS)]
    ends = Counter(
        "error" if a.error else a.finish_reason.value + ("" if a.stop_reason is None else f" {type(a.stop_reason).__name__}")
        for a in answers
        if a.finish_reason is not None
    )
    assert set(ends) == {"error", "length", "stop", "stop int", "stop str"}
    assert min(ends.values()) >= 5, ends
    assert sum(len(a.token_ids) for a in answers) / NUM_JOBS > 3
