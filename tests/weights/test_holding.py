"""What matrices are held in: by setting and file, with kernels and without; that `show` foretells it; and the memory it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.cli.show import stored_tensors
from slipstream.errors import ModelError
from slipstream.kernels.cpu.matrix import PackedMatrix
from slipstream.kernels.formats import Format
from slipstream.layers.decoder import Decoder
from slipstream.layers.embedding import ROWS_AT_A_TIME, Embedding
from slipstream.layers.linear import PackedLinear
from slipstream.weights import LoadedModel, load
from slipstream.weights.held import held
from slipstream.weights.loaded import Numbers
from slipstream.weights.quantize import quantize
from slipstream.weights.source import resolve
from slipstream.weights.text_side import open_checkpoint
from tests.cpu_kernels import NEEDS_KERNELS, needed
from tests.gguf_checkpoints import write
from tests.paged import logits_in_chunks
from tests.real_models import smollm2
from tests.tiny_checkpoints import reference_logits, save, tiny

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.tensor([5, 9, 200, 3, 77, 1, 250])
# Every matrix in another format than its neighbours: what is one product elsewhere is several here.
MIXED = {
    "attn_q": Kind.Q4_0, "attn_k": Kind.Q8_0, "attn_v": Kind.Q4_1, "ffn_gate": Kind.Q5_0, "ffn_up": Kind.Q8_0,
    "ffn_down": Kind.Q4_1, "output": Kind.Q8_0, "token_embd": Kind.Q5_0, "attn_output": Kind.F16,
}  # fmt: skip

def logits(loaded: LoadedModel, tokens: Tensor = TOKENS) -> Tensor:
    return logits_in_chunks(loaded.model, tokens, (4,) if len(tokens) < 10 else (len(tokens),), page_size=4)


def divergence(got: Tensor, expected: Tensor) -> float:
    """Mean KL of the distributions over the vocabulary."""
    q, p = got.double().log_softmax(-1), expected.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A GGUF file of all kinds, and the logits of its values."""
    reference = tiny("llama", **SHAPE)
    path = write(reference, tmp_path_factory.mktemp("mixed") / "m.gguf", kinds=MIXED)
    return path, reference_logits(reference, TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama", **SHAPE), tmp_path_factory.mktemp("folder"))


# -- without kernels ----------------------------------------------------------------------------------------------------


def test_without_kernels_nothing_is_kept_and_nothing_differs(mixed: tuple[Path, Tensor]) -> None:
    path, expected = mixed
    plain = load(str(path))
    assert set(plain.formats) == {"float32"} and plain.arithmetic == "torch"
    assert isinstance(plain.model, Decoder) and isinstance(plain.model.head, PackedLinear)
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-4)


