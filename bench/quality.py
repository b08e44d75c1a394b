"""What a format costs in quality: KL divergence and perplexity beside the same weights dequantised, over texts.

    python -m bench.quality --text FILE... --json bench/results/quality.json

The reference is the same checkpoint multiplied by torch in float32, with attention by the reference backend. Texts (.txt: one;
.jsonl: one a line, under "text") are cut into windows of the same length, each by itself, and every position of a window counts:

    KL           mean over positions of sum p (log p - log q); p is the reference's, q the format's
    perplexity   exp of the mean of -log q(the token that really comes next), as a multiple of the reference's
    top-1        share of positions at which both prefer the same token
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.script import parser, run
from slipstream.attention.base import AttentionBackend
from slipstream.attention.kv import NUM_RESERVED_PAGES, KVCache
from slipstream.attention.layout import build_layout
from slipstream.attention.registry import backend_for
from slipstream.cache.pages import pages_for
from slipstream.cli.measure import machine
from slipstream.cli.progress import StatusLine
from slipstream.errors import ConfigError
from slipstream.weights import load
from slipstream.weights.loaded import LoadedModel, Numbers

PAGE_SIZE = 16
CANDIDATES = {
    "default": Numbers(cpu_kernels="auto"),
    "exact": Numbers(cpu_kernels="exact"),
    "KV in bfloat16": Numbers(cpu_kernels="auto", kv_cache_dtype="bfloat16"),
    "KV in int8": Numbers(cpu_kernels="auto", kv_cache_dtype="int8"),
    "q8": Numbers(cpu_kernels="auto", quantization="q8"),
    "q4": Numbers(cpu_kernels="auto", quantization="q4"),
}


@dataclass(slots=True)
class Sums:
    """Sums over positions."""

    count: int = 0
    divergence: float = 0.0
    own_loss: float = 0.0
    reference_loss: float = 0.0
    agreed: int = 0

    def add(self, reference: Tensor, own: Tensor, following: Tensor) -> None:
        """Log-probabilities [n, vocab] of both, float64, and the tokens [n] that come next."""
        self.count += len(following)
        self.divergence += float((reference.exp() * (reference - own)).sum())
        self.reference_loss -= float(reference.gather(1, following[:, None]).sum())
        self.own_loss -= float(own.gather(1, following[:, None]).sum())
        self.agreed += int((reference.argmax(1) == own.argmax(1)).sum())

    def figures(self) -> dict[str, float]:
        """See the module."""
        count = max(self.count, 1)
        reference, own = self.reference_loss / count, self.own_loss / count
        return {
            "positions": self.count,
            "kl": self.divergence / count,
            "perplexity": math.exp(own),
            "perplexity_ratio": math.exp(own - reference),
            "top_1": self.agreed / count,
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    args = _parser().parse_args(argv)
    status = StatusLine()
    reference = load(args.model, dtype="float32")
    windows = {path.name: _windows(path, reference, args) for path in args.text}
    result: dict[str, Any] = {
        "model": reference.name,
        "window": args.window,
        "torch": torch.__version__,
        "machine": machine(),
        "measured": time.strftime("%Y-%m-%d"),
        "results": {},
    }
    print(f"{'format':16}{'text':20}{'positions':>10}{'KL':>10}{'perplexity':>12}{'of reference':>14}{'top-1':>8}")
    for name in args.formats:
        numbers = CANDIDATES[name]
        loaded = load(
            args.model,
            quantization=numbers.quantization,
            cpu_kernels=numbers.cpu_kernels,
            kv_cache_dtype=numbers.kv_cache_dtype,
        )
        held = " + ".join(f"{count / 1e6:.1f} M {form}" for form, count in loaded.formats.items())
        result["results"][name] = {"held": held}
        for text, cut in windows.items():
            sums = Sums()
            for number, tokens in enumerate(cut):
                status.show(f"{name}, {text}: window {number + 1} of {len(cut)}")
                sums.add(_log_probs(reference, tokens, "off"), _log_probs(loaded, tokens, "auto"), tokens[1:])
            figures = result["results"][name][text] = sums.figures()
            status.show("")
            print(
                f"{name:16}{text:20}{sums.count:>10}{figures['kl']:>10.5f}{figures['perplexity']:>12.3f}"
                f"{figures['perplexity_ratio']:>14.4f}{figures['top_1']:>8.3f}",
                flush=True,
            )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    out = parser("quality", __doc__)
    out.add_argument("--model", default="smollm2-135m")
    out.add_argument("--text", type=Path, nargs="+", required=True, help=".txt or .jsonl files")
    out.add_argument("--formats", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES)[:4])
    out.add_argument("--window", type=int, default=512, help="tokens of a window")
    out.add_argument("--windows", type=int, default=20, help="most windows of a file; 0: all there are")
    out.add_argument("--json", type=Path, help="also write the figures here")
    return out


def _windows(path: Path, loaded: LoadedModel, args: argparse.Namespace) -> list[Tensor]:
    """Runs of window + 1 tokens of a file's texts, spread over all of it."""
    ids = [loaded.tokenizer.encode(text, add_special_tokens=False) for text in _texts(path)]
    size = args.window + 1
    whole = [each[at : at + size] for each in ids for at in range(0, len(each) - size + 1, args.window)]
    if not whole:
        raise ConfigError(f"{path.name} must hold a text of more than {args.window} tokens", hint="a smaller --window")
    wanted = min(args.windows or len(whole), len(whole))
    return [torch.tensor(whole[number * len(whole) // wanted]) for number in range(wanted)]


def _texts(path: Path) -> Iterator[str]:
    try:
        text = path.read_text("utf-8")
        if path.suffix != ".jsonl":
            yield text
            return
        for line in text.splitlines():
            yield json.loads(line)["text"]
    except (OSError, ValueError, KeyError) as error:
        wanted = "must be a text, or lines of JSON with a text each"
        raise ConfigError(f"{path.name} {wanted}, but got: {error}") from None


@torch.inference_mode()
def _log_probs(loaded: LoadedModel, tokens: Tensor, cpu_kernels: str) -> Tensor:
    """Of the next token at each position but the last: [len - 1, vocab] float64."""
    model, count = loaded.model, len(tokens) - 1
    backend: AttentionBackend = backend_for("auto", model.kv_layers, "cpu", cpu_kernels)
    pages = pages_for(count, PAGE_SIZE)
    kv = KVCache(model.kv_layers, NUM_RESERVED_PAGES + pages, PAGE_SIZE, torch.device("cpu"))
    layout = build_layout(
        page_tables=torch.arange(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + pages)[None],
        page_size=PAGE_SIZE,
        base_lens=torch.zeros(1, dtype=torch.int64),
        limits=torch.tensor([count]),
        query_lens=(count,),
        max_key_lens=(count,),
        num_chunks=1,
    )
    hidden, _ = model.forward(tokens[:-1], backend.begin(layout, kv))
    return model.logits(hidden).double().log_softmax(1)


if __name__ == "__main__":
    run(main)
