"""Architectures without a file of their own: logits and answers equal transformers'; what cannot run is refused by name."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from slipstream.errors import ModelError
from slipstream.models import transformers_fallback
from slipstream.models.config import parse_foreign
from slipstream.models.parameters import Holding, Parameters
from slipstream.models.transformers_fallback import TransformersModel
from slipstream.speculate.off import Off
from slipstream.testing import drafters as d
from slipstream.types import SamplingParams
from slipstream.weights import load, load_text
from slipstream.weights.safetensors_files import SafetensorsFolder
from slipstream.weights.tokenizer_files import read_json
from tests.engine.harness import DrafterFactory, Job, drain, make_engine, run
from tests.oracle import generate
from tests.paged import PagedSequence, logits_in_chunks, path_of, tree_logits
from tests.tiny_checkpoints import VOCAB, edit_json, reference_logits, save, tiny

IDS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(0))
# model_type -> what it has of its own: scales, parallel blocks, layer norms, interleaved or partial rope, softcaps and windows,
# learned positions, offsets of positions, tied heads, a head that is stored by another name.
TYPES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window": 5},
    "gemma2": {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "glm4": {"head_dim": 8},
    "gpt2": {},
    "gpt_neox": {"num_key_value_heads": 6},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3, "embedding_multiplier": 2.0},
    "olmo2": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 100.0}},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 48},
    "phi": {},
    "starcoder2": {"sliding_window": 9},
}
ENGINE_TYPES = ["gemma2", "granite", "olmo2", "starcoder2", "gpt2"]


def foreign(model_type: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model of the library's."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **TYPES.get(model_type, {}),
        **overrides,
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.15)
    return model.to(dtype)


@pytest.mark.parametrize("model_type", TYPES)
def test_logits_however_the_tokens_are_fed(model_type: str, tmp_path: Path) -> None:
    model = foreign(model_type)
    wanted = reference_logits(model, IDS)
    assert wanted.std() > 0.02, "the logits must differ"
    ours = load(str(save(model, tmp_path)), dtype="float32").model
    assert isinstance(ours, TransformersModel)
    for chunks in ((40,), (17, 9), ()):
        torch.testing.assert_close(logits_in_chunks(ours, IDS, chunks), wanted, rtol=0, atol=1e-4)
    parents, prompt, nodes = [0, 0, 1, 2, 2, 3, 4], IDS[:12], IDS[12:20]
    got = tree_logits(ours, prompt, nodes, parents)
    for node in range(8):
        path = torch.cat([prompt, nodes[path_of(node, parents)]])
        torch.testing.assert_close(got[node], reference_logits(model, path)[-1], rtol=0, atol=1e-4)


JOBS = [
    Job(tuple(IDS[:5].tolist()), SamplingParams(temperature=0.0, max_tokens=14)),
    Job(tuple(IDS.tolist()), SamplingParams(temperature=0.8, top_p=0.9, max_tokens=14), seed=5),
    Job(tuple(IDS[7:20].tolist()), SamplingParams(temperature=0.0, frequency_penalty=1.0, max_tokens=10)),
]
DRAFTERS: dict[str, DrafterFactory] = {"off": lambda target: Off(), "self_tree": d.self_tree(3), "rand_tree": d.rand_tree(7)}


@cache
def checkpoint(model_type: str, folder: Path) -> tuple[TransformersModel, list[list[int]]]:
    """The model over pages, and the library's own answers: the whole sequence once more for every token."""
    model = foreign(model_type, torch.float64)

    def logits(tokens: Sequence[int]) -> np.ndarray:
        return reference_logits(model, torch.tensor(tokens))[-1].numpy()

    answers = []
    for job in JOBS:
        params = {name: getattr(job.params, name) for name in ("temperature", "top_p", "frequency_penalty", "max_tokens")}
        answers.append(generate(logits, job.prompt, context_len=256, seed=job.seed, **params).token_ids)
    ours = load(str(save(model, folder)), dtype="float64").model
    assert isinstance(ours, TransformersModel)
    return ours, answers


@pytest.mark.parametrize("model_type", ENGINE_TYPES)
@pytest.mark.parametrize("lag, page_size, name", [(0, 16, "off"), (0, 1, "self_tree"), (1, 16, "self_tree"), (1, 1, "rand_tree")])
def test_answers_of_the_engine(
    model_type: str, lag: int, page_size: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, wanted = checkpoint(model_type, tmp_path_factory.getbasetemp() / f"fallback-{model_type}")
    got = run(model, JOBS, lag=lag, page_size=page_size, chunk=16, eos=(), drafters={name: DRAFTERS[name]})
    assert [answer.token_ids for answer in got] == wanted
    if name == "self_tree":
        assert sum(a.num_accepted for a in got) > 0.4 * sum(len(a.token_ids) for a in got), "SELF must be accepted"


def test_only_the_tokens_of_the_step_are_computed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wanted = checkpoint("olmo2", tmp_path_factory.getbasetemp() / "fallback-olmo2")

    def no_cache(*_: Any, **__: Any) -> None:
        raise AssertionError("the library's cache must not be made")

    monkeypatch.setattr(transformers.DynamicCache, "__init__", no_cache)
    engine = make_engine(model, chunk=16, eos=())
    computed: list[int] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: computed.append(args[0].shape[1]), with_kwargs=True)
        for layer in model._decoder.layers
    ]
    answers: dict[str, Any] = {}
    try:
        for number, job in enumerate(JOBS):
            engine.add(job.request(f"r{number}"))
        drain(engine, answers)
    finally:
        engine.close()
        for handle in handles:
            handle.remove()
    tokens = sum(len(job.prompt) + len(answer) - 1 for job, answer in zip(JOBS, wanted, strict=True))
    assert sum(computed) == tokens * model.num_layers