def test_masked_kernels_leave_the_engine_as_it_was(
    mixed: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` where the kernels cannot run: the same bits as `off`."""
    path, _ = mixed
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", "none")
    caplog.set_level("INFO")
    for dtype in ("float32", "bfloat16"):
        masked, off = load(str(path), dtype=dtype, cpu_kernels="auto"), load(str(path), dtype=dtype, cpu_kernels="off")
        assert masked.arithmetic == "torch" and masked.formats == off.formats
        assert masked.model.kv_layers == off.model.kv_layers and masked.model.dtype == off.model.dtype
        assert torch.equal(logits(masked), logits(off))
    assert [record.message for record in caplog.records] == ["torch multiplies, not the CPU kernels"] * 2


@pytest.mark.parametrize("form", [Format.Q8, Format.Q4])
def test_quantised_on_loading_without_kernels(form: Format, folder: Path, tmp_path: Path) -> None:
    """The same as a checkpoint of the values that the quantised matrices have."""
    tensors = load_file(folder / "model.safetensors")
    model = tiny("llama", **SHAPE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                wanted = Format.Q8 if name in ("model.embed_tokens.weight", "lm_head.weight") else form
                parameter.copy_(quantize(tensors[name], wanted).dequantize())
    expected = reference_logits(model, TOKENS)
    loaded = load(str(folder), quantization=str(form))
    assert set(loaded.formats) == {"float32", "q8", str(form)}
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(logits(load(str(folder))), expected, rtol=0, atol=1e-3)


def test_a_stored_matrix_in_the_wanted_format_is_not_made_again(tmp_path: Path) -> None:
    reference = tiny("llama", **SHAPE)
    path = write(reference, tmp_path / "m.gguf", kind=Kind.Q4_1, kinds={"token_embd": Kind.Q8_0, "output": Kind.Q8_0})
    torch.testing.assert_close(
        logits(load(str(path), quantization="q4")), reference_logits(reference, TOKENS), rtol=0, atol=1e-4
    )


def test_rows_that_are_no_whole_groups_stay_plain(tmp_path: Path) -> None:
    """48 wide: only the products back from 80 or 96 could be, and 80 is none."""
    folder = save(tiny("llama", intermediate_size=96), tmp_path)
    loaded = load(str(folder), quantization="q8")
    assert loaded.formats["q8"] == 3 * 48 * 96
    assert sum(loaded.formats.values()) == loaded.num_parameters


def test_another_dtype_of_keys_and_values(folder: Path) -> None:
    for name in ("float32", "bfloat16", "int8"):
        loaded = load(str(folder), kv_cache_dtype=name)
        assert {layer.dtype for layer in loaded.model.kv_layers} == {getattr(torch, name)}
        assert loaded.model.dtype == torch.float32
        assert divergence(logits(loaded), logits(load(str(folder)))) < {"float32": 1e-12, "bfloat16": 1e-3, "int8": 1e-2}[name]


@pytest.mark.parametrize(("setting", "message"), [
    ({"quantization": "q8"}, "--quantization must be auto or none"),
    ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype must be auto"),
])  # fmt: skip
def test_models_of_transformers_are_plain(setting: dict[str, str], message: str, tmp_path: Path) -> None:
    import transformers

    config = transformers.Olmo2Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    folder = save(transformers.Olmo2ForCausalLM(config).eval(), tmp_path)
    with pytest.raises(ModelError, match=message):
        load(str(folder), **setting)


# -- with kernels -------------------------------------------------------------------------------------------------------


@NEEDS_KERNELS
def test_a_file_of_all_formats_is_kept_as_it_is(mixed: tuple[Path, Tensor]) -> None:
    path, expected = mixed
    exact = load(str(path), cpu_kernels="exact")
    assert set(exact.formats) == {"q4", "q5", "q8", "float32"}
    assert exact.weight_bytes < load(str(path)).weight_bytes / 3
    torch.testing.assert_close(logits(exact), expected, rtol=0, atol=1e-4)
    # Activations in 8 bits, a scale for each 32: a step of 1/127 of the largest, over the few layers there are.
    rounded = load(str(path), cpu_kernels="auto")
    assert rounded.formats == exact.formats and rounded.arithmetic == "kernels"
    assert 0 < divergence(logits(rounded), expected) < 0.02


@NEEDS_KERNELS
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3"])
@pytest.mark.parametrize("quantization", ["auto", "q8", "q4"])
def test_every_shape_of_model(family: str, quantization: str, tmp_path: Path) -> None:
    """Biases, fused products, head norms, scaled embeddings, tied heads; held as torch holds it for comparing."""
    overrides = {**SHAPE, "tie_word_embeddings": family in ("qwen3", "gemma3_text")}
    folder = save(tiny(family, **overrides), tmp_path)
    exact = load(str(folder), quantization=quantization, cpu_kernels="exact")
    plain = load(str(folder), quantization=quantization)
    assert exact.arithmetic == "exact" and exact.formats == plain.formats
    torch.testing.assert_close(logits(exact), logits(plain), rtol=0, atol=2e-4)


@NEEDS_KERNELS
def test_bfloat16_weights_with_float32_states(folder: Path) -> None:
    loaded = load(str(folder), dtype="bfloat16", cpu_kernels="auto")
    assert loaded.model.dtype == torch.float32 and loaded.model.kv_layers[0].dtype == torch.bfloat16
    assert loaded.formats["bfloat16"] > 0.99 * loaded.num_parameters
    values = load(str(folder), dtype="bfloat16", cpu_kernels="exact", kv_cache_dtype="float32")
    assert divergence(logits(loaded), logits(values)) < 1e-3


@NEEDS_KERNELS
def test_none_dequantises_a_file(mixed: tuple[Path, Tensor]) -> None:
    path, expected = mixed
    loaded = load(str(path), cpu_kernels="auto", quantization="none")
    assert set(loaded.formats) == {"float32"} and loaded.arithmetic == "kernels"
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-4)


@NEEDS_KERNELS
def test_loading_leaves_torch_its_threads(folder: Path, tmp_path: Path) -> None:
    """It packs with one, and a load that fails gives the others back too."""
    threads, broken = torch.get_num_threads(), save(tiny("llama", **SHAPE), tmp_path)
    tensors = load_file(broken / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != "model.norm.weight"}, broken / "model.safetensors")
    torch.set_num_threads(2)
    try:
        load(str(folder), cpu_kernels="auto")
        assert torch.get_num_threads() == 2
        with pytest.raises(ModelError, match=r"must hold model\.norm"):
            load(str(broken), cpu_kernels="auto")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


# -- what `show` says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("cpu_kernels", ["auto", "off"])
@pytest.mark.parametrize("quantization", ["auto", "none", "q8", "q4"])
@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_what_is_foretold_is_what_is_loaded(
    kind: str, quantization: str, cpu_kernels: str, dtype: str, mixed: tuple[Path, Tensor], folder: Path
) -> None:
    path = mixed[0] if kind == "gguf" else folder
    loaded = load(str(path), dtype=dtype, quantization=quantization, cpu_kernels=cpu_kernels)
    tensors = stored_tensors(open_checkpoint(resolve(str(path))))
    numbers = Numbers(dtype, quantization, cpu_kernels)
    told = held(tensors, numbers, dtype, "cpu", is_ours=True, build=False)
    assert told.formats == dict(loaded.formats)
    assert told.weight_bytes == loaded.weight_bytes
    assert (told.why_torch is None) == (loaded.arithmetic != "torch")


# -- embeddings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [64, 2 * ROWS_AT_A_TIME + 70])
def test_an_embedding_that_is_packed_for_the_head_is_the_same_table(rows: int) -> None:
    needed()
    table = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))
    packed, plain = Embedding(PackedMatrix.pack([table]), 3.3), Embedding(table, 3.3)
    tokens = torch.tensor([rows - 1, 0, 5, 5])
    assert torch.equal(packed(tokens), plain(tokens))
    assert packed.holds(table) and plain.holds(table)
    for row in (0, rows // 2, rows - 1):
        other = table.clone()
        other[row, 31] += 1
        assert not packed.holds(other) and not plain.holds(other)


def test_an_embedding_looks_rows_up_in_a_quantised_table() -> None:
    table = quantize(torch.randn(50, 64, generator=torch.Generator().manual_seed(1)), Format.Q8)
    tokens = torch.tensor([49, 0, 7, 7])
    ours, plain = Embedding(table, 3.3), Embedding(table.dequantize(), 3.3)
    assert (ours.dtype, ours.hidden_size, ours.device) == (torch.float32, 64, torch.device("cpu"))
    assert torch.equal(ours(tokens), plain(tokens))
    assert ours(tokens[:0]).shape == (0, 64)
    half = Embedding(table, dtype=torch.bfloat16)
    assert torch.equal(half(tokens), table.dequantize(torch.bfloat16)[tokens])


def test_a_bfloat16_table_gives_rows_in_the_states_dtype() -> None:
    table = torch.randn(50, 64).to(torch.bfloat16)
    assert torch.equal(Embedding(table, dtype=torch.float32)(torch.tensor([3])), table[3:4].to(torch.float32))


# -- memory -------------------------------------------------------------------------------------------------------------

# Prints what a process holds more than before: file pages and its own, and at most its own, in bytes.
MEASURE = """
import os, sys, threading, time
import torch
from slipstream.weights.loading import load

assert load  # whatever loading imports is there before

def own(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

torch.set_num_threads(1)
{warm}
before = own("VmRSS")
highest, done = 0, threading.Event()
def watch():
    global highest
    while not done.wait(0.001):
        highest = max(highest, own("VmRSS"))
thread = threading.Thread(target=watch)
thread.start()
{measured}
done.set()
thread.join()
print(own("VmRSS") - before, highest - before)
"""


def measured(warm: str, code: str) -> tuple[int, int]:
    """Resident bytes, at the end and at most, that `code` adds in a process of its own."""
    script = MEASURE.format(warm=warm, measured=code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    end, most = done.stdout.split()
    return int(end), int(most)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_reading_a_file_does_not_hold_it_besides(tmp_path: Path) -> None:
    """24 tensors of 4 MiB, kept as they are: resident are they and one more, not the file's pages too."""
    size, count = 4 << 20, 24
    save_file({f"t{number:02d}": torch.full((1024, 1024), float(number)) for number in range(count)}, tmp_path / "m.safetensors")
    setup = f"""
from pathlib import Path
from slipstream.weights.safetensors_files import SafetensorsFolder
source = SafetensorsFolder(Path({str(tmp_path)!r}))
"""
    code = f'kept = [source.read(f"t{{n:02d}}", torch.float32) for n in range({count})]'
    end, most = measured(setup, code)
    assert size * count * 0.9 < end < size * (count + 3), f"{end / size:.1f} tensors"
    assert most < size * (count + 4), f"{most / size:.1f} tensors at most"
    # What is read and dropped leaves nothing, although the file stays open.
    end, most = measured(setup, f'for n in range({count}): source.read(f"t{{n:02d}}", torch.bfloat16)')
    assert most < size * 5, f"{most / size:.1f} tensors at most"


# -- the real model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dequantised() -> tuple[Tensor, Tensor]:
    """Tokens of a text, and SmolLM2's logits by torch from dequantised weights."""
    loaded = load(str(smollm2()))
    text = "The kettle clicked off. She poured the water over the leaves, waited three minutes, and read the letter again. " * 2
    tokens = torch.tensor(loaded.tokenizer.encode(text))
    return tokens, logits(loaded, tokens)


@NEEDS_KERNELS
@pytest.mark.real_model
def test_smollm2_in_its_own_format(dequantised: tuple[Tensor, Tensor]) -> None:
    tokens, expected = dequantised
    exact = load(str(smollm2()), cpu_kernels="exact")
    assert exact.formats == {"q4": 106_168_320, "q8": 28_311_552, "float32": 35_136}
    assert exact.weight_bytes == 106_168_320 * 5 // 8 + 28_311_552 * 17 // 16 + 35_136 * 4
    assert exact.num_parameters == 134_515_008
    torch.testing.assert_close(logits(exact, tokens), expected, rtol=0, atol=2e-3)
    assert divergence(logits(exact, tokens), expected) < 1e-6
    # Only activations are rounded; the bound is that of the default format.
    rounded = load(str(smollm2()), cpu_kernels="auto")
    assert 0 < divergence(logits(rounded, tokens), expected) < 0.01


@NEEDS_KERNELS
@pytest.mark.real_model
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_smollm2_takes_the_memory_of_its_format() -> None:
    """Packed weights, the embedding among them, 98 MB; not the file, and not its values in float32 (538 MB)."""
    warm = "from slipstream.kernels.cpu.library import kernels; kernels()"
    end, most = measured(warm, f'kept = load({str(smollm2())!r}, cpu_kernels="auto")')
    assert end < 240e6 and most < 280e6, f"{end / 1e6:.0f} MB, {most / 1e6:.0f} MB at most"
