"""Runs a model of ours over paged KV: shuffled pages in a poisoned cache, prompts in chunks, the rest token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.attention.kv import NUM_RESERVED_PAGES, KVCache
from slipstream.attention.layout import build_layout, tree_ancestors
from slipstream.attention.reference import ReferenceBackend
from slipstream.models.base import CausalLM
from slipstream.observe.guard import SyncGuard


class PagedSequence:
    """One sequence in a cache of its own."""

    def __init__(self, model: CausalLM, max_len: int, page_size: int = 4) -> None:
        num_pages = -(-max_len // page_size)
        self.model = model
        self.page_size = page_size
        self.max_len = max_len
        self.kv = KVCache(model.kv_layers, num_pages + NUM_RESERVED_PAGES, page_size, torch.device("cpu"), poison=True)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7))
        self.pages = (order + NUM_RESERVED_PAGES)[None]
        self.length = 0

    @torch.inference_mode()
    def feed(self, tokens: Tensor, *, as_chunk: bool = True, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Run the next tokens [n]; returns logits [n, vocab] and the taps."""
        count = tokens.shape[0]
        layout = build_layout(
            page_tables=self.pages,
            page_size=self.page_size,
            base_lens=torch.tensor([self.length]),
            limits=torch.tensor([self.max_len]),
            query_lens=(count,),
            max_key_lens=(self.length + count,),
            num_chunks=int(as_chunk),
        )
        with SyncGuard():
            hidden, states = self.model.forward(tokens, ReferenceBackend().begin(layout, self.kv), taps)
            logits = self.model.logits(hidden)
        self.length += count
        return logits, states


@torch.inference_mode()
def tree_logits(model: CausalLM, prompt: Tensor, nodes: Tensor, parents: Sequence[int]) -> Tensor:
    """[1 + W, vocab]: a prompt as one chunk, then a verify row: the root nodes[0] and a tree, node i below parents[i - 1]."""
    length, end = len(prompt), len(prompt) + len(nodes)
    kv = KVCache(model.kv_layers, end + NUM_RESERVED_PAGES, 1, torch.device("cpu"), poison=True)
    ancestors = tree_ancestors(torch.tensor([list(parents)]))
    for base, tokens, tree in ((0, prompt, None), (length, nodes, ancestors)):
        layout = build_layout(
            page_tables=torch.arange(NUM_RESERVED_PAGES, end + NUM_RESERVED_PAGES)[None],
            page_size=1,
            base_lens=torch.tensor([base]),
            limits=torch.tensor([end]),
            query_lens=(len(tokens),),
            max_key_lens=(base + len(tokens),),
            num_chunks=int(tree is None),
            ancestors=tree,
        )
        with SyncGuard():
            hidden, _ = model.forward(tokens, ReferenceBackend().begin(layout, kv))
    return model.logits(hidden)


def path_of(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0] - 1])
    return path


def logits_in_chunks(model: CausalLM, tokens: Tensor, chunks: Sequence[int], page_size: int = 4) -> Tensor:
    """[T] -> [T, vocab]: chunks of the given lengths, then one token at a time as verify rows."""
    sequence = PagedSequence(model, tokens.shape[0], page_size)
    singles = tokens.shape[0] - sum(chunks)
    pieces = tokens.split([*chunks, *[1] * singles])
    return torch.cat([sequence.feed(piece, as_chunk=number < len(chunks))[0] for number, piece in enumerate(pieces)])


def greedy(model: CausalLM, prompt: Sequence[int], max_tokens: int, eos: Sequence[int] = ()) -> list[int]:
    """Greedy continuation of a prompt, the ending token included."""
    sequence = PagedSequence(model, len(prompt) + max_tokens, page_size=16)
    logits, _ = sequence.feed(torch.tensor(prompt))
    out: list[int] = []
    while True:
        token = logits[-1:].argmax(-1)
        out.append(int(token))
        if len(out) == max_tokens or out[-1] in eos:
            return out
        logits, _ = sequence.feed(token, as_chunk=False)
