"""The tiny models: our loader reads what `transformers` wrote, text and weights, and their logits are worth testing with."""

from __future__ import annotations

import pytest
import torch

from slipstream.testing.byte_tokenizer import EOS_ID, ByteTokenizer
from slipstream.testing.tiny import FAMILIES, tiny_checkpoint, tiny_model
from slipstream.weights import load_text
from tests.oracle import transformers_logits
from tests.paged import logits_in_chunks


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_float64(family: str) -> None:
    tokens = [(7 * i) % 256 for i in range(30)]
    ours = logits_in_chunks(tiny_model(family), torch.tensor(tokens), (11, 5))
    theirs = transformers_logits(str(tiny_checkpoint(family)))
    for length in (1, 11, 12, 30):
        torch.testing.assert_close(ours[length - 1], torch.from_numpy(theirs(tokens[:length]).copy()), rtol=0, atol=1e-9)
    top = ours.topk(2, 1).values
    assert float((top[:, 0] - top[:, 1]).min()) > 1e-4, "no near-ties"
    assert len(set(ours.argmax(1).tolist())) > 10, "answers vary"


def test_the_tokenizer_beside_the_weights_is_the_byte_tokenizer() -> None:
    text = load_text(str(tiny_checkpoint("llama")))
    ours = ByteTokenizer()
    assert text.eos_token_ids == (EOS_ID,) and text.vocab_size == ours.vocab_size
    for sample in ("plain", "naïve 😀\n\t<eos>", ""):
        assert text.tokenizer.encode(sample, add_special_tokens=False) == ours.encode(sample)
    ids = list(range(ours.vocab_size))
    assert [text.tokenizer.token_bytes(i) for i in ids] == [ours.token_bytes(i) for i in ids]
    assert text.tokenizer.special_ids == ours.special_ids
