"""The head of EAGLE-3 with gradients: the numbers of `speculate.heads.layers.Eagle3Head`, for whole texts and several steps.

Training-time test (Li et al., EAGLE-3, 2025): a head that drafts goes on from its own states, so it is trained on them too. A
chain begins at each position t of an answer; its step i sees

    step       token       state               keys                                 foretells    position
    0          x[t+1]      fc(f[t])            first steps' at 0 ... t              x[t+2]       t
    1          x[t+2]      its own, step 0     those, and its own step 1            x[t+3]       t + 1
    2          x[t+3]      its own, step 1     those, and its own steps 1, 2        x[t+4]       t + 2

which is what the engine's draft loop sees at the position t + i, had all drafted tokens been right. Texts lie one after the
other, without padding; only the keys and values of first steps are computed outside answers.

The target's states are divided by their usual size first (`Eagle3Head` does not): one constant for each of the three, which
export multiplies into `fc`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.layers.rope import RopeSpec
from slipstream.layers.rotary import Rotary
from slipstream.train.features import NUM_TAPS, Text

Embed = Callable[[Tensor], Tensor]
INIT_STD = 0.02
IGNORED = -100


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head: those of one of the target's layers.

    Attributes:
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, norm_eps, rope_theta: as in a config.json.
        draft_vocab_size: tokens it can say.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    draft_vocab_size: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Some texts, T rows of states and C chains in all.

    Attributes:
        features: [T, 3 * hidden].
        tokens: [N] int64, the texts' tokens one after the other, each text's followed by as many -1 as a chain has steps.
        token_at: [T] int64, where x[t] of each row stands in `tokens`.
        positions: [T] int64, t.
        chains: [C] int64, rows at which chains begin.
        spans: of each text: its first row and the one behind its last, the same of its chains.
    """

    features: Tensor
    tokens: Tensor
    token_at: Tensor
    positions: Tensor
    chains: Tensor
    spans: tuple[tuple[int, int, int, int], ...]

    def following(self, step: int) -> Tensor:
        """[C] int64: the token each chain reads at a step; -1 behind a text's end."""
        return self.tokens[self.token_at[self.chains] + 1 + step]

    @classmethod
    def of(cls, texts: Sequence[Text], rows: Sequence[Tensor], num_steps: int, device: torch.device) -> Batch:
        """Put texts and their states [num_rows, 3 * hidden] together."""
        tokens: list[int] = []
        token_at, positions, chains = [], [], []
        spans = []
        row = chain = 0
        for text in texts:
            count, first = text.num_rows, max(text.prompt_len - 1, 0)
            token_at.append(torch.arange(len(tokens), len(tokens) + count))
            positions.append(torch.arange(count))
            chains.append(torch.arange(row + first, row + count))
            spans.append((row, row + count, chain, chain + count - first))
            tokens += [*text.token_ids, *[-1] * num_steps]
            row, chain = row + count, chain + count - first
        return cls(
            torch.cat([one.to(torch.float32) for one in rows]).to(device),
            torch.tensor(tokens, device=device),
            torch.cat(token_at).to(device),
            torch.cat(positions).to(device),
            torch.cat(chains).to(device),
            tuple(spans),
        )


