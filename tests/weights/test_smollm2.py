"""The real SmolLM2-135M-Instruct: tokens, dequantised weights and greedy text equal transformers'."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.attention.kv import NUM_RESERVED_PAGES, KVCache
from slipstream.attention.layout import build_layout
from slipstream.attention.reference import ReferenceBackend
from slipstream.weights import LoadedModel, load
from slipstream.weights.gguf_file import GgufFile
from tests.paged import logits_in_chunks
from tests.real_models import ALIAS, smollm2

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

PROMPTS = (
    "What is gravity?",
    "Write a haiku about autumn.",
    "List three prime numbers above 100.",
    "Translate 'good morning' into French.",
    "def fibonacci(n):",
    "Explain photosynthesis to a child.",
    "Who wrote Hamlet?",
    "What is the capital of Australia?",
    "Give me a recipe for pancakes.",
    "Count from 1 to 20.",
    "Why is the sky blue?",
    "Summarise: the quick brown fox jumps over the lazy dog.",
    "What is 17 + 25?",
    "Name the planets of the solar system.",
    "Describe the taste of coffee.",
    "How do airplanes fly?",
    "Tell me a joke about computers.",
    "What are the three states of matter?",
    "Write an email to my landlord about a broken window.",
    "Repeat the word moo five times.",
)
NUM_TOKENS = 24
PAGE = 16

TEXTS = (
    "Hello world",
    "  leading and   multiple spaces ",
    "digits 1234567890 3.14 007 12a34",
    "Ünïcödé — “quotes” 你好世界 😀👩\u200d👩\u200d👧 e\u0301",
    "line\n\n\nbreaks\r\n\ttabs\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|endoftext|>",
    "<|im_start|> <|im_end ><|im_end|>x",
    "don't I'LL we've they'd'",
    "def f(x):\n    return x**2  # ok",
    "",
    "a",
    "\n",
    " ",
)


@pytest.fixture(scope="module")
def ours() -> LoadedModel:
    smollm2()
    return load(ALIAS, dtype="float32")


@pytest.fixture(scope="module")
def theirs() -> Any:
    path = smollm2()
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def test_what_the_file_says(ours: LoadedModel) -> None:
    assert ours.num_parameters == 134_515_008
    assert ours.context_len == 8192
    assert ours.architecture == "llama"
    assert 2 in ours.eos_token_ids
    assert ours.chat_template is not None
    assert ours.tokenizer.encode("<|im_start|>") == [1], "no BOS is added"


def test_dequantisation_is_the_librarys() -> None:
    path = smollm2()
    file = GgufFile(path)
    for tensor in gguf.GGUFReader(path).tensors[:14]:
        np.testing.assert_array_equal(file.data(tensor.name), gguf.dequantize(tensor.data, tensor.tensor_type))


def test_tokens_equal_transformers(ours: LoadedModel) -> None:
    path = smollm2()
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in TEXTS:
        ids = ours.tokenizer.encode(text)
        assert ids == reference.encode(text), text
        assert ours.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_digit_is_a_word_of_its_own(ours: LoadedModel) -> None:
    """As the model was trained; transformers leaves this step out when it reads a GGUF, which shows on digits beyond ASCII."""
    for text in ("٣٤", "Ⅷ½", "12"):
        assert ours.tokenizer.encode(text) == [one for char in text for one in ours.tokenizer.encode(char)]


@torch.inference_mode()
def greedy_batch(loaded: LoadedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """All prompts at once: one step of chunks, then steps of verify rows; ended rows ride along and are cut afterwards."""
    num_rows, longest = len(prompts), max(map(len, prompts)) + max_tokens
    per_row = -(-longest // PAGE)
    kv = KVCache(loaded.model.kv_layers, num_rows * per_row + NUM_RESERVED_PAGES, PAGE, torch.device("cpu"), poison=True)
    order = torch.randperm(num_rows * per_row, generator=torch.Generator().manual_seed(0)) + NUM_RESERVED_PAGES
    tables, lens, out = order.view(num_rows, per_row), [0] * num_rows, [[] for _ in prompts]
    tokens, counts = torch.tensor([token for prompt in prompts for token in prompt]), [len(prompt) for prompt in prompts]
    for step in range(max_tokens):
        layout = build_layout(
            page_tables=tables,
            page_size=PAGE,
            base_lens=torch.tensor(lens),
            limits=torch.full((num_rows,), longest),
            query_lens=tuple(counts),
            max_key_lens=tuple(base + count for base, count in zip(lens, counts, strict=True)),
            num_chunks=num_rows if step == 0 else 0,
        )
        hidden, _ = loaded.model.forward(tokens, ReferenceBackend().begin(layout, kv))
        lens = [base + count for base, count in zip(lens, counts, strict=True)]
        tokens = loaded.model.logits(hidden[torch.tensor(counts).cumsum(0) - 1]).argmax(-1)
        for row, token in enumerate(tokens.tolist()):
            out[row].append(token)
        counts = [1] * num_rows
    return [row[: row.index(2) + 1] if 2 in row else row for row in out]


def test_greedy_text_equals_transformers_on_20_prompts(ours: LoadedModel, theirs: Any) -> None:
    """Each of our tokens is the best one of transformers after the same tokens: so, by induction, the texts are equal."""
    chats = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in PROMPTS]
    prompts = [ours.tokenizer.encode(chat) for chat in chats]
    answers = greedy_batch(ours, prompts, NUM_TOKENS)
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + answer])).logits[0]
        best = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert ours.tokenizer.decode(answer, False) == ours.tokenizer.decode(best, False)
        assert answer == best


def test_a_long_prompt_in_chunks_gives_transformers_logits(ours: LoadedModel, theirs: Any) -> None:
    ids = torch.tensor(ours.tokenizer.encode("The history of the world, in many words. " * 40))[:300]
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    got = logits_in_chunks(ours.model, ids, (128, 128, 44), page_size=PAGE)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
