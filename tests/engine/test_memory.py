"""The memory table: that it names what is really allocated, that it reads well, and what it refuses."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.attention.kv import KVCache
from slipstream.config import EngineConfig
from slipstream.engine import build
from slipstream.engine.build import assemble_engine
from slipstream.engine.device_state import DeviceState
from slipstream.engine.memory import Memory, MemoryPlan, amount, memory_of, plan_memory
from slipstream.errors import ConfigError
from slipstream.models.base import CausalLM
from slipstream.observe import log
from slipstream.relay import FutureMap
from slipstream.sampling.state import SamplingState
from slipstream.speculate.base import Drafter
from slipstream.speculate.registry import Target
from slipstream.testing.drafters import RandDrafter
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.relaying import RelayingDrafter
from slipstream.testing.tiny import tiny_model
from slipstream.text.detokenize import StopScanner

GIB = 2**30
CPU = torch.device("cpu")


def plan(model: CausalLM, memory: Memory | None = None, drafters: tuple[Drafter, ...] = (), **settings: object) -> MemoryPlan:
    config = EngineConfig(model="in-memory", **{"page_size": 4, "max_num_seqs": 3, "num_pages": 10, **settings})
    return plan_memory(
        model,
        config,
        context_len=config.max_model_len or 22,
        num_pages=config.num_pages or 0,
        num_parameters=10_000,
        drafters=drafters,
        memory=memory or Memory(8 * GIB, 4 * GIB),
    )


def num_bytes(*owners: object) -> int:
    """Bytes of all tensors in the attributes of some objects, lists and dictionaries included."""
    found = 0
    for owner in owners:
        if isinstance(owner, Tensor):
            found += owner.nbytes
        elif isinstance(owner, (list, tuple)):
            found += num_bytes(*owner)
        elif isinstance(owner, dict):
            found += num_bytes(*owner.values())
        elif isinstance(owner, (DeviceState, KVCache, FutureMap, SamplingState)):
            found += num_bytes(*vars(owner).values())
    return found


@pytest.mark.parametrize("family", ["hash", "llama"])
def test_what_is_allocated_is_what_the_table_says(family: str) -> None:
    model: CausalLM = HashLM(num_layers=2) if family == "hash" else tiny_model(family)
    items = {item.name: item for item in plan(model).items}
    kv = KVCache(model.kv_layers, 10 + 2, 4, CPU)
    assert num_bytes(kv) == items["KV pages"].num_bytes
    state, sampling = DeviceState(4, 22, 4, CPU), SamplingState(4, model.vocab_size, (), CPU)
    relay = FutureMap(4, {}, CPU)
    by_slot = sum(items[name].num_bytes for name in ("token history", "page tables", "slot numbers"))
    assert num_bytes(state, sampling, relay) == by_slot
    assert "relay rows" not in items


def test_relay_rows_are_those_the_drafter_declares() -> None:
    model = HashLM()
    drafter = RelayingDrafter(Target(model, 4), RandDrafter(64, 3, None, 0), 2)
    wanted = sum(torch.zeros(4, *field.shape, dtype=field.dtype).nbytes for field in drafter.relay.fields.values())
    assert wanted > 0
    items = {item.name: item for item in plan(model, drafters=(drafter,)).items}
    assert items["relay rows"].num_bytes == wanted
    assert items["logits"].what == f"at most, {3 * (1 + drafter.num_nodes)} rows of {model.vocab_size}"


def test_bounds_grow_with_what_their_flags_say() -> None:
    model = tiny_model("llama")

    def item(name: str, **settings: object) -> int:
        return next(one.num_bytes for one in plan(model, **settings).items if one.name == name)

    assert item("activations", max_num_batched_tokens=60) == 2 * item("activations", max_num_batched_tokens=30)
    assert item("activations", max_num_batched_tokens=10**6) == item("activations", max_num_batched_tokens=3 * 22)
    grown = item("attention", max_num_seqs=9) - item("attention", max_num_seqs=6)
    assert grown == item("attention", max_num_seqs=6) - item("attention", max_num_seqs=3) > 0
    assert item("attention", max_model_len=440) >= 20 * item("attention", max_model_len=22)
    assert item("logits", max_num_seqs=6) == 2 * item("logits", max_num_seqs=3)
    assert item("logits", max_num_seqs=6, max_num_batched_tokens=3) == item("logits", max_num_seqs=3)


def test_probabilities_take_memory_where_drafts_are_rejected_by_them() -> None:
    model = HashLM()

    def probs(*drafters: Drafter, **settings: object) -> int:
        return sum(one.num_bytes for one in plan(model, drafters=drafters, **settings).items if one.name == "draft probs")

    drafter = RandDrafter(64, 3, None, 0)
    assert probs(drafter) == probs(accept="rejection") == 0
    q_and_p = 3 * (1 + 3) * model.vocab_size * (4 + 8)
    assert q_and_p < probs(drafter, accept="rejection") < 4 * q_and_p


def test_activations_of_a_layer_are_all_widths_of_its_matrices() -> None:
    """Llama of 32 hidden, 64 in the MLP, 4 heads over 2: qkv 64, out 32, gate and up 128, down 64, and norms."""
    model = tiny_model("llama")
    per_layer = 32 * (64 + 32 + 128 + 64) + 2 * 32
    config = EngineConfig(model="m", num_pages=1)
    table = plan_memory(
        model,
        config,
        context_len=512,
        num_pages=1,
        num_parameters=2 * per_layer + model.vocab_size * 32,
        drafters=(),
        memory=Memory(GIB, GIB),
    )
    got = next(item.num_bytes for item in table.items if item.name == "activations")
    assert got == 512 * 8 * (64 + 32 + 128 + 64 + 2 + 4 * 32)


def test_what_fits() -> None:
    model = HashLM()
    some = plan(model)
    assert (some.largest_request, some.num_largest) == (22, 1)  # 6 pages of 10
    assert plan(model, num_pages=12).num_largest == 2 and plan(model, num_pages=100).num_largest == 3
    small = plan(model, num_pages=3)
    assert (small.largest_request, small.num_largest) == (12, 1)


def test_slots_that_cannot_fit_are_refused_with_the_numbers_and_the_flag() -> None:
    memory = Memory(16 * GIB, 3 * GIB)
    with pytest.raises(ConfigError) as refused:
        plan(HashLM(), memory, max_num_seqs=65536, max_model_len=8190).check()
    message = str(refused.value)
    assert "must fit the 3.0 GiB of memory that are free, but take 5.0 GiB, of which token history 4.0 GiB" in message
    assert "65537 slots of 8190 tokens" in message and message.endswith("hint: lower --max-num-seqs or --max-model-len")
    plan(HashLM(), Memory(16 * GIB, 6 * GIB), max_num_seqs=65536, max_model_len=8190).check()


def test_a_step_that_cannot_fit_is_refused_by_its_own_flag() -> None:
    """A prompt of a million tokens at once."""
    big = {"max_model_len": 10**6, "max_num_batched_tokens": 10**6}
    with pytest.raises(
        ConfigError, match=r"activations .*at most, 1000000 tokens a step\)\nhint: lower --max-num-batched-tokens"
    ):
        plan(tiny_model("llama"), Memory(2 * GIB, GIB), **big).check()
    plan(tiny_model("llama"), Memory(2 * GIB, GIB), **{**big, "max_num_batched_tokens": 512}).check()


def test_a_pool_that_cannot_fit_is_refused_by_its_own_flag() -> None:
    with pytest.raises(ConfigError, match=r"KV pages 6\.1 GiB .*\n.*--num-pages or --kv-cache-memory-bytes"):
        plan(HashLM(), num_pages=10**8 + 2 * 10**6).check()


def test_an_engine_that_cannot_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "memory_of", lambda device: Memory(GIB, 10_000))

    def never(*args: object, **more: object) -> None:
        raise AssertionError("nothing may be allocated")

    monkeypatch.setattr(build, "KVCache", never)
    with pytest.raises(ConfigError, match="that are free, but take"):
        config = EngineConfig(model="in-memory", num_pages=4, max_num_seqs=64)
        assemble_engine(HashLM(), config, eos_token_ids=(), stop_text=lambda request: StopScanner(None, request.params))


def test_the_table_reads_well() -> None:
    text = plan(HashLM(), drafters=(RandDrafter(64, 3, None, 0),)).text()
    assert text.splitlines() == [
        "  weights        78.1 KiB  0.0M parameters, float64            --dtype, --quantization",
        "  KV pages          768 B  10 of 4 tokens: 40 tokens of 16 B   --num-pages, --kv-cache-memory-bytes",
        "  token history     768 B  4 slots of 22 tokens                --max-num-seqs, --max-model-len",
        "  page tables       192 B  4 slots of 6 pages                  --max-num-seqs, --max-model-len",
        "  slot numbers      448 B  4 slots: sampling, lengths, limits  --max-num-seqs",
        "  activations     5.0 MiB  at most, 66 tokens a step           --max-num-batched-tokens",
        "  attention      14.8 KiB  at most, 3 rows of 22 tokens        --max-num-seqs, --max-model-len",
        "  logits         24.0 KiB  at most, 12 rows of 64              --max-num-seqs, --speculate",
        "  in all          5.1 MiB  of 8.0 GiB; 4.0 GiB were free behind the weights",
        "  the longest request has 22 tokens; 1 of that length fit at once",
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_table_is_logged(as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.Logger("slipstream.engine")
    root, ours = logging.getLogger(), logging.getLogger("slipstream")
    before = list(root.handlers), root.level, ours.level
    try:
        log.configure("info", as_json)
        logger.handlers[:] = root.handlers
        table = plan(HashLM())
        log.table(logger, logging.INFO, "memory", table.text, table.fields)
    finally:
        root.handlers[:], root.level, ours.level = before
    said = capsys.readouterr().err
    if as_json:
        fields = json.loads(said)
        assert fields["message"] == "memory" and fields["kv_pages_bytes"] == 768 and fields["largest_request"] == 22
        assert fields["free_bytes"] == 4 * GIB and fields["token_history_bytes"] == 768
    else:
        assert said.splitlines()[0].endswith("INFO  memory") and said.splitlines()[1:] == table.text().splitlines()


def test_a_container_may_have_less_than_the_machine(tmp_path: Path) -> None:
    machine = memory_of(CPU, tmp_path)
    assert 0 < machine.free_bytes <= machine.total_bytes
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_of(CPU, tmp_path).total_bytes == machine.total_bytes
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 300000\n")
    assert memory_of(CPU, tmp_path) == Memory(1_000_000, 600_000)


def test_amounts() -> None:
    assert [amount(n) for n in (0, 1023, 1536, 3 * 2**20, 5 * GIB, 2**50)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB", "1024.0 TiB",
    ]  # fmt: skip
