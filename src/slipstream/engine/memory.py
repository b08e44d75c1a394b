"""Where the memory goes: the table that is logged at start, and the refusal of settings whose buffers cannot fit.

    there before           weights
    allocated at start     KV pages, token history, page tables, numbers of each slot, relay rows
    while a step runs      activations, attention, logits: bounds, not measurements

The bounds follow from the model and from what a step has at most: T tokens (--max-num-batched-tokens), R rows (--max-num-seqs), S
sampled nodes:

    activations   T * (P / H + 4 H): P parameters of a layer, H hidden. Each matrix of a layer has H on one side; what is on its
                  other side is made for every token, and P / H is the sum of that. 4 H: the residual and its kin.
    attention     R * context * (a layer's keys and values of a token, two rows of scores, two tables of slots), and the like for
                  one prompt chunk: what the reference backend gathers where every row is as long as the context
    logits        S * vocabulary * (as the model gives them, and three times as scores)
    draft probs   --accept rejection: S * vocabulary * (q, as drafted and as verified, and p with what it is made of)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from slipstream.attention.kv import NUM_RESERVED_PAGES
from slipstream.cache.pages import pages_for
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.models.base import CausalLM
from slipstream.sampling.state import FLOATS, INTEGERS
from slipstream.speculate.base import Drafter

INT_BYTES = 8
# Of a slot, beside its history and page table: limit, draft_from, epoch, length and bonus token, and its sampling numbers.
SLOT_BYTES = INT_BYTES * (5 + len(FLOATS) + len(INTEGERS))
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the table.

    Attributes:
        name, num_bytes: what, and how much of it.
        what: where the number comes from.
        flags: settings that change it.
        must_fit: allocated at start, or taken by a step as full as may be. Weights are there already, and rows that are all as
            long as the context are too rare to be refused for.
    """

    name: str
    num_bytes: int
    what: str
    flags: tuple[str, ...]
    must_fit: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a device: all of it, and what it would give us now."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The table. `memory` is as it was with the weights there and nothing else."""

    items: tuple[MemoryItem, ...]
    memory: Memory
    context_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int

    @property
    def largest_request(self) -> int:
        """Most tokens, prompt and output, of a request that fits."""
        return min(self.context_len, self.num_pages * self.page_size)

    @property
    def num_largest(self) -> int:
        """How many requests of that length fit at once."""
        return min(self.max_num_seqs, self.num_pages // pages_for(self.largest_request, self.page_size))

    def check(self) -> None:
        """Raise `ConfigError`, with the numbers and the flags, where buffers and a full step cannot fit."""
        must_fit = [item for item in self.items if item.must_fit]
        needed, free = sum(item.num_bytes for item in must_fit), self.memory.free_bytes
        if needed > free:
            largest = max(must_fit, key=lambda item: item.num_bytes)
            raise ConfigError(
                f"buffers and a full step must fit the {amount(free)} of memory that are free, but take {amount(needed)}, "
                f"of which {largest.name} {amount(largest.num_bytes)} ({largest.what})",
                hint=f"lower {' or '.join(largest.flags)}",
            )

    def text(self) -> str:
        """The table, for people."""
        rows = [(item.name, amount(item.num_bytes), item.what, ", ".join(item.flags)) for item in self.items]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"  {a:{widths[0]}}  {b:>{widths[1]}}  {c:{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        in_all = sum(item.num_bytes for item in self.items)
        total, free = amount(self.memory.total_bytes), amount(self.memory.free_bytes)
        return "\n".join(
            [
                *lines,
                f"  {'in all':{widths[0]}}  {amount(in_all):>{widths[1]}}  of {total}; {free} were free behind the weights",
                f"  the longest request has {self.largest_request} tokens; {self.num_largest} of that length fit at once",
            ]
        )

    def fields(self) -> dict[str, object]:
        """The table, for machines."""
        return {
            **{f"{item.name.replace(' ', '_').lower()}_bytes": item.num_bytes for item in self.items},
            "total_bytes": self.memory.total_bytes,
            "free_bytes": self.memory.free_bytes,
            "largest_request": self.largest_request,
            "num_largest": self.num_largest,
        }


def plan_memory(
    model: CausalLM,
    config: EngineConfig,
    *,
    context_len: int,
    num_pages: int,
    num_host_pages: int = 0,
    num_parameters: int,
    weight_bytes: int | None = None,
    formats: Iterable[str] = (),
    drafters: Iterable[Drafter],
    memory: Memory,
) -> MemoryPlan:
    """Work the table out; allocates nothing.

    Args:
        model: the target.
        config: the engine's settings.
        context_len: most tokens of a request.
        num_pages: KV pages for requests. num_host_pages: pages of host memory behind them.
        num_parameters: of the target.
        weight_bytes: of the target's weights as they are held; None: all in its dtype.
        formats: what they are held in; none named: its dtype.
        drafters: those that will run.
        memory: of the device, with the weights there.
    """
    drafters = tuple(drafters)
    size, hidden = model.dtype.itemsize, model.hidden_size
    slots, budget = config.max_num_seqs + 1, min(config.max_num_batched_tokens, config.max_num_seqs * context_len)
    rows = min(config.max_num_seqs, budget, num_pages)  # of one step
    layer = max(model.kv_layers, key=lambda one: one.bytes_per_token)
    kv_bytes = sum(one.bytes_per_token for one in model.kv_layers)

    in_layers = max(0, num_parameters - model.vocab_size * hidden)
    activations = budget * (in_layers // (max(1, model.num_layers) * hidden) + 4 * hidden) * size
    num_heads = max(layer.num_heads, hidden // layer.key_dim)
    a_key = layer.bytes_per_token + 2 * num_heads * size + (1 + layer.num_heads) * INT_BYTES
    repeated = num_heads // layer.num_heads * layer.bytes_per_token + budget * size
    most_nodes = max((drafter.num_nodes for drafter in drafters), default=0)
    sampled = min(budget, rows * (1 + most_nodes))
    logits = sampled * model.vocab_size * (size + 3 * max(size, 4))
    probs = sampled * model.vocab_size * (2 * 4 + 3 * max(size, 4)) if config.accept == "rejection" and most_nodes else 0
    fields = [field for drafter in drafters for field in drafter.relay.fields.values()]
    relayed = sum(math.prod(field.shape) * field.dtype.itemsize for field in fields)
    max_pages = pages_for(context_len, config.page_size)

    pool = f"{num_pages} of {config.page_size} tokens: {num_pages * config.page_size} tokens of {amount(kv_bytes)}"
    page = config.page_size * kv_bytes
    kv = (num_pages + NUM_RESERVED_PAGES) * page
    draft_bytes = sum(one.bytes_per_token for drafter in drafters for one in drafter.kv_layers)
    draft_page = config.page_size * draft_bytes
    draft_parameters = sum(drafter.num_parameters for drafter in drafters)
    draft_weights = sum(drafter.weight_bytes for drafter in drafters)
    draft_kv = (num_pages + NUM_RESERVED_PAGES) * draft_page
    draft_pool = f"the same pages: {num_pages * config.page_size} tokens of {amount(draft_bytes)}"
    host_kv = num_host_pages * (page + draft_page)
    seqs, context, drafts = "--max-num-seqs", "--max-model-len", "--speculate"

    def at_start(name: str, num_bytes: int, what: str, *flags: str) -> MemoryItem:
        return MemoryItem(name, num_bytes, what, flags, must_fit=True)

    def at_most(name: str, num_bytes: int, what: str, *flags: str) -> MemoryItem:
        return MemoryItem(name, num_bytes, f"at most, {what}", flags, must_fit=name != "attention")

    held = ", ".join(formats) or str(model.dtype).removeprefix("torch.")
    weights = num_parameters * size if weight_bytes is None else weight_bytes
    items = [
        MemoryItem("weights", weights, f"{num_parameters / 1e6:.1f}M parameters, {held}", ("--dtype", "--quantization")),
        MemoryItem("draft weights", draft_weights, f"{draft_parameters / 1e6:.1f}M parameters", (drafts,)),
        at_start("KV pages", kv, pool, "--num-pages", "--kv-cache-memory-bytes"),
        MemoryItem("host KV pages", host_kv, f"{num_host_pages} pages", ("--kv-offload-memory-bytes",)),
        at_start("draft KV pages", draft_kv, draft_pool, "--num-pages", "--kv-cache-memory-bytes", drafts),
        at_start("token history", slots * (context_len + 2) * INT_BYTES, f"{slots} slots of {context_len} tokens", seqs, context),
        at_start("page tables", slots * max_pages * INT_BYTES, f"{slots} slots of {max_pages} pages", seqs, context),
        at_start("slot numbers", slots * SLOT_BYTES, f"{slots} slots: sampling, lengths, limits", seqs),
        at_start("relay rows", slots * relayed, f"{slots} slots of drafts to come", seqs, drafts),
        at_most("activations", activations, f"{budget} tokens a step", "--max-num-batched-tokens"),
        at_most("attention", context_len * (rows * a_key + repeated), f"{rows} rows of {context_len} tokens", seqs, context),
        at_most("logits", logits, f"{sampled} rows of {model.vocab_size}", seqs, drafts),
        at_most("draft probs", probs, f"{sampled} rows of {model.vocab_size}, p and q", seqs, drafts, "--accept"),
    ]
    shown = tuple(item for item in items if item.num_bytes)
    return MemoryPlan(shown, memory, context_len, config.page_size, num_pages, config.max_num_seqs)


def memory_of(device: torch.device, cgroup: Path = CGROUP) -> Memory:
    """Memory of a device. On the CPU no more than what the process's container (cgroup v2, mounted at `cgroup`) may have."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    system = psutil.virtual_memory()
    total, free = int(system.total), int(system.available)
    limit = _read(cgroup / "memory.max")
    if limit.isdigit():
        stat = dict(line.split() for line in _read(cgroup / "memory.stat").splitlines())
        used = int(_read(cgroup / "memory.current") or 0) - int(stat.get("inactive_file", 0))  # that much it can drop
        total, free = min(total, int(limit)), max(0, min(free, int(limit) - used))
    return Memory(total, free)


def amount(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
