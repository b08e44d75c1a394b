"""Random rows and logits for hypothesis."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.sampling.oracle import Array, Asked
from tests.sampling.steps import Row


@st.composite
def logits_of(draw: st.DrawFn, vocab_size: int) -> Array:
    """Smooth, tied, flat or partly -inf."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(("smooth", "peaked", "tied", "flat", "holes")))
    x = rng.normal(0.0, {"smooth": 2.0, "peaked": 8.0, "tied": 1.5, "flat": 0.05, "holes": 2.0}[kind], vocab_size)
    if kind == "tied":
        x = np.round(x * 2) / 2
    if kind == "holes":
        x[rng.random(vocab_size) < 0.5] = -np.inf
        x[int(rng.integers(vocab_size))] = 1.0
    return x


@st.composite
def asked_of(draw: st.DrawFn, vocab_size: int) -> Asked:
    """Any mixture of parameters, each off about half the time."""
    token = st.integers(0, vocab_size - 1)
    few = st.lists(token, max_size=4)

    def maybe(off: object, strategy: st.SearchStrategy[object]) -> object:
        return draw(st.one_of(st.just(off), strategy))

    return Asked(
        temperature=maybe(1.0, st.sampled_from((0.0, 0.0, 0.3, 0.7, 1.7))),
        top_k=maybe(0, st.sampled_from((1, 2, 3, 7, vocab_size - 1, vocab_size, vocab_size + 5))),
        top_p=maybe(1.0, st.sampled_from((1e-9, 0.1, 0.5, 0.9, 0.999))),
        min_p=maybe(0.0, st.sampled_from((0.01, 0.2, 0.9, 1.0))),
        repetition_penalty=maybe(1.0, st.sampled_from((0.5, 1.3, 2.0))),
        presence_penalty=maybe(0.0, st.sampled_from((-1.0, 0.7, 2.0))),
        frequency_penalty=maybe(0.0, st.sampled_from((-0.5, 0.3, 2.0))),
        logit_bias=maybe({}, st.dictionaries(token, st.sampled_from((-100.0, -1.5, 0.0, 3.0, 100.0)), max_size=4)),
        bad_words=maybe((), st.lists(st.lists(token, min_size=1, max_size=3), max_size=4)),
        allowed_token_ids=maybe(None, st.lists(token, min_size=1, max_size=max(2, vocab_size // 2))),
        min_tokens=maybe(0, st.integers(0, 8)),
        stop_token_ids=maybe((), few),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )


@st.composite
def row_of(draw: st.DrawFn, vocab_size: int) -> Row:
    """A row with a draft tree. Tokens repeat often, so that counts and words matter."""
    asked = draw(asked_of(vocab_size))
    named = [t for word in asked.bad_words for t in word] + list(asked.logit_bias) + [0, 1, 2]
    token = st.one_of(st.sampled_from(named), st.integers(0, vocab_size - 1))
    draft = draw(st.lists(token, max_size=5))
    parents = [draw(st.integers(0, j)) for j in range(len(draft))]
    row = Row(asked, draw(st.lists(token, min_size=1, max_size=6)), draw(st.lists(token, max_size=6)), draft, parents)
    if draw(st.integers(0, 3)) == 0:
        for node in range(len(draft) + 1):
            row.allowed[node] = set(draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=8)))
    return row
