"""Tiny EAGLE heads in the published layouts, random or trained for a moment, and the same heads again in plain torch.

`PlainHead` shares nothing with slipstream: it runs over whole sequences, without a cache, as the oracle and for training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from slipstream.speculate.base import Drafter
from slipstream.speculate.registry import Target, build_drafter
from slipstream.testing.drafters import DrafterFactory
from slipstream.testing.hash_head import hash_eagle
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_checkpoint

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 32, 4, 2, 8, 48, 259
AUX = [0, 1, 1]  # the tiny targets have two layers
EPS = 1e-6
DRAFT_VOCAB = 150


@dataclass
class PlainHead:
    """A head's weights under their published names, and its config.json."""

    weights: dict[str, Tensor]
    config: dict[str, Any]
    eagle3: bool

    def save(self, folder: Path, rename: Any = None) -> Path:
        """Write the published layout; `rename` changes tensor names."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {(rename or str)(name): tensor.detach().contiguous() for name, tensor in self.weights.items()}
        save_file(tensors, str(folder / "model.safetensors"))
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        return folder

    @property
    def target_ids(self) -> Tensor:
        """The target's id of each draft token."""
        if "d2t" in self.weights:
            return self.weights["d2t"] + torch.arange(len(self.weights["d2t"]))
        return torch.arange(VOCAB)

    def start(self, features: Tensor) -> Tensor:
        """The target's features -> s."""
        return features @ self.weights["fc.weight"].T if self.eagle3 else features

    def run(self, target: Any, following: Tensor, states: Tensor) -> Tensor:
        """A whole sequence: the tokens behind each position [n] and s [n, hidden] -> s' [n, hidden]."""
        w, n = self.weights, len(following)
        embedded = target.model.embed_tokens.weight[following]
        if self.eagle3:
            layer, residual = "midlayer.", states
            x = torch.cat((self._norm(embedded, layer + "input_layernorm"), self._norm(states, layer + "hidden_norm")), -1)
        else:
            layer = "layers.0."
            x = residual = torch.cat((embedded, states), -1) @ w["fc.weight"].T + w["fc.bias"]
        query, key, value = ((x @ w[f"{layer}self_attn.{name}_proj.weight"].T).view(n, -1, DIM) for name in "qkv")
        query, key = self._turn(query), self._turn(key)
        key, value = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(n, -1)
        out = residual + mixed @ w[f"{layer}self_attn.o_proj.weight"].T
        normed = self._norm(out, layer + "post_attention_layernorm")
        gate, up = (normed @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return out + (functional.silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T

    def logits(self, target: Any, states: Tensor) -> Tensor:
        """s' -> logits over the draft vocabulary."""
        if not self.eagle3:
            return states @ target.lm_head.weight.T
        return self._norm(states, "norm") @ self.weights["lm_head.weight"].T

    def features(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """What the head looks at of the target's states [n, hidden], one a layer and the normed last one."""
        return torch.cat([hidden_states[layer] for layer in AUX], -1) if self.eagle3 else hidden_states[-1]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self.weights[f"{name}.weight"]

    def _turn(self, x: Tensor) -> Tensor:
        frequencies = 1.0 / self.config.get("rope_theta", 10000.0) ** (torch.arange(0, DIM, 2, dtype=torch.float32) / DIM)
        angles = torch.arange(len(x), dtype=torch.float32)[:, None] * frequencies
        cos, sin = (torch.cat((part, part), -1)[:, None].to(x.dtype) for part in (angles.cos(), angles.sin()))
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin


@lru_cache(maxsize=4)
def plain_target(family: str) -> Any:
    """The tiny target as `transformers` has it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family), dtype=torch.float64)
    return model.eval().requires_grad_(False)


def hidden_states(family: str, tokens: list[int]) -> tuple[Tensor, ...]:
    """Residuals entering each layer, and the normed last one: [n, hidden] each."""
    with torch.no_grad():
        out = plain_target(family)(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return tuple(state[0] for state in out.hidden_states)


def random_head(kind: int, seed: int = 0, draft_vocab: int | None = DRAFT_VOCAB, hidden: int = HIDDEN) -> PlainHead:
    """kind 1: EAGLE-1/2. kind 3: EAGLE-3, with a reduced vocabulary unless `draft_vocab` is None."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.25

    def scale() -> Tensor:
        return torch.rand(hidden, generator=generator, dtype=torch.float64) + 0.5

    layer, into = ("midlayer.", 2 * hidden) if kind == 3 else ("layers.0.", hidden)
    weights = {
        "fc.weight": draw(hidden, (3 if kind == 3 else 2) * hidden),
        f"{layer}self_attn.q_proj.weight": draw(HEADS * DIM, into),
        f"{layer}self_attn.k_proj.weight": draw(KV_HEADS * DIM, into),
        f"{layer}self_attn.v_proj.weight": draw(KV_HEADS * DIM, into),
        f"{layer}self_attn.o_proj.weight": draw(hidden, HEADS * DIM),
        f"{layer}mlp.gate_proj.weight": draw(INNER, hidden),
        f"{layer}mlp.up_proj.weight": draw(INNER, hidden),
        f"{layer}mlp.down_proj.weight": draw(hidden, INNER),
        f"{layer}post_attention_layernorm.weight": scale(),
    }
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "head_dim": DIM,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 512,
    }
    if kind == 1:
        weights["fc.bias"] = draw(hidden)
        return PlainHead(weights, config, eagle3=False)
    weights |= {
        f"{layer}input_layernorm.weight": scale(),
        f"{layer}hidden_norm.weight": scale(),
        "norm.weight": scale(),
        "lm_head.weight": draw(draft_vocab or VOCAB, hidden),
    }
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "rope_theta": 500.0, "draft_vocab_size": draft_vocab or VOCAB}
    config["eagle_aux_hidden_state_layer_ids"] = AUX
    if draft_vocab is not None:
        ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        weights["d2t"] = ids - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return PlainHead(weights, config, eagle3=True)


def eagle(topk: int, steps: int, draft_tokens: int | None = None, kind: int = 3) -> DrafterFactory:
    """EAGLE for whatever target a test has: a head that is right on HashLM, a random one on a real model."""

    def make(target: Target) -> Drafter:
        if isinstance(target.model, HashLM):
            return hash_eagle(topk, steps, draft_tokens)(target)
        shape = f"topk={topk},steps={steps},draft_tokens={draft_tokens or steps}"
        return through_files(random_head(kind, hidden=target.model.hidden_size), shape)(target)

    return make


def through_files(head: PlainHead, shape: str) -> DrafterFactory:
    """EAGLE with this head, saved and loaded as a user's head is; `shape`: options as they stand in --speculate."""

    def make(target: Target) -> Drafter:
        with TemporaryDirectory() as folder:
            head.save(Path(folder))
            aux = ",aux_layers=input" if head.eagle3 else ""
            return build_drafter(f"eagle:model={folder},{shape}{aux}", target)[1]

    return make


def train(head: PlainHead, family: str, texts: list[list[int]], num_steps: int = 120) -> None:
    """Make the head foretell these texts, which the target wrote."""
    target = plain_target(family)
    ids = head.target_ids
    draft_id = torch.full((VOCAB,), -100).index_copy_(0, ids, torch.arange(len(ids)))
    features = [head.features(hidden_states(family, text)) for text in texts]
    trained = [weight.requires_grad_() for weight in head.weights.values() if weight.is_floating_point()]
    adam = torch.optim.Adam(trained, lr=0.01)
    for _ in range(num_steps):
        loss = torch.zeros((), dtype=torch.float64)
        for text, feature in zip(texts, features, strict=True):
            following = torch.tensor(text[1:-1])
            states = head.run(target, following, head.start(feature[:-2]))
            loss = loss + functional.cross_entropy(head.logits(target, states), draft_id[torch.tensor(text[2:])])
        adam.zero_grad()
        loss.backward()
        adam.step()
    for weight in trained:
        weight.requires_grad_(False)
