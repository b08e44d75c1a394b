"""The root oracle: what an answer must be, computed the slow way. Written from the definitions; imports nothing of slipstream.

Every token: the whole sequence through the model once more, then the transforms, the noise and the stop conditions, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

Floats = NDArray[np.float64]
Logits = Callable[[Sequence[int]], Floats]
MASK64 = 2**64 - 1


@dataclass
class OracleAnswer:
    """Token ids, why they end, and for each the logprobs (chosen, best first)."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)


def transformers_logits(folder: str) -> Logits:
    """Logits behind a sequence, in fp64, without any cache. Its norms and its eager softmax compute in fp32: not used."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    for norm in (module for name, module in model.named_modules() if name.endswith("norm")):
        weight, eps = (norm.weight + 1, norm.eps) if hasattr(norm, "eps") else (norm.weight, norm.variance_epsilon)  # eps: Gemma
        norm.forward = lambda x, w=weight, e=eps: w * x / (x.square().mean(-1, keepdim=True) + e).sqrt()

    def logits(tokens: Sequence[int]) -> Floats:
        with torch.inference_mode():
            return model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].double().numpy()

    return logits


def splitmix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def hash32(seed: int, position: int, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The counter-based hash of (seed, position, id)."""
    key = splitmix64(splitmix64(seed & MASK64) ^ (position * 0x9E3779B97F4A7C15 & MASK64))
    u32 = np.uint32
    h = ids.astype(u32) * u32(0x9E3779B1) ^ u32(key >> 32)
    h ^= h >> u32(16)
    h *= u32(0x7FEB352D)
    h ^= h >> u32(15)
    h += u32(key & 0xFFFFFFFF)
    h ^= h >> u32(16)
    h *= u32(0x846CA68B)
    h ^= h >> u32(16)
    h *= u32(0x2C1B3C6D)
    h ^= h >> u32(15)
    return h


def log_exponential(seed: int, position: int, vocab_size: int) -> Floats:
    """log E of every id, E = -log u with u = (h + 1/2) / 2^32."""
    h = hash32(seed, position, np.arange(vocab_size, dtype=np.uint32)).astype(np.float64)
    return np.log(np.where(h < 2**31, -np.log((h + 0.5) / 2**32), -np.log1p(-(2**32 - 0.5 - h) / 2**32)))


def truncate(scores: Floats, top_k: int, top_p: float, min_p: float) -> Floats:
    """Drop (-inf) what top_k, then top_p, then min_p drop."""
    order = np.lexsort((np.arange(len(scores)), -scores))  # best first, lower id first among equals
    if top_k > 0:
        scores[order[top_k:]] = -np.inf
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    if top_p < 1:
        scores[order[int(np.argmax(np.cumsum(probs[order]) >= top_p)) + 1 :]] = -np.inf
    scores[probs < min_p * probs.max()] = -np.inf
    return scores


def generate(
    logits_of: Logits,
    prompt: Sequence[int],
    *,
    context_len: int,
    eos: Sequence[int] = (),
    text_of: Callable[[Sequence[int]], str] = lambda ids: "",
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_tokens: int = 16,
    min_tokens: int = 0,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    bad_word_ids: Sequence[Sequence[int]] = (),
    allowed_token_ids: Sequence[int] | None = None,
) -> OracleAnswer:
    """Answer one prompt."""
    out = (answer := OracleAnswer()).token_ids
    while not answer.finish_reason:
        raw = np.asarray(logits_of([*prompt, *out]), dtype=np.float64)
        scores = raw.copy()
        if allowed_token_ids is not None:
            scores[np.setdiff1d(np.arange(len(raw)), allowed_token_ids)] = -np.inf
        for word in bad_word_ids:
            if [*prompt, *out][len(prompt) + len(out) - len(word) + 1 :] == list(word[:-1]):
                scores[word[-1]] = -np.inf
        if len(out) < min_tokens:
            scores[[*stop_token_ids, *(() if ignore_eos else eos)]] = -np.inf
        for token, bias in (logit_bias or {}).items():
            scores[token] += bias
        for token in {*prompt, *out}:
            scores[token] = scores[token] / repetition_penalty if scores[token] > 0 else scores[token] * repetition_penalty
        for token in set(out):
            scores[token] -= frequency_penalty * out.count(token) + presence_penalty
        if temperature > 0:
            scores = truncate(scores / temperature, top_k, top_p, min_p)
            scores -= log_exponential(seed, len(prompt) + len(out), len(raw))
        token = int(scores.argmax())
        if logprobs is not None:
            logprob = torch.tensor(raw).float().log_softmax(0).tolist()
            best = sorted(range(len(raw)), key=lambda i: (-raw[i], i))[:logprobs]
            answer.logprobs.append((logprob[token], [(i, logprob[i]) for i in best]))
        before, text = (text_of(ids).rstrip("\ufffd") for ids in (out, [*out, token]))
        out.append(token)
        ends = [(at + len(s), -len(s), s) for s in stop for at in range(len(text)) if text.startswith(s, at)]
        hits = sorted(end for end in ends if end[0] > len(before))
        if len(out) > min_tokens and token in eos and not ignore_eos:
            answer.finish_reason = "stop"
        elif len(out) > min_tokens and (token in stop_token_ids or hits):
            answer.finish_reason, answer.stop_reason = "stop", token if token in stop_token_ids else hits[0][2]
        elif len(out) == max_tokens or len(prompt) + len(out) == context_len:
            answer.finish_reason = "length"
    return answer
