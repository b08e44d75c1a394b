"""docs/adding-a-model.md is true: its example is a model file that works, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import torch
import transformers

from slipstream.models.config import parse_config
from slipstream.models.parameters import Holding, Parameters
from slipstream.models.registry import ModelType
from slipstream.weights.safetensors_files import SafetensorsFolder
from slipstream.weights.tokenizer_files import read_json
from tests.models.test_transformers_fallback import TYPES
from tests.paged import logits_in_chunks
from tests.tiny_checkpoints import VOCAB, reference_logits, save

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-model.md").read_text()


def test_the_example_is_a_model_file(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    module = ModuleType("gemma")
    exec(compile(source, "docs/adding-a-model.md", "exec"), module.__dict__)
    assert isinstance(module.MODEL, ModelType)
    torch.manual_seed(0)
    config = transformers.GemmaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
    )
    reference = transformers.GemmaForCausalLM(config).eval().double()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0, 0.15)
    folder, ids = save(reference, tmp_path), torch.arange(3, 43)
    parameters = Parameters(SafetensorsFolder(folder), Holding.plain(torch.float64), torch.device("cpu"))
    ours = module.MODEL.build(parse_config(read_json(folder / "config.json"), "config.json"), parameters)
    parameters.finish()
    # Its embeddings are scaled by a number that has been through float32.
    torch.testing.assert_close(logits_in_chunks(ours, ids, (20,)), reference_logits(reference, ids), rtol=0, atol=1e-6)


def test_what_it_names_exists() -> None:
    for name in re.findall(r"`((?:models|attention|weights|testing|tests)/[\w/]+\.py)", PAGE):
        assert (ROOT / name).is_file() or (ROOT / "src" / "slipstream" / name).is_file(), name
    for name in re.findall(r"`(test_\w+\.py)`", PAGE):
        assert (ROOT / "tests" / "models" / name).is_file(), name


def test_it_lists_what_the_tests_run() -> None:
    listed = re.search(r"Tested against `transformers`: (.*?)\.", PAGE, re.DOTALL)
    assert listed is not None and listed[1].replace("\n", " ").split(", ") == sorted(TYPES)