class Head(nn.Module):
    """See the module. Its parameters bear the published names.

    Args:
        shape: sizes.
        feature_scale: [3], what each of the target's states is multiplied by.
    """

    feature_scale: Tensor

    def __init__(self, shape: HeadShape, feature_scale: Tensor) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.shape = shape
        self.fc = nn.Linear(NUM_TAPS * hidden, hidden, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = nn.RMSNorm(hidden, shape.norm_eps)
        self.lm_head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        self.register_buffer("feature_scale", feature_scale.repeat_interleave(hidden))

    @torch.no_grad()
    def initialise(self, seed: int, norm: Tensor, lm_head: Tensor) -> None:
        """Begin with the target's final norm [hidden] and its head's rows of the kept ids [D, hidden]; the rest is random."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_STD)
        self.norm.weight.copy_(norm)
        self.lm_head.weight.copy_(lm_head)

    def unroll(self, batch: Batch, embed: Embed, num_steps: int) -> Iterator[Tensor]:
        """The states s' [C, hidden] of each step; `embed` gives the target's embedding of tokens [N] as [N, hidden]."""
        layer = self.midlayer
        rotary = Rotary(RopeSpec(theta=self.shape.rope_theta), self.shape.head_dim, batch.features.device)
        states = self.fc(batch.features * self.feature_scale).float()  # under autocast too: it is what residuals are added to
        x = layer.look(embed(batch.tokens[batch.token_at + 1]), states)
        query, key, value = layer.project(x[batch.chains]), layer.keys(x), layer.values(x)
        turn, chain_positions = rotary.at(batch.positions, torch.float32), batch.positions[batch.chains]
        key = turn(key)
        query = rotary.at(chain_positions, torch.float32)(query)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        states = layer.finish(states[batch.chains], _attend(query, key, value, own_keys, own_values, batch))
        yield states
        for step in range(1, num_steps):
            x = layer.look(embed(batch.following(step).clamp(min=0)), states)
            turn = rotary.at(chain_positions + step, torch.float32)
            query = turn(layer.project(x))
            own_keys.append(turn(layer.keys(x)))
            own_values.append(layer.values(x))
            states = layer.finish(states, _attend(query, key, value, own_keys, own_values, batch))
            yield states

    def logits(self, states: Tensor) -> Tensor:
        """s' [N, hidden] -> [N, draft vocabulary]."""
        out: Tensor = self.lm_head(self.norm(states))
        return out

    @torch.no_grad()
    def published(self) -> dict[str, Tensor]:
        """Its tensors, by their published names, as they are without the division of the states."""
        tensors = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        tensors["fc.weight"] *= self.feature_scale
        return tensors


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        into, dim = 2 * shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(into, shape.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(into, shape.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(into, shape.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * dim, shape.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self._dim = shape.head_dim
        self.self_attn = _Attention(shape)
        self.mlp = _MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)

    def look(self, embedded: Tensor, states: Tensor) -> Tensor:
        """[N, 2 * hidden]: what queries, keys and values are made of."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), -1)

    def project(self, x: Tensor) -> Tensor:
        """Queries [N, heads, dim]."""
        out: Tensor = self.self_attn.q_proj(x).unflatten(-1, (-1, self._dim))
        return out

    def keys(self, x: Tensor) -> Tensor:
        """[N, kv_heads, dim]."""
        out: Tensor = self.self_attn.k_proj(x).unflatten(-1, (-1, self._dim))
        return out

    def values(self, x: Tensor) -> Tensor:
        """[N, kv_heads, dim]."""
        out: Tensor = self.self_attn.v_proj(x).unflatten(-1, (-1, self._dim))
        return out

    def finish(self, states: Tensor, mixed: Tensor) -> Tensor:
        """What comes behind the attention: s and its output [N, heads * dim] -> s'."""
        residual = states + self.self_attn.o_proj(mixed)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


def _attend(
    query: Tensor, key: Tensor, value: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor], batch: Batch
) -> Tensor:
    """Each chain over the first steps' keys up to its own, and over its own later ones.

    Args:
        query: [C, heads, dim]. key, value: [T, kv_heads, dim], of first steps.
        own_keys, own_values: [C, kv_heads, dim] for each later step so far.

    Returns [C, heads * dim].
    """
    num_chains, num_heads, dim = query.shape
    kv_heads = key.shape[1]
    query = query.view(num_chains, kv_heads, num_heads // kv_heads, dim) * dim**-0.5
    own = [torch.einsum("ckgd,ckd->kgc", query, one) for one in own_keys]  # a chain sees its own alone: one product each
    # Split, not sliced: gradients of slices are whole tensors of zeros, one for each text.
    row_lens = [stop - row for row, stop, _, _ in batch.spans]
    chain_lens = [stop - chain for _, _, chain, stop in batch.spans]
    queries, keys, values = torch.split(query, chain_lens), torch.split(key, row_lens), torch.split(value, row_lens)
    later = [torch.split(one, chain_lens, -1) for one in own]
    mixed, weights_of_own = [], []
    for place, (row, stop, chain, chain_stop) in enumerate(batch.spans):
        scores = torch.einsum("ckgd,rkd->kgcr", queries[place], keys[place])
        unseen = torch.arange(row, stop, device=key.device) > batch.chains[chain:chain_stop, None]
        scores = scores.masked_fill(unseen, -torch.inf)
        weights = torch.cat((scores, *(one[place][..., None] for one in later)), -1).softmax(-1)
        first, rest = torch.split(weights, [stop - row, len(own)], -1)
        mixed.append(torch.einsum("kgcr,rkd->ckgd", first, values[place]))
        weights_of_own.append(rest)
    out = torch.cat(mixed)
    if own:
        rest = torch.cat(weights_of_own, 2)  # [kv_heads, groups, C, later steps]
        for weight, one in zip(rest.unbind(-1), own_values, strict=True):
            out = out + weight.permute(2, 0, 1)[..., None] * one[:, :, None]
    return out.reshape(num_chains, num_heads * dim)
