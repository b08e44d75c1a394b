"""All matrix products of one step of SmolLM2-135M, for each format of the weights, beside torch's: milliseconds.

    python -m bench.kernels --json bench/results/kernels.json

Random weights, each layer's in memory of its own; quantisation of the activations is in the time of those formats that need it.
The systems take turns in each round; medians of the rounds. Each product is one call from Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cpu.library import Kernels, kernels
from slipstream.kernels.cpu.matrix import Gate, Mode, PackedMatrix
from slipstream.kernels.formats import Format, QuantizedTensor
from slipstream.layers.linear import linear

HIDDEN, INNER, QKV, VOCAB = 576, 1536, 960, 49152
ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
REST_S = 0.01  # between two systems: threads of the one before have stopped spinning by then

Step = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class System:
    """What is measured: a step takes rows of HIDDEN and of INNER."""

    name: str
    num_bytes: int
    step: Step


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=7, help="of each system and number of rows")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--systems", nargs="+", help="names; default: all")
    parser.add_argument("--threads", type=int, help="of both sides; default: what each takes by itself")
    args = parser.parse_args(argv)
    library = need_kernels(args.threads)
    with torch.inference_mode():
        systems = [one for make in _systems(args.layers) if (one := make(args.systems)) is not None]
        times = measure(systems, args.rows, args.rounds)
    macs = args.layers * HIDDEN * (QKV + HIDDEN + 3 * INNER) + HIDDEN * VOCAB
    print(f"{'ms a step':14}" + "".join(f"{f'T={rows}':>16}" for rows in args.rows))
    for system in systems:
        cells = [f"{times[system.name][rows]:8.2f} ({2e-6 * macs * rows / times[system.name][rows]:4.0f})" for rows in args.rows]
        print(f"{system.name:14}" + "".join(f"{cell:>16}" for cell in cells))
    if args.json:
        setting: dict[str, Any] = {
            "layers": args.layers,
            "rounds": args.rounds,
            "threads": library.threads,
            "torch_threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "cpu": _cpu_name(),
        }
        found = [{"system": one.name, "bytes": one.num_bytes, "ms": times[one.name]} for one in systems]
        args.json.write_text(json.dumps({"setting": setting, "systems": found}, indent=1) + "\n")


def need_kernels(threads: int | None) -> Kernels:
    """The kernels; ends the program where there are none. `threads`, if any, are what they and torch take."""
    library = kernels()
    if library is None:
        raise SystemExit("the CPU kernels must be there to be measured: the log says why they are not")
    if threads:
        library.set_threads(threads)
        torch.set_num_threads(threads)
    return library


def measure(systems: Sequence[System], rows: Sequence[int], rounds: int) -> dict[str, dict[int, float]]:
    """Median milliseconds of a step, by name and number of rows."""
    found: dict[str, dict[int, float]] = {system.name: {} for system in systems}
    for count in rows:
        narrow, wide = torch.randn(count, HIDDEN), torch.randn(count, INNER)
        seen: dict[str, list[float]] = {system.name: [] for system in systems}
        repeats = max(1, 8 // count)  # of short steps more
        for turn in range(rounds + 1):
            for system in systems:
                time.sleep(REST_S)
                system.step(narrow, wide)
                for _ in range(repeats):
                    began = time.perf_counter()
                    system.step(narrow, wide)
                    if turn:  # the first is a warm-up
                        seen[system.name].append(1e3 * (time.perf_counter() - began))
        for name, values in seen.items():
            found[name][count] = statistics.median(values)
    return found


def _systems(layers: int) -> list[Callable[[Sequence[str] | None], System | None]]:
    """Makers of the systems: each gives None where its name is not wanted."""
    shapes = {
        "qkv": (QKV, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }

    def ours(name: str, form: Format, mode: Mode | None) -> Callable[[Sequence[str] | None], System | None]:
        def make(wanted: Sequence[str] | None) -> System | None:
            if wanted and name not in wanted:
                return None
            parts = {key: _random(form, *shape) for key, shape in shapes.items()}
            pairs: list[tuple[PackedMatrix, bool]] = []
            for _ in range(layers):
                pairs.append((PackedMatrix.pack([parts["qkv"]], mode=mode), False))
                pairs.append((PackedMatrix.pack([parts["o"]], mode=mode), False))
                pair = [parts["gate"], parts["up"]]
                pairs.append((PackedMatrix.pack(pair, paired=True, gate=Gate.SILU, mode=mode), False))
                pairs.append((PackedMatrix.pack([parts["down"]], mode=mode), True))
            pairs.append((PackedMatrix.pack([_random(form, VOCAB, HIDDEN)], mode=mode), False))
            return System(name, sum(matrix.num_bytes for matrix, _ in pairs), _step(pairs))

        return make

    def torchs(name: str, dtype: torch.dtype) -> Callable[[Sequence[str] | None], System | None]:
        def make(wanted: Sequence[str] | None) -> System | None:
            if wanted and name not in wanted:
                return None
            stacked = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)] * layers + [(VOCAB, HIDDEN)]
            pairs = [(linear([torch.randn(shape).to(dtype)]), shape[1] == INNER) for shape in stacked]
            run = _step(pairs)
            size = sum(out * inputs for out, inputs in stacked) * dtype.itemsize
            return System(name, size, lambda narrow, wide: run(narrow.to(dtype), wide.to(dtype)))

        return make

    return [
        ours("q8", Format.Q8, None),
        ours("q4", Format.Q4, None),
        ours("q4k", Format.Q4K, None),
        ours("q5", Format.Q5, None),
        ours("q6k", Format.Q6K, None),
        ours("bf16", Format.BF16, None),
        ours("f32", Format.F32, None),
        torchs("torch bf16", torch.bfloat16),
        torchs("torch fp32", torch.float32),
    ]


def _step(products: Sequence[tuple[Callable[[Tensor], Tensor], bool]]) -> Step:
    """Each product once; True: of the wide rows."""

    def step(narrow: Tensor, wide: Tensor) -> None:
        for product, is_wide in products:
            product(wide if is_wide else narrow)

    return step


def _random(form: Format, out: int, inputs: int) -> Tensor | QuantizedTensor:
    """A matrix of random values."""
    if not form.is_quantized:
        return torch.randn(out, inputs).to(torch.float32 if form is Format.F32 else torch.bfloat16)
    scales = (torch.rand(out, inputs // form.group) * 0.01).to(form.scale_dtype)
    if form.has_mins:
        codes = torch.randint(0, 256, (out, inputs // 2), dtype=torch.uint8)
        return QuantizedTensor(form, (out, inputs), codes, scales, -8 * scales)
    largest = {Format.Q5: 16, Format.Q6K: 32}.get(form, 127)
    codes = torch.randint(-largest, largest, (out, inputs), dtype=torch.int8)
    return QuantizedTensor(form, (out, inputs), codes, scales)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    main()