def test_taps_are_those_of_our_own_implementation(tmp_path: Path) -> None:
    folder = save(tiny("qwen3", dtype=torch.float64), tmp_path)
    ours = load(str(folder), dtype="float64").model
    parameters = Parameters(SafetensorsFolder(folder), Holding.plain(torch.float64), torch.device("cpu"))
    with torch.inference_mode():
        config = parse_foreign(read_json(folder / "config.json"), "config.json")
        theirs = transformers_fallback.build(config, parameters)
    parameters.finish()
    assert theirs.kv_layers == ours.kv_layers
    assert (theirs.hidden_size, theirs.num_layers, theirs.vocab_size) == (ours.hidden_size, ours.num_layers, ours.vocab_size)
    got, wanted = (PagedSequence(model, 9).feed(IDS[:9], taps=(3, 0, 2)) for model in (theirs, ours))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)  # their norms are float32's


def test_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(foreign("phi"), tmp_path)
    with caplog.at_level(logging.INFO, "slipstream"):
        load(str(folder))
    assert [record.getMessage() for record in caplog.records if record.name.startswith("slipstream")] == [
        "the model runs through transformers"
    ]


def test_the_text_side(tmp_path: Path) -> None:
    text = load_text(str(save(foreign("olmo2"), tmp_path)))
    assert (text.architecture, text.vocab_size, text.context_len, text.eos_token_ids) == ("olmo2", VOCAB, 512, (2,))


def test_transformers_is_imported_only_when_it_is_needed() -> None:
    script = "import sys, slipstream.engine.build, slipstream.models.transformers_fallback; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# What is refused.


def refused(folder: Path, match: str) -> ModelError:
    with pytest.raises(ModelError, match=match) as caught:
        load(str(folder))
    return caught.value


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"kv_lora_rank": 8}, "MLA"),
        ({"vision_config": {"hidden_size": 8}}, "vision"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"alibi": True}, "ALiBi"),
        ({"mamba_d_state": 8}, "recurrent or linear attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "no implementation here"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}}, "no implementation here"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, ""),
    ],
)
def test_kinds_that_are_refused_by_name(changes: dict[str, Any], hint: str, tmp_path: Path) -> None:
    folder = save(foreign("olmo2"), tmp_path)
    edit_json(folder / "config.json", **changes)
    assert hint in str(refused(folder, "must"))


@pytest.mark.parametrize("model_type", ["stablelm", "bloom"])
def test_a_type_that_computes_its_attention_itself(model_type: str, tmp_path: Path) -> None:
    folder = save(foreign(model_type, hidden_dropout=0.0), tmp_path)
    edit_json(folder / "config.json", max_position_embeddings=256)
    refused(folder, f"{model_type} must run its attention through transformers' attention interface")


def test_two_attentions_a_layer(tmp_path: Path) -> None:
    refused(save(foreign("diffllama"), tmp_path), "each of diffllama's 3 layers must attend once, in order")


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"s_aux": torch.ones(1)}, "no learned sinks"),
        ({"position_bias": torch.ones(1)}, "position_bias"),
        ({"is_causal": False}, "both directions"),
        ({"dropout": 0.5}, "drop nothing"),
    ],
)
def test_what_an_attention_may_not_ask_for(
    said: dict[str, Any], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, attend = save(foreign("olmo2"), tmp_path), transformers_fallback._attend
    monkeypatch.setattr(transformers_fallback, "_attend", lambda *args, **kwargs: attend(*args, **{**kwargs, **said}))
    refused(folder, match)


def test_a_window_the_attention_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, attend = save(foreign("starcoder2"), tmp_path), transformers_fallback._attend
    monkeypatch.setattr(
        transformers_fallback, "_attend", lambda *args, **kwargs: attend(*args, **{**kwargs, "sliding_window": None})
    )
    assert "--max-model-len 9" in str(refused(folder, "layer 0 of starcoder2 must tell its attention the window"))


def test_logits_that_differ_from_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an architecture does behind the interface's back shows on the first tokens."""
    from transformers.models.olmo2 import modeling_olmo2

    folder, eager = save(foreign("olmo2"), tmp_path), modeling_olmo2.eager_attention_forward

    def biased(*args: Any, **kwargs: Any) -> Any:
        out, weights = eager(*args, **kwargs)
        return out + 0.1, weights

    monkeypatch.setattr(modeling_olmo2, "eager_attention_forward", biased)
    refused(folder, "olmo2 over pages must give the logits of its own attention")


def test_a_type_nobody_knows(tmp_path: Path) -> None:
    folder = save(foreign("olmo2"), tmp_path)
    edit_json(folder / "config.json", model_type="nonsense9")
    refused(folder, "model_type must be one of gemma3_text, .* or a decoder that transformers knows, but got 'nonsense9'")


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(foreign("olmo2"), tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = refused(folder, "model_type must be one of gemma3_text, llama, .* but got 'olmo2'")
    assert "pip install 'slipstream[transformers]'" in str(error)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    folder = save(foreign("olmo2"), tmp_path)
    edit_json(folder / "config.json", num_hidden_layers=4)
    refused(folder, r"the checkpoint must hold model\.layers\.3\.")
    edit_json(folder / "config.json", num_hidden_layers=2)
    refused(folder, r"every tensor must belong to the model, but got model\.layers\.2\.")
    edit_json(folder / "config.json", num_hidden_layers=3, hidden_size=96)
    refused(folder, "must have shape")


def test_a_tied_head_that_differs(tmp_path: Path) -> None:
    folder = save(foreign("olmo2", tie_word_embeddings=False), tmp_path)
    edit_json(folder / "config.json", tie_word_embeddings=True)
    refused(folder, r"lm_head\.weight must equal model\.embed_tokens\.weight")
