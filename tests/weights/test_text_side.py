"""L08: every EOS id counts, a missing template is no error, a missing tokenizer is one; defaults come along. No torch needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ModelError
from slipstream.weights import load_text
from tests.tiny_checkpoints import byte_tokenizer, edit_json, save, tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama"), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy without the weights, which the text side must not need."""
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def generation(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def test_what_comes_along(folder: Path) -> None:
    text = load_text(str(folder))
    assert text.tokenizer.encode("<|im_start|>hell") == [1, *text.tokenizer.encode("hell")]
    assert text.tokenizer.special_ids == {0, 1, 2}
    assert (text.tokenizer.bos_token_id, text.tokenizer.eos_token_id, text.bos_token_id) == (1, 2, 1)
    assert (text.architecture, text.context_len, text.vocab_size) == ("llama", 256, 320)
    assert text.tokenizer.vocab_size == 261
    assert text.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("config", "listed", "eos"),
    [(2, [2, 5], {2, 5}), (2, None, {2}), ([2, 7], 5, {2, 5, 7}), (None, [5], {2, 5}), (None, None, {2}), (0, 0, {0, 2})],
)
def test_eos_is_the_union_of_all_places(folder: Path, config: object, listed: object, eos: set[int]) -> None:
    edit_json(folder / "config.json", eos_token_id=config)
    generation(folder, eos_token_id=listed)
    ids = load_text(str(folder)).eos_token_ids
    assert set(ids) == eos
    assert len(ids) == len(eos)


def test_no_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    text = load_text(str(folder))
    assert text.eos_token_ids == (2,)
    assert text.generation_defaults == {}


@pytest.mark.parametrize(
    ("values", "defaults"),
    [
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True, "max_length": 5},
         {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"top_k": None}, {}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
    ],
)  # fmt: skip
def test_sampling_defaults(folder: Path, values: dict[str, Any], defaults: dict[str, float]) -> None:
    generation(folder, **values)
    assert load_text(str(folder)).generation_defaults == defaults


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 2.0}, {"top_k": 1.5}, {"temperature": True}])
def test_nonsense_in_the_generation_config_is_named(folder: Path, values: dict[str, Any]) -> None:
    generation(folder, **values)
    with pytest.raises(ModelError, match=f"generation_config.json: {next(iter(values))}"):
        load_text(str(folder))


def test_no_template(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    assert load_text(str(folder)).chat_template is None


def test_a_template_of_its_own_file_counts_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("own")
    assert load_text(str(folder)).chat_template == "own"


def test_several_named_templates(folder: Path) -> None:
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert load_text(str(folder)).chat_template == "d"


def test_no_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    text = load_text(str(folder))
    assert (text.chat_template, text.bos_token_id, text.tokenizer.bos_token_id) == (None, 1, 1)
    assert text.eos_token_ids == (2,)


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json must be in the model's folder"):
        load_text(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "", "\x00"])
def test_a_damaged_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=name):
        load_text(str(folder))


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    edit_json(folder / "config.json", vocab_size=100)
    with pytest.raises(ModelError, match="the tokenizer must have at most the model's 100 ids, but got 261"):
        load_text(str(folder))


def test_truncation_and_padding_of_the_file_are_off(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(load_text(str(folder)).tokenizer.encode("abcdefgh")) == 8


def test_ids_the_tokenizer_does_not_know_have_no_text(folder: Path) -> None:
    tokenizer = load_text(str(folder)).tokenizer
    assert tokenizer.token_text(300) == ""
    assert tokenizer.token_bytes(300) == b""
    ids = tokenizer.encode("he")
    assert tokenizer.decode([*ids, 300, *ids], skip_special_tokens=True) == "hehe"


def test_special_tokens_in_decoding(folder: Path) -> None:
    tokenizer = load_text(str(folder)).tokenizer
    ids = [1, *tokenizer.encode("a"), 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


@pytest.mark.parametrize("name", ["no/such/folder", "nothing.gguf", "some-alias", "", "./x"])
def test_a_name_that_leads_nowhere(name: str) -> None:
    with pytest.raises(ModelError, match=r"smollm2-135m, qwen2\.5-coder-0\.5b"):
        load_text(name)


def test_a_file_that_is_no_gguf(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"must end in \.gguf, but got 'config.json'"):
        load_text(str(folder / "config.json"))


def test_the_text_side_imports_no_torch(folder: Path) -> None:
    code = "import sys; from slipstream.weights import load_text; load_text(sys.argv[1]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0
