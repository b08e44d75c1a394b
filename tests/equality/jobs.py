"""The requests that every configuration answers: greedy and seeded, with each sampling parameter; and the answers wanted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from slipstream.models.base import CausalLM
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_model
from slipstream.testing.toy_grammar import digits
from slipstream.types import SamplingParams
from tests.engine.harness import EOS, Answer, Job, reference

CONTEXT_LEN = 256
HASH_LM = HashLM(vocab_size=64, context_len=CONTEXT_LEN, eos_token_ids=(EOS,), eos_bias=0.5)
STEM = tuple((9 * 31 + place * place * 7) % 60 for place in range(90))


@dataclass(frozen=True)
class Case:
    """A job with its name. `parent`: the name of sample 0 of its prompt."""

    name: str
    job: Job
    parent: str | None = None


def model_of(name: str) -> CausalLM:
    """A model of the table."""
    return HASH_LM if name == "hash" else tiny_model(name)


def _own(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 31 + place * place * 7 + number * place) % 60 for place in range(length))


def _both(name: str, max_tokens: int = 10, bad: tuple[tuple[int, ...], ...] = (), **more: object) -> list[Case]:
    """A parameter at temperature 0 and at one above, on prompts of different lengths, one of which others have too."""
    number = sum(map(ord, name))
    greedy = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **more})
    seeded = SamplingParams(**{"temperature": 1.0, "max_tokens": max_tokens, **more})
    return [
        Case(f"{name}, greedy", Job((*STEM[: 20 + number % 23], number % 50), greedy, bad_word_ids=bad)),
        Case(f"{name}, seeded", Job(_own(number, 2 + number % 5), seeded, seed=number * 2**30 - 7, bad_word_ids=bad)),
    ]


def _seeded(name: str, prompt: tuple[int, ...], max_tokens: int = 10, **more: object) -> Case:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": max_tokens, **more})
    return Case(f"{name}, seeded", Job(prompt, params, seed=len(name)))


LONG = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
HOT = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True)
DIGITS = digits("10-19:3")
_LONG = [
    Case("long, greedy", Job(STEM[:40], LONG)),
    Case("long, seeded", Job((*STEM[:40], 5), HOT, seed=3)),
    Case("long and alike, seeded", Job(STEM[:64], HOT, seed=-8)),
    Case("long and hot, seeded", Job(STEM[:33], SamplingParams(temperature=1.7, max_tokens=32, ignore_eos=True), seed=2**40)),
    Case("n = 3, sample 0", Job(STEM[:37], HOT, seed=0)),
    Case("n = 3, sample 1", Job(STEM[:37], HOT, seed=1), parent="n = 3, sample 0"),
    Case("n = 3, sample 2", Job(STEM[:37], HOT, seed=2), parent="n = 3, sample 0"),
    Case("long prompt, seeded", Job(STEM[:70], HOT, seed=6)),
]
_OTHERS = [
    *_both("plain"),
    _seeded("one token of prompt", (7,)),
    _seeded("top_k", _own(4, 30), top_k=3),
    _seeded("top_p", STEM[:48], top_p=0.6),
    _seeded("min_p", _own(6, 21), min_p=0.2),
    *_both("repetition_penalty", repetition_penalty=1.3),
    *_both("presence_penalty", presence_penalty=1.0),
    *_both("frequency_penalty", frequency_penalty=1.0),
    *_both("all penalties", repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.7),
    *_both("logit_bias", logit_bias={5: 6.0, 9: -100.0, 40: 5.0}),
    *_both("allowed_token_ids", 16, allowed_token_ids=(20, 21)),
    *_both("bad_words", 16, ((4,), (21, 21, 21)), allowed_token_ids=(4, 20, 21)),
    *_both("min_tokens", min_tokens=8, stop_token_ids=tuple(range(0, 40, 2))),
    *_both("stop", 24, stop=("7", "31", "2", ">"), ignore_eos=True),
    *_both("stop, kept", 24, stop=("4", "0", "<"), include_stop_str_in_output=True, ignore_eos=True),
    *_both("stop_token_ids", 24, stop_token_ids=(1, 9, 30, 41), ignore_eos=True),
    *_both("eos", 24, logit_bias={EOS: 2.0}),
    *_both("logprobs", logprobs=3),
    *_both("logprobs of the chosen token", 9, logprobs=0),
    *_both("prompt_logprobs", 9, prompt_logprobs=2),
    *_both("max_tokens 1", 1),
    *_both("max_tokens 2", 2),
    *_both("speculate 0", speculate=0),
    *_both("speculate 1", speculate=1),
    Case("grammar, greedy", Job(STEM[:28], SamplingParams(temperature=0.0, max_tokens=20), grammar=DIGITS)),
    Case("grammar, seeded", Job(_own(3, 9), SamplingParams(temperature=1.0, max_tokens=20), seed=4, grammar=DIGITS)),
    *_both(
        "everything", 30, ((8,),), top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias={7: 1.5}, min_tokens=5, stop=("55",), stop_token_ids=(4,), logprobs=2,
    ),
]  # fmt: skip
# Long ones first: where pages are short, they are short from the beginning. Short prompts last: they come in faster than answers
# end, even where whole runs are accepted, so that many are there at once.
CASES: tuple[Case, ...] = (*_LONG, *sorted(_OTHERS, key=lambda case: -len(case.job.prompt)))


@cache
def wanted(model: str) -> tuple[Answer, ...]:
    """Each job alone: lag 0, drafter off, no cache, prompts whole, pages enough."""
    return tuple(reference(model_of(model), [case.job for case in CASES], enable_prefix_caching=False))
