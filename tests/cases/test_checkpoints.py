"""Reported failures of loading, as tests from the file to the answer: BOS and EOS in all places, half types that overflow."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from slipstream.llm import LLM
from slipstream.models.base import CausalLM
from slipstream.types import FinishReason, SamplingParams
from slipstream.weights import load
from tests.cases.stage import FAVOUR, WITH_OFF, greedy
from tests.engine.harness import Job, assert_equal, reference, run
from tests.gguf_checkpoints import write
from tests.tiny_checkpoints import edit_json, save, tiny

BOS = 1  # of the tiny checkpoints

# L06


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_l06_a_gguf_chat_has_one_bos(writes: bool, adds: bool, tmp_path: Path) -> None:
    """Whether the tokenizer adds it, the template writes it, or both do: there is one, and usage counts it once."""
    template = "{{ bos_token }}" * writes + "{% for m in messages %}{{ m.content }}{% endfor %}"
    metadata = {"tokenizer.chat_template": template, "tokenizer.ggml.add_bos_token": adds}
    path = write(tiny("llama", hidden_size=64, num_attention_heads=4), tmp_path / "m.gguf", metadata=metadata)
    with LLM(str(path), num_threads=1) as llm:
        (output,) = llm.chat([{"role": "user", "content": "abc"}], greedy(3), use_tqdm=False)
    assert output.prompt_token_ids[: len(output.prompt_token_ids) - 3] == [BOS] * (adds or writes)
    assert output.prompt_token_ids.count(BOS) == (adds or writes)


@pytest.mark.parametrize("eos", [2, 7, 0])
def test_l06_each_eos_of_a_gguf_file_ends_an_answer(eos: int, tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 7}
    path = write(tiny("llama", hidden_size=64, num_attention_heads=4), tmp_path / "m.gguf", metadata=metadata)
    assert_ends_on(path, eos)


def assert_ends_on(path: Path, eos: int) -> None:
    """That the id ends an answer as its second token, by itself, and not where it is ignored; and that another id does not."""
    with LLM(str(path), num_threads=1) as llm:
        for token, ends in ((eos, True), (100, False)):
            params = greedy(8, logit_bias={token: FAVOUR}, min_tokens=int(ends))
            ignoring = greedy(8, logit_bias={token: FAVOUR}, ignore_eos=True)
            ended, ignored = (llm.generate("abc", each, use_tqdm=False)[0].outputs[0] for each in (params, ignoring))
            assert ended.finish_reason == ("stop" if ends else "length") and ended.stop_reason is None
            assert ended.token_ids[1:] == [token] * (1 if ends else 7)
            assert ignored.token_ids == [token] * 8 and ignored.finish_reason == "length"


# L07


@cache
def overflowing(dtype: str) -> CausalLM:
    """A tiny bfloat16 model in which token 13 alone makes an activation of more than 65,504."""
    model = tiny("llama", dtype=torch.bfloat16)
    layer, column = model.model.layers[0], 5
    with torch.no_grad():
        model.model.embed_tokens.weight[:, column] = 0
        model.model.embed_tokens.weight[13, column] = 30
        layer.self_attn.o_proj.weight[column] = 0  # nor does attention bring it to another token
        for matrix in (layer.mlp.gate_proj, layer.mlp.up_proj):
            matrix.weight[:, column] = 200
    with TemporaryDirectory() as folder:
        return load(str(save(model, Path(folder))), dtype=dtype).model


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("mode", WITH_OFF)
def test_l07_what_overflows_in_float16_fails_alone(mode: str, lag: int, heat: float) -> None:
    """An error of its own instead of token 0 to the limit; the request beside it is as if alone."""
    params = SamplingParams(temperature=heat, max_tokens=12, allowed_token_ids=tuple(range(20, 120)))
    jobs = [Job((5, 9, 40), params, seed=1), Job((5, 13, 40), params, seed=2), Job((5, 9, 13), params, seed=3)]
    got = run(overflowing("float16"), jobs, lag=lag, eos=(), drafters={mode: WITH_OFF[mode](3)})
    for sick in got[1:]:
        assert sick.finish_reason is FinishReason.ERROR and sick.terminal_events == 1 and not sick.token_ids
        assert sick.error is not None and sick.error[0] == "NonFiniteLogits"
    assert_equal(got[:1], reference(overflowing("float16"), jobs[:1], eos=()), (mode, lag, heat))
    assert len(got[0].token_ids) == 12


def test_l07_in_its_own_type_it_answers() -> None:
    params = greedy(12, allowed_token_ids=tuple(range(20, 120)))
    (got,) = run(overflowing("bfloat16"), [Job((5, 13, 40), params)], eos=())
    assert got.error is None and len(got.token_ids) == 12


# L08


@pytest.mark.parametrize("listed", [[2, 5], 5, None])
@pytest.mark.parametrize("eos", [2, 5])
def test_l08_each_id_of_the_generation_config_ends_an_answer(eos: int, listed: list[int] | int | None, tmp_path: Path) -> None:
    """The tokenizer knows 2; the generation config lists 5 as well; without one, 5 is a token like any other."""
    folder = save(tiny("llama"), tmp_path)
    edit_json(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if listed is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    if eos == 2 or listed is not None:
        assert_ends_on(folder, eos)
    else:
        with LLM(str(folder), num_threads=1) as llm:
            (output,) = llm.generate(["abc"], greedy(8, logit_bias={eos: FAVOUR}), use_tqdm=False)
        assert output.outputs[0].token_ids == [eos] * 8 and output.outputs[0].finish_reason == "length"
