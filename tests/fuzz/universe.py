"""A fixed set of requests that schedules draw from, so that each one's right answer is computed once.

Answers are short and alphabets often tiny: stops, bad words and penalties then bite all the time. The last tokens of the
vocabulary are special: EOS, and one behind which the model's logits are not finite.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from unittest import mock

from slipstream.attention.base import AttentionBackend
from slipstream.attention.reference import ReferenceBackend
from slipstream.config import EngineConfig
from slipstream.engine import runner
from slipstream.engine.build import assemble_engine
from slipstream.models.base import CausalLM
from slipstream.testing.adversarial import AdversarialExecutor
from slipstream.testing.byte_tokenizer import ByteTokenizer
from slipstream.testing.hash_lm import HashAttention, HashLM
from slipstream.testing.tiny import tiny_model
from slipstream.testing.toy_grammar import digits
from slipstream.text.detokenize import StopScanner
from slipstream.types import EngineRequest, SamplingParams
from tests.engine.harness import Answer, Job, collect

VOCAB = 64
CONTEXT = 32
EOS = 62
EOS_BIAS = 0.7
NAN = 63
NUM_JOBS = 300
NUM_STEMS = 3  # beginnings that many prompts share
NUM_REAL_JOBS = 60  # of them, those that real models are given
DIGITS = (32, 37)  # ids of the toy grammar's digits
TOKENIZER = ByteTokenizer()
HASH_ATTENTION, REFERENCE = HashAttention(), ReferenceBackend()


@lru_cache(maxsize=8)
def model_of(name: str) -> CausalLM:
    """`hash 1`, `hash 2`: HashLM of that many layers; else the family of a tiny real model. All know the ids of the universe."""
    if not name.startswith("hash"):
        return tiny_model(name)
    return HashLM(VOCAB, CONTEXT, int(name.split()[1]), eos_token_ids=(EOS,), eos_bias=EOS_BIAS, nan_token_id=NAN)


def other_model(name: str) -> CausalLM:
    """A model that knows the same ids, says something else, and has a context of 20: the draft model of some schedules."""
    if not name.startswith("hash"):
        return tiny_model(name, seed=1)
    return HashLM(VOCAB, 20, eos_token_ids=(EOS,), eos_bias=EOS_BIAS, nan_token_id=NAN, salt=1)


def attention_of(name: str) -> AttentionBackend:
    """The attention backend for a model."""
    return HASH_ATTENTION if name.startswith("hash") else REFERENCE


def stop_text(request: EngineRequest) -> StopScanner:
    """Stop strings over bytes."""
    return StopScanner(TOKENIZER, request.params)


@lru_cache(maxsize=1)
def jobs() -> tuple[Job, ...]:
    """All requests, the same in every run."""
    rng = random.Random(20240607)
    return tuple(draw_job(rng) for _ in range(NUM_JOBS))


@lru_cache(maxsize=1)
def stems() -> tuple[tuple[int, ...], ...]:
    """Beginnings of prompts, almost as long as the context."""
    rng = random.Random(20240608)
    return tuple(tuple(rng.randrange(32, VOCAB - 2) for _ in range(CONTEXT - 3)) for _ in range(NUM_STEMS))


@lru_cache(maxsize=1)
def relatives() -> tuple[tuple[int, ...], ...]:
    """For each stem the requests whose prompts begin with some of it."""
    return tuple(tuple(number for number, job in enumerate(jobs()) if job.prompt[:2] == stem[:2]) for stem in stems())


def draw_job(rng: random.Random) -> Job:
    """One request: prompt, parameters, seed."""
    if rng.random() < 0.08:
        return draw_constrained_job(rng)
    alphabet = rng.sample(range(32, 62), rng.choice((4, 6, 10))) if rng.random() < 0.4 else None
    prompt_len = rng.choice((1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17, CONTEXT - 3, CONTEXT - 1))
    usual = range(VOCAB - 2)
    prompt = tuple(rng.choice(alphabet if alphabet and rng.random() < 0.7 else usual) for _ in range(prompt_len))
    if rng.random() < 0.6:
        stem = rng.choice(stems())
        shared = rng.choice((2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 24))
        prompt = (*stem[:shared], *prompt)[: CONTEXT - rng.choice((3, 6, 12))]
        prompt = stem[:shared] if rng.random() < 0.3 else prompt
    if rng.random() < 0.02:
        prompt = (*prompt[:-1], NAN)
    fields: dict[str, object] = {"max_tokens": None if rng.random() < 0.05 else rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 10))}
    if alphabet:
        fields["allowed_token_ids"] = (*alphabet, EOS) if rng.random() < 0.7 else tuple(alphabet)
    fields["temperature"] = rng.choice((0.0, 0.0, 0.5, 1.0, 1.0, 2.0))
    _maybe(rng, fields, 0.2, top_k=rng.randint(1, 8), top_p=rng.choice((0.3, 0.8, 0.95)), min_p=rng.choice((0.02, 0.3)))
    _maybe(
        rng,
        fields,
        0.2,
        repetition_penalty=rng.choice((0.8, 1.3)),
        presence_penalty=rng.choice((-1.0, 0.7)),
        frequency_penalty=rng.choice((-0.5, 1.5)),
    )
    _maybe(
        rng,
        fields,
        0.2,
        stop_token_ids=tuple(rng.sample(alphabet or range(VOCAB), rng.randint(1, 3))),
        ignore_eos=True,
        logprobs=rng.randint(0, 3),
        logit_bias={rng.randrange(VOCAB - 1): rng.choice((-100.0, -3.0, 2.0)) for _ in range(2)},
    )
    if rng.random() < (0.5 if alphabet else 0.1):
        fields["stop"] = tuple(_word(rng, alphabet) for _ in range(rng.randint(1, 3)))
    most = fields["max_tokens"]
    if rng.random() < 0.25:
        fields["min_tokens"] = rng.randint(1, most if isinstance(most, int) else 10)
    bad = tuple(tuple(map(ord, _word(rng, alphabet))) for _ in range(rng.randint(1, 3))) if rng.random() < 0.2 else ()
    if alphabet and {word[-1] for word in bad}.issuperset(alphabet):
        bad = ()
    return Job(prompt, SamplingParams(**fields), rng.randrange(-(2**63), 2**63), bad)


def draw_constrained_job(rng: random.Random) -> Job:
    """A request under the toy grammar: digits, then an id that ends it."""
    prompt = tuple(rng.randrange(VOCAB - 2) for _ in range(rng.choice((1, 2, 5, 9))))
    fields: dict[str, object] = {"temperature": rng.choice((0.0, 1.0)), "max_tokens": rng.choice((1, 3, 6, 10))}
    _maybe(rng, fields, 0.3, top_k=3, presence_penalty=0.5, repetition_penalty=1.3)
    source = f"{DIGITS[0]}-{DIGITS[1]}:{rng.choice((EOS, 40))}"
    return Job(prompt, SamplingParams(**fields), rng.randrange(2**63), grammar=digits(source))


@lru_cache(maxsize=4 * NUM_JOBS)
def right_answer(model: str, number: int) -> Answer:
    """What the engine says at lag 0, one request at a time, drafter off. Tests hold it against the root oracle."""
    config = EngineConfig(model="in-memory", lag=0, max_num_seqs=1, num_pages=CONTEXT, max_num_batched_tokens=4096, debug=True)
    engine = assemble_engine(
        model_of(model),
        config,
        eos_token_ids=(EOS,),
        stop_text=stop_text,
        context_len=CONTEXT,
        attention=attention_of(model),
        executor=AdversarialExecutor.factory(0, "eager"),
    )
    answers: dict[str, Answer] = {}
    engine.add(jobs()[number].request("alone"))
    with unguarded():
        while engine.has_work:
            collect(engine, answers)
    engine.close()
    return answers["alone"]


def unguarded() -> AbstractContextManager[object]:
    """Steps run without the guard against hidden synchronisation: it doubles their time and depends on the code path alone."""
    return mock.patch.object(runner, "SyncGuard", nullcontext)


def _maybe(rng: random.Random, fields: dict[str, object], chance: float, **values: object) -> None:
    fields.update({name: value for name, value in values.items() if rng.random() < chance})


def _word(rng: random.Random, alphabet: list[int] | None) -> str:
    return "".join(chr(rng.choice(alphabet or range(32, 62))) for _ in range(rng.choice((1, 1, 2, 2, 3))))
