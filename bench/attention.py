"""Attention of one step of SmolLM2-135M (30 layers, 9 heads over 3, dim 64) by the kernels and the reference: milliseconds.

    python -m bench.attention --json bench/results/attention.json

Each layer has KV of its own; writing the step's keys and values is in the time. The backends take turns in each round; medians of
the rounds. Each layer is one call from Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.kernels import need_kernels
from slipstream.attention.base import AttentionBackend, BatchLayout
from slipstream.attention.cpu import build
from slipstream.attention.kv import NUM_RESERVED_PAGES, KVCache, LayerKV
from slipstream.attention.layout import build_layout
from slipstream.attention.reference import ReferenceBackend

HEADS, KV_HEADS, DIM = 9, 3, 64
PAGE_SIZE = 16
REST_S = 0.01  # between two systems: threads of the one before have stopped spinning by then


@dataclass(frozen=True)
class Case:
    """Sequences of `base` keys that a step gives `length` tokens each, as prompts or verify rows."""

    name: str
    sequences: int
    base: int
    length: int
    prompt: bool = False

    @property
    def macs(self) -> float:
        """Multiply-adds of one layer: of scores and of values."""
        keys = self.length * self.base + self.length * (self.length + 1) / 2
        return 2 * self.sequences * HEADS * DIM * keys


CASES = (
    Case("decode 1", 1, 255, 1),
    Case("decode 8", 8, 255, 1),
    Case("decode 32", 32, 255, 1),
    Case("verify 1x4", 1, 252, 4),
    Case("verify 32x4", 32, 252, 4),
    Case("prefill 256", 1, 0, 256, prompt=True),
    Case("prefill 1024", 1, 0, 1024, prompt=True),
    Case("decode 1 at 4096", 1, 4095, 1),
)


@dataclass(frozen=True)
class System:
    """A backend over KV of one dtype; queries, keys and values come in `given`."""

    name: str
    backend: AttentionBackend
    stored: torch.dtype
    given: torch.dtype = torch.float32


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=7, help="of each system and case")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--cases", nargs="+", help="names; default: all")
    parser.add_argument("--systems", nargs="+", help="names; default: all")
    parser.add_argument("--threads", type=int, help="of both sides; default: what each takes by itself")
    args = parser.parse_args(argv)
    library = need_kernels(args.threads)
    ours, reference = build(), ReferenceBackend()
    systems = [
        System("bfloat16", ours, torch.bfloat16),
        System("float32", ours, torch.float32),
        System("int8", ours, torch.int8),
        System("torch bfloat16", reference, torch.bfloat16, torch.bfloat16),
        System("torch float32", reference, torch.float32),
    ]
    systems = [system for system in systems if not args.systems or system.name in args.systems]
    found: dict[str, dict[str, float]] = {system.name: {} for system in systems}
    print(f"{'ms a step':18}" + "".join(f"{system.name:>16}" for system in systems) + "     (GFLOP/s)")
    with torch.inference_mode():
        for case in CASES:
            if args.cases and case.name not in args.cases:
                continue
            times = measure(case, systems, args.layers, args.rounds)
            for name, milliseconds in times.items():
                found[name][case.name] = milliseconds
            rates = [f"{ms:8.2f} ({2e-6 * case.macs * args.layers / ms:4.0f})" for ms in times.values()]
            print(f"{case.name:18}" + "".join(f"{rate:>16}" for rate in rates), flush=True)
    if args.json:
        setting = {
            "layers": args.layers,
            "rounds": args.rounds,
            "threads": library.threads,
            "torch_threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        args.json.write_text(json.dumps({"setting": setting, "ms": found}, indent=1) + "\n")


def measure(case: Case, systems: Sequence[System], layers: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step, by name."""
    pages = -(-(case.base + case.length) // PAGE_SIZE)
    order = torch.randperm(case.sequences * pages, generator=torch.Generator().manual_seed(1)) + NUM_RESERVED_PAGES
    layout = build_layout(
        page_tables=order.view(case.sequences, pages),
        page_size=PAGE_SIZE,
        base_lens=torch.full((case.sequences,), case.base),
        limits=torch.full((case.sequences,), pages * PAGE_SIZE),
        query_lens=(case.length,) * case.sequences,
        max_key_lens=(case.base + case.length,) * case.sequences,
        num_chunks=case.sequences if case.prompt else 0,
    )
    tokens = case.sequences * case.length
    inputs = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM)
    caches = {system.name: _filled(system.stored, layers, case.sequences * pages) for system in systems}
    seen: dict[str, list[float]] = {system.name: [] for system in systems}
    repeats = max(1, 8 // tokens)  # of short steps more
    for turn in range(rounds + 1):
        for system in systems:
            time.sleep(REST_S)
            given, kv = inputs.to(system.given), caches[system.name]
            _step(system.backend, layout, kv, given)
            for _ in range(repeats):
                began = time.perf_counter()
                _step(system.backend, layout, kv, given)
                if turn:  # the first is a warm-up
                    seen[system.name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in seen.items()}


def _filled(stored: torch.dtype, layers: int, pages: int) -> KVCache:
    kv = KVCache((LayerKV(KV_HEADS, DIM, DIM, stored),) * layers, pages + NUM_RESERVED_PAGES, PAGE_SIZE, torch.device("cpu"))
    for layer in range(layers):
        for tensor in kv.layer(layer):
            tensor.zero_()
    return kv


def _step(backend: AttentionBackend, layout: BatchLayout, kv: KVCache, inputs: Tensor) -> None:
    step = backend.begin(layout, kv)
    query, key, value = inputs[:, :HEADS], inputs[:, HEADS : HEADS + KV_HEADS], inputs[:, HEADS + KV_HEADS :]
    for layer in range(kv.num_layers):
        step(layer, query, key, value, DIM**-0.5)


if __name__ == "__main__":
    main()
