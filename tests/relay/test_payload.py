"""The payload and its declaration; and that relay/ is a leaf."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import torch

import slipstream.relay
from slipstream.relay import EXTRAS, DraftInput, FieldSpec, RelayPayload, RelaySpec


def test_a_drafters_input_becomes_the_payloads_extras() -> None:
    bonus, index = torch.tensor([1, 2]), torch.tensor([[3], [4]])
    payload = RelayPayload.from_draft_input(bonus, DraftInput(topk_index=index))
    assert payload.bonus_tokens is bonus and payload.extras() == {"topk_index": index}


def test_no_input_makes_a_bonus_only_payload() -> None:
    assert RelayPayload.from_draft_input(torch.tensor([1]), None).extras() == {}
    assert RelayPayload.from_draft_input(torch.tensor([1]), DraftInput()).extras() == {}


def test_the_extras_are_the_payloads_fields_but_the_bonus() -> None:
    assert tuple(f.name for f in fields(RelayPayload)) == ("bonus_tokens", *EXTRAS)
    assert tuple(f.name for f in fields(DraftInput)) == EXTRAS


def test_payloads_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        RelayPayload(torch.tensor([1])).bonus_tokens = torch.tensor([2])


def test_a_spec_names_only_fields_of_the_payload() -> None:
    with pytest.raises(ValueError, match=r"a relayed field must be one of .* but got 'bonus_tokens'"):
        RelaySpec({"bonus_tokens": FieldSpec((), torch.int64)})


def test_relay_imports_nothing_of_slipstream_at_any_depth() -> None:
    """Not at the top of a module, not inside a function, not by a relative import, and not through a third module."""
    folder = Path(slipstream.relay.__file__).parent
    files = sorted(folder.rglob("*.py"))
    assert len(files) >= 3
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name}:{node.lineno} imports relatively"
                names = [node.module or ""]
            for name in names:
                known = name.split(".")[0] in {"torch", *sys.stdlib_module_names}
                assert known or name.startswith("slipstream.relay"), f"{file.name}:{node.lineno} imports {name}"
                assert name not in ("importlib", "runpy"), f"{file.name}:{node.lineno} could import anything"


def test_importing_relay_loads_nothing_else_of_slipstream() -> None:
    code = "import sys, slipstream.relay; print(sorted(m for m in sys.modules if m.split('.')[0] == 'slipstream'))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    allowed = {"slipstream", "slipstream.relay", "slipstream.relay.future_map", "slipstream.relay.payload"}
    assert set(ast.literal_eval(out)) == allowed
