"""Describe a model, from its configuration, tokenizer and file headers; no weights are loaded. It must have been fetched."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.flags import add_model_argument, config_from
from slipstream.cli.table import columns, count_text, size_text
from slipstream.errors import ModelError

if TYPE_CHECKING:
    from slipstream.config import EngineConfig
    from slipstream.models.config import CheckpointConfig
    from slipstream.weights.held import Held, StoredTensor
    from slipstream.weights.text_side import Checkpoint

EXAMPLE = "slipstream show smollm2-135m"

_COMPUTE_BYTES = {"float32": 4, "bfloat16": 2}  # of a weight, and of a key or value, in the dtypes models run in
_DERIVED = ("rotary_emb.inv_freq", "rope_freqs.weight")  # tables, no parameters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings [SLIPSTREAM_CONFIG]")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from slipstream.weights.source import locate
    from slipstream.weights.text_side import open_checkpoint

    config = config_from(args, model=args.name)
    name = config.model
    source = locate(name)
    if source is None:
        raise ModelError(f"{name} must have been fetched, but it is not in the cache", hint=f"slipstream pull {name}")
    checkpoint = open_checkpoint(source)
    facts = describe(checkpoint)
    runs = how_it_runs(checkpoint, config, build=False)
    facts["runs"] = {
        "dtype": runs.dtype,
        "held_as": runs.formats,
        "weight_bytes": runs.weight_bytes,
        "cpu_kernels": runs.why_torch is None,
        "why_torch": runs.why_torch,
    }
    print(json.dumps(facts, indent=2) if args.json else _lines(facts))
    return 0


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is known of a checkpoint, as JSON."""
    config, text, path = checkpoint.config, checkpoint.text, checkpoint.source.path
    elements: Counter[str] = Counter()
    for tensor in stored_tensors(checkpoint):
        elements[tensor.stored] += tensor.num_elements
    num_parameters = sum(elements.values())
    shape = _shape(config)
    kv_elements = 2 * shape["num_layers"] * shape["num_kv_heads"] * shape["head_dim"] if shape else None
    files = [path] if checkpoint.gguf else sorted(one for one in path.iterdir() if one.is_file())
    return {
        "name": text.name,
        "architecture": text.architecture,
        "num_parameters": num_parameters,
        "stored_as": dict(elements.most_common()),
        "context_len": text.context_len,
        "vocab_size": text.vocab_size,
        **shape,
        "has_chat_template": text.chat_template is not None,
        "eos_tokens": {str(one): text.tokenizer.token_text(one) for one in text.eos_token_ids},
        "sampling_defaults": dict(text.generation_defaults),
        "license": _license(checkpoint),
        "path": str(path),
        "files": {one.name: one.stat().st_size for one in files},
        "memory_bytes": {
            dtype: _memory(num_parameters * size, kv_elements and kv_elements * size, text.context_len)
            for dtype, size in _COMPUTE_BYTES.items()
        },
    }


def _shape(config: CheckpointConfig) -> dict[str, int]:
    """Sizes of the decoder; empty where the configuration is one that only `transformers` can read."""
    from slipstream.models.config import ModelConfig

    if not isinstance(config, ModelConfig):
        return {}
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
    return {name: getattr(config, name) for name in names}


def _memory(weight_bytes: int, kv_token_bytes: int | None, context_len: int) -> dict[str, int]:
    if kv_token_bytes is None:
        return {"weights": weight_bytes}
    return {"weights": weight_bytes, "kv_per_token": kv_token_bytes, "kv_full_context": kv_token_bytes * context_len}


def how_it_runs(checkpoint: Checkpoint, config: EngineConfig, *, build: bool) -> Held:
    """What its matrices will be held in with these settings, and what multiplies them. `build`: see `why_not_kernels`."""
    from slipstream.models.config import ModelConfig
    from slipstream.weights.held import dtype_name, held
    from slipstream.weights.loaded import Numbers

    device = "cpu" if config.device == "auto" else config.device
    dtype = dtype_name(config.dtype, checkpoint.config.dtype, device)
    numbers = Numbers(config.dtype, config.quantization, config.cpu_kernels, config.kv_cache_dtype)
    is_ours = isinstance(checkpoint.config, ModelConfig)
    return held(stored_tensors(checkpoint), numbers, dtype, device, is_ours=is_ours, build=build)


