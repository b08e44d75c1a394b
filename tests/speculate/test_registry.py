"""Drafters are found by file name; specs are read strictly."""

from __future__ import annotations

import pytest

from slipstream.errors import ConfigError
from slipstream.speculate.registry import Target, build_drafter, drafter_names, parse_spec
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
                                        ("off:width=4", "no options")])  # fmt: skip
def test_wrong_specs_are_refused(spec: str, must: str) -> None:
    with pytest.raises(ConfigError, match=must):
        build_drafter(spec, TARGET)
