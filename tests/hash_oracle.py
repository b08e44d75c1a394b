"""HashLM written again in plain integers, from the definition in its docstring. Imports nothing of slipstream and no torch."""

from __future__ import annotations

from collections.abc import Sequence


def wrap(x: int) -> int:
    """The signed 64-bit number that x is modulo 2^64."""
    return (x + 2**63) % 2**64 - 2**63


def mix(x: int) -> int:
    """The bijection of HashLM: Python's >> on negative numbers is arithmetic, as torch's is."""
    x = wrap(x)
    x = wrap((x ^ (x >> 30)) * 0x3F58476D1CE4E5B9)
    x = wrap((x ^ (x >> 27)) * 0x14D049BB133111EB)
    return x ^ (x >> 31)


def hidden_states(tokens: Sequence[int], num_layers: int = 1, salt: int = 0) -> list[int]:
    """The hidden state of each token of one sequence."""
    x = list(tokens)
    for layer in range(num_layers):
        keys = [mix(t * 0x1D8E4E27C47D124F + p * 0x2B7E151628AED2A7) for p, t in enumerate(x)]
        own = [t * 0x3C6EF372FE94F82B + p * 0x510E527FADE682D1 + salt + layer * 0x1F83D9ABFB41BD6B for p, t in enumerate(x)]
        x = [mix(sum(keys[: p + 1]) + own[p]) for p in range(len(x))]
    return x


def logits_of(hidden: int, vocab_size: int, eos: Sequence[int] = (), eos_bias: float = 0.0) -> list[float]:
    """The logits behind one hidden state."""
    bits = (vocab_size - 1).bit_length()
    out = []
    for token in range(vocab_size):
        low = mix(hidden + token * 0x5BE0CD19137E2179) % 2 ** (52 - bits)
        out.append((low * 2**bits + token) * 16.0 / 2**52 - 8.0 + (eos_bias if token in eos else 0.0))
    return out