def stored_tensors(checkpoint: Checkpoint) -> list[StoredTensor]:
    """Its parameters, from the headers of its files."""
    from slipstream.weights.held import StoredTensor

    if checkpoint.gguf is not None:
        found = [StoredTensor(name, one.kind.name, one.shape) for name, one in checkpoint.gguf.tensors.items()]
        return [tensor for tensor in found if not tensor.name.endswith(_DERIVED)]
    from safetensors import SafetensorError, safe_open

    found = []
    for file in _weight_files(checkpoint.source.path):
        try:
            with safe_open(str(file), framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    part = tensors.get_slice(name)
                    found.append(StoredTensor(name, part.get_dtype(), tuple(part.get_shape())))
        except SafetensorError as error:
            raise ModelError(
                f"{file.name} must be a whole safetensors file, but got: {error}", hint="it is cut or damaged; fetch it again"
            ) from None
    return [tensor for tensor in found if not tensor.name.endswith(_DERIVED)]


def _weight_files(folder: Path) -> list[Path]:
    """Those that loading would read."""
    from slipstream.weights.tokenizer_files import read_json

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(read_json(index).get("weight_map", {}).values())
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise ModelError(f"{missing[0]} must be in the model's folder ({index.name} names it), but it is missing")
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError("the model's folder must hold *.safetensors, but there are none")
    return files


def _license(checkpoint: Checkpoint) -> str | None:
    """Of the file itself, or of the model card beside it; None where neither says."""
    if checkpoint.gguf is not None:
        named = checkpoint.gguf.metadata.get("general.license")
        return named if isinstance(named, str) else None
    card = checkpoint.source.path / "README.md"
    if not card.is_file():
        return None
    header = re.match(r"---\n(.*?)\n---", card.read_text("utf-8", errors="replace"), re.DOTALL)
    line = re.search(r"^license:\s*([^\s#]+)", header.group(1), re.MULTILINE) if header else None
    return line.group(1).strip("'\"") if line else None


def shares(counts: Mapping[str, int]) -> str:
    """`q4 79%, q8 21%`."""
    total = sum(counts.values()) or 1
    return ", ".join(f"{kind} {_percent(count / total)}" for kind, count in counts.items())


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "below 1%"


def _lines(facts: Mapping[str, Any]) -> str:
    runs = facts["runs"]
    rows = [
        ["model", facts["name"]],
        ["architecture", facts["architecture"]],
        ["parameters", count_text(facts["num_parameters"])],
        ["stored as", shares(facts["stored_as"])],
        ["context", f"{facts['context_len']} tokens"],
        ["vocabulary", f"{facts['vocab_size']} tokens"],
        *_shape_lines(facts),
        ["chat template", "yes" if facts["has_chat_template"] else "no"],
        ["ends with", ", ".join(f"{text} ({token})" for token, text in facts["eos_tokens"].items()) or "nothing"],
        ["sampling", ", ".join(f"{name} {value:g}" for name, value in facts["sampling_defaults"].items()) or "no defaults"],
        ["license", facts["license"] or "not said"],
        ["path", facts["path"]],
        *(["file", f"{name}, {size_text(size)}"] for name, size in facts["files"].items()),
    ]
    for dtype, need in facts["memory_bytes"].items():
        line = f"{size_text(need['weights'])} of weights"
        if "kv_per_token" in need:
            token, full = size_text(need["kv_per_token"]), size_text(need["kv_full_context"])
            line += f", {token} of KV cache a token, {full} for a full context"
        rows.append([f"in {dtype}", line])
    rows.append(["held as", f"{shares(runs['held_as'])}: {size_text(runs['weight_bytes'])} of weights"])
    rows.append(["multiplied by", f"torch: {runs['why_torch']}" if runs["why_torch"] else "our CPU kernels"])
    return columns(rows)


def _shape_lines(facts: Mapping[str, Any]) -> list[list[str]]:
    if "num_layers" not in facts:
        return [["runs with", "transformers, over our pages"]]
    return [
        ["layers", f"{facts['num_layers']} of width {facts['hidden_size']}"],
        ["heads", f"{facts['num_heads']}, with {facts['num_kv_heads']} of keys and values, of width {facts['head_dim']}"],
    ]
