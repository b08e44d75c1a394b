"""The same tokens whatever the path, against the engine at lag 0, one request a time, no drafter: what tests/equality has not.

HashLM makes one wrong page, position, mask or relay row visible at once; the real model in float64 shows that nothing rests on
HashLM's integers.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from slipstream.speculate.draft_model import DraftModel
from slipstream.speculate.ngram import NGram
from slipstream.speculate.off import Off
from slipstream.testing import drafters as d
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.relaying import relaying
from slipstream.testing.tiny import FAMILIES, tiny_model
from slipstream.testing.toy_grammar import digits
from slipstream.types import SamplingParams
from tests.engine.harness import EOS, Answer, DrafterFactory, Job, assert_equal, reference, run
from tests.speculate.eagle_heads import eagle

DRAFTERS: dict[str, DrafterFactory] = {
    "off": lambda target: Off(),
    "self_chain": d.self_chain(3),
    "self_tree": d.self_tree(3),
    "rand": d.rand_chain(3, beyond=9),
    "rand_tree": d.rand_tree(7),
    "partial": d.partial(7, siblings=2),
    "ngram": lambda target: NGram(3),
    "draft_model": lambda target: DraftModel(target.model, target, 3),
    "eagle_chain": eagle(1, 3, kind=1),
    "eagle_tree": eagle(4, 4, 8),
}


def params(max_tokens: int = 24, **more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **more})


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 31 + place * place * 7) % 60 for place in range(length))


GREEDY_AND_SEEDED = [
    Job(prompt(1, 5), params()),
    Job(prompt(2, 130), params(40)),
    Job(prompt(3, 1), params(temperature=1.0), seed=7),
    Job(prompt(4, 40), params(30, temperature=0.7, top_p=0.9, top_k=20), seed=-3),
    Job(prompt(5, 17), params(1)),
    Job(prompt(6, 64), params(50, temperature=1.3, min_p=0.02, ignore_eos=True), seed=2**40),
    Job(prompt(7, 3), params(9, logprobs=3)),
    Job(prompt(8, 16), params(16, temperature=1.0, logprobs=0), seed=11),
]

HASH_LM = HashLM(vocab_size=64, context_len=512, eos_token_ids=(EOS,), eos_bias=0.5)


@pytest.fixture(scope="module")
def wanted() -> list[Answer]:
    return reference(HASH_LM, GREEDY_AND_SEEDED)


@pytest.mark.parametrize("name", ["self_chain", "self_tree", "draft_model", "eagle_chain", "eagle_tree"])
@pytest.mark.parametrize("lag, page_size, chunk", [(0, 16, 64), (1, 1, 64), (1, 16, 2048)])
def test_what_the_target_itself_would_say_is_accepted(
    wanted: list[Answer], lag: int, page_size: int, chunk: int, name: str
) -> None:
    got = run(HASH_LM, GREEDY_AND_SEEDED, lag=lag, page_size=page_size, chunk=chunk, drafters={name: DRAFTERS[name]})
    assert_equal(got, wanted, (lag, page_size, chunk, name))
    assert sum(a.num_accepted for a in got) > 0.5 * sum(len(a.token_ids) for a in got)


@cache
def wanted_of(family: str) -> tuple[list[Job], list[Answer]]:
    jobs = [
        Job(prompt(1, 5), params(20)),
        Job(prompt(2, 70), params(20, temperature=0.8, top_p=0.9), seed=5),
        Job(prompt(3, 33), params(12, frequency_penalty=1.0, logprobs=2)),
    ]
    return jobs, reference(tiny_model(family), jobs)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("lag, page_size", [(0, 16), (1, 1), (1, 16)])
def test_a_real_model_in_float64(family: str, name: str, lag: int, page_size: int) -> None:
    model = tiny_model(family)
    assert model.dtype == torch.float64
    jobs, wanted = wanted_of(family)
    got = run(model, jobs, lag=lag, page_size=page_size, chunk=32, drafters={name: DRAFTERS[name]})
    assert_equal(got, wanted, (family, name, lag, page_size))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("llama", "qwen2")])
@pytest.mark.parametrize(
    "lag, page_size, name", [(0, 1, "rand_tree"), (1, 16, "self_tree"), (1, 1, "partial"), (1, 16, "eagle_tree")]
)
def test_windows_norms_and_layers_without_rope_in_float64(family: str, lag: int, page_size: int, name: str) -> None:
    jobs, wanted = wanted_of(family)
    got = run(tiny_model(family), jobs, lag=lag, page_size=page_size, chunk=32, drafters={name: DRAFTERS[name]})
    assert_equal(got, wanted, (family, name, lag, page_size))


@pytest.mark.parametrize("name", ["self_chain", "self_tree", "rand", "partial", "eagle_tree"])
@pytest.mark.parametrize("lag", [0, 1])
def test_whatever_width_the_cost_model_chooses(wanted: list[Answer], lag: int, name: str) -> None:
    got = run(HASH_LM, GREEDY_AND_SEEDED, lag=lag, chunk=64, drafters={name: DRAFTERS[name]}, adaptive_speculation=True)
    assert_equal(got, wanted, (lag, name))
    assert sum(answer.num_drafted for answer in got) > 0


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_drafter_gets_back_exactly_what_it_relayed(wanted: list[Answer], k: int, lag: int, steps: int) -> None:
    """topk_p, topk_index, hidden_states and draft_probs, in both shapes; the drafter itself checks them."""
    drafter = relaying(d.partial(k), k, probs_steps=steps)
    assert_equal(run(HASH_LM, GREEDY_AND_SEEDED, lag=lag, chunk=64, drafters={"relaying": drafter}), wanted, (k, lag, steps))


@pytest.mark.parametrize("name", ["off", "rand", "rand_tree", "self_chain", "ngram", "draft_model", "eagle_chain", "eagle_tree"])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_grammar_through_the_mask_port(lag: int, name: str) -> None:
    """Digits, then the end: in one batch with plain rows, closing inside a run or not."""
    jobs = [
        Job(prompt(1, 5), params(30, temperature=1.0), seed=1, grammar=digits("10-19:3")),
        Job(prompt(2, 40), params(30), grammar=digits("20-22:9")),
        *GREEDY_AND_SEEDED[:3],
        Job(prompt(3, 9), params(4, temperature=1.0), seed=2, grammar=digits("10-19:63")),
    ]
    got = run(HASH_LM, jobs, lag=lag, chunk=24, drafters={name: DRAFTERS[name]})
    assert_equal(got, reference(HASH_LM, jobs), (lag, name))
    for answer, body, end in ((got[0], range(10, 20), 3), (got[1], range(20, 23), 9), (got[5], range(10, 20), 63)):
        assert answer.error is None and set(answer.token_ids) <= {*body, end}
        assert end not in answer.token_ids[:-1]
        assert (answer.token_ids[-1] == end) == (answer.finish_reason == "stop")
