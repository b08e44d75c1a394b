"""Drafters are found by file name; specs are read strictly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import slipstream.speculate
from slipstream.errors import ConfigError, ModelError
from slipstream.speculate.registry import Target, build_drafter, check_spec, drafter_names, parse_spec
from slipstream.testing.hash_lm import HashLM

TARGET = Target(HashLM(), page_size=16)


def test_every_drafter_file_is_a_name_and_builds() -> None:
    assert {"draft_model", "ngram", "off"} <= set(drafter_names())
    assert not {"base", "registry", "verify"} & set(drafter_names())
    name, drafter = build_drafter("off", TARGET)
    assert (name, drafter.depth, drafter.num_nodes, drafter.max_writes) == ("off", 0, 0, 1)
    assert not drafter.relay.fields and not drafter.taps


def test_specs() -> None:
    assert parse_spec("off") == ("off", {})
    assert parse_spec("some:model=a/b,width=4") == ("some", {"model": "a/b", "width": "4"})


@pytest.mark.parametrize("spec, must", [("nope", "must name one of"), ("verify", "must name one of"), ("off:x", "key=value"),
                                        ("off:width=4", "no options"), ("ngram:width=2,width=3", "has width twice"),
                                        ("ngram:,,", "key=value, but got ''"), ("ngram:width=2,", "key=value")])  # fmt: skip
def test_wrong_specs_are_refused(spec: str, must: str) -> None:
    with pytest.raises(ConfigError, match=must):
        build_drafter(spec, TARGET)


@pytest.mark.parametrize(
    "spec, must, hint",
    [
        ("ngrams", "must name one of", "did you mean ngram?"),
        ("NGRAM", "must name one of", "did you mean ngram?"),
        ("zzz", "must name one of", "off is plain decoding"),
        ("ngram:witdh=3", "must have options of width, min_n, max_n, corpus, but got 'witdh'", "did you mean width?"),
        ("ngram:width=0", "width of --speculate ngram must be an integer from 1 to 64", None),
        ("ngram:corpus=no/such/file", "must be readable, but there is no file 'no/such/file'", None),
        ("draft_model:width=3", "must name a model, but got none", "draft_model:model=NAME,width=4"),
        ("eagle:model=h,topk=1,steps=2,draft_tokens=3", "draft_tokens must equal steps", "leave draft_tokens out"),
        ("eagle:model=h,aux_layers=both", "aux_layers must be", None),
    ],
)
def test_wrong_names_and_options_are_found_without_a_model(spec: str, must: str, hint: str | None) -> None:
    with pytest.raises(ConfigError, match=must) as caught:
        check_spec(spec)
    assert caught.value.hint is None if hint is None else hint in str(caught.value.hint)


def test_a_file_that_is_no_drafter_is_named_with_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half.py").write_text("def build(options, target): ...\n")
    monkeypatch.setattr(slipstream.speculate, "__path__", [*slipstream.speculate.__path__, str(tmp_path)])
    with pytest.raises(ConfigError, match=r"speculate/half\.py must have the functions parse and build, but has no parse"):
        check_spec("half")


def test_a_drafters_model_is_not_taken_for_the_target(tmp_path: Path) -> None:
    spec = f"draft_model:model={tmp_path / 'nothing.gguf'}"
    with pytest.raises(ModelError, match=re.escape(f"--speculate {spec}: model must be")):
        build_drafter(spec, TARGET)


@pytest.mark.parametrize("name", drafter_names())
def test_every_drafter_refuses_an_unknown_option_without_a_model(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check_spec(f"{name}:no_such_option=1")
