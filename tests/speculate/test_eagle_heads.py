"""Published head formats and their traps: what is read, what it computes, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.attention.kv import KVCache
from slipstream.attention.layout import build_layout
from slipstream.attention.reference import ReferenceBackend
from slipstream.errors import ConfigError, ModelError
from slipstream.layers.decoder import Decoder
from slipstream.speculate.heads.checkpoint import load_head
from slipstream.speculate.heads.layers import DraftHead
from slipstream.speculate.registry import Target, build_drafter
from slipstream.testing.byte_tokenizer import ByteTokenizer
from slipstream.testing.hash_lm import HashLM
from slipstream.testing.tiny import tiny_checkpoint, tiny_model
from slipstream.types import SamplingParams
from slipstream.weights import load
from slipstream.weights.loaded import Numbers
from tests.cpu_kernels import NEEDS_KERNELS
from tests.engine.harness import Job, assert_equal, reference, run
from tests.speculate.eagle_heads import AUX, HIDDEN, VOCAB, PlainHead, plain_target, random_head, through_files

TEXT = [(place * place * 7 + 3) % 60 for place in range(12)]


def target() -> Decoder:
    model = tiny_model("llama")
    assert isinstance(model, Decoder)
    return model


def states_of(head: DraftHead, features: Tensor, following: Tensor) -> Tensor:
    """The head over one whole text, through the layers of the engine."""
    count = len(following)
    kv = KVCache((head.kv_layer,), 3, 16, torch.device("cpu"))
    layout = build_layout(
        page_tables=torch.tensor([[2]]), page_size=16, base_lens=torch.tensor([0]), limits=torch.tensor([count]),
        query_lens=(count,), max_key_lens=(count,), num_chunks=1,
    )  # fmt: skip
    return head.forward(following, head.states(features), ReferenceBackend().begin(layout, kv))


def compare(plain: PlainHead, loaded: DraftHead) -> None:
    """States and logits of a loaded head against the same in plain torch."""
    num_taps = 3 if plain.eagle3 else 1
    features = torch.randn((len(TEXT) - 1, num_taps * HIDDEN), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    following = torch.tensor(TEXT[1:])
    # EAGLE-1 reads the target's state behind the final norm, which the drafter is given without it.
    start = plain.start(features) if plain.eagle3 else target().norm(features)
    wanted = plain.run(plain_target("llama"), following, start)
    with torch.inference_mode():
        got = states_of(loaded, features, following)
        assert torch.allclose(got, wanted, atol=1e-6)
        assert torch.allclose(loaded.logits(got), plain.logits(plain_target("llama"), wanted), atol=1e-4)


@NEEDS_KERNELS
@pytest.mark.parametrize("kind", [1, 3])
def test_a_quantised_head_is_multiplied_by_the_kernels(tmp_path: Path, kind: int) -> None:
    """As torch multiplies the same quantised weights; in 8 bits it is near the plain head, and not the same."""
    source, model = saved(random_head(kind), tmp_path / "head"), load(str(tiny_checkpoint("llama")), dtype="float32").model
    assert isinstance(model, Decoder)
    features = torch.randn((len(TEXT) - 1, (3 if kind == 3 else 1) * HIDDEN), generator=torch.Generator().manual_seed(5))
    found = {}
    for name, how in {
        "plain": Numbers("float32"),
        "torch": Numbers("float32", "q8"),
        "exact": Numbers("float32", "q8", "exact"),
        "kernels": Numbers("float32", "q8", "auto", "bfloat16"),
    }.items():
        head = load_head(source, model, "input" if kind == 3 else None, how)
        assert head.kv_layer.dtype == (torch.bfloat16 if name == "kernels" else torch.float32)
        with torch.inference_mode():
            states = states_of(head, features, torch.tensor(TEXT[1:]))
            found[name] = torch.cat((states, head.logits(states)), 1)
        assert (head.weight_bytes < 3.5 * head.num_parameters) == (name != "plain")
    torch.testing.assert_close(found["exact"], found["torch"], rtol=1e-4, atol=1e-4)
    # Weights, and then activations too, in 8 bits: each is off by a per cent or so of what a sum over 32 has.
    for one, other in (("torch", "plain"), ("kernels", "torch")):
        assert 1e-3 < (found[one] - found[other]).norm() / found[other].norm() < 0.03, one


def saved(head: PlainHead, folder: Path, rename: Callable[[str], str] | None = None) -> str:
    return str(head.save(folder, rename))


# -- what is read ---------------------------------------------------------------------------------------------------------

SPELLINGS = {
    "as published": str,
    "with model.": lambda name: f"model.{name}",
    "midlayer as layers.0": lambda name: name.replace("midlayer.", "layers.0."),
    "both": lambda name: "model." + name.replace("midlayer.", "layers.0."),
}


@pytest.mark.parametrize("kind", [1, 3])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_the_tensors(tmp_path: Path, kind: int, spelling: str) -> None:
    plain = random_head(kind)
    loaded = load_head(saved(plain, tmp_path / "head", SPELLINGS[spelling]), target(), "input" if kind == 3 else None)
    compare(plain, loaded)


def test_the_rope_base_is_the_heads_own_and_10000_where_it_is_not_said(tmp_path: Path) -> None:
    """The target's is another one."""
    said, unsaid = random_head(3), random_head(3)
    assert said.config["rope_theta"] == 500.0
    del unsaid.config["rope_theta"]
    for name, plain in (("said", said), ("unsaid", unsaid)):
        compare(plain, load_head(saved(plain, tmp_path / name), target(), "input"))


@pytest.mark.parametrize("says", [None, True, False])
def test_an_eagle1_head_has_a_bias_unless_it_says_it_has_none(tmp_path: Path, says: bool | None) -> None:
    plain = random_head(1)
    if says is not None:
        plain.config["bias"] = says
    if says is not False:
        compare(plain, load_head(saved(plain, tmp_path / "with"), target()))
        del plain.weights["fc.bias"]
        with pytest.raises(ModelError, match=r"must hold fc\.bias"):
            load_head(saved(plain, tmp_path / "without"), target())
        return
    with pytest.raises(ModelError, match=r"every tensor must belong to the model, but got fc\.bias"):
        load_head(saved(plain, tmp_path / "with"), target())
    plain.weights["fc.bias"] = torch.zeros(HIDDEN, dtype=torch.float64)
    bare = PlainHead({name: w for name, w in plain.weights.items() if name != "fc.bias"}, plain.config, eagle3=False)
    compare(plain, load_head(saved(bare, tmp_path / "without"), target()))


def test_the_layers_listed_are_inputs_or_outputs_as_the_option_says(tmp_path: Path) -> None:
    folder = saved(random_head(3), tmp_path / "head")
    assert load_head(folder, target(), "input").taps == tuple(AUX)
    assert load_head(folder, target(), "output").taps == tuple(layer + 1 for layer in AUX)
    with pytest.raises(ModelError, match=r"aux_layers must say whether .* = \[0, 1, 1\] are inputs or outputs") as error:
        load_head(folder, target())
    assert error.value.hint is not None and "aux_layers=output for heads made with SGLang" in error.value.hint


def test_the_layers_may_be_listed_one_level_down(tmp_path: Path) -> None:
    plain = random_head(3)
    plain.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": plain.config.pop("eagle_aux_hidden_state_layer_ids")}
    assert load_head(saved(plain, tmp_path / "head"), target(), "output").taps == tuple(layer + 1 for layer in AUX)


def test_without_a_list_the_layers_are_the_second_the_middle_and_the_last_but_three(tmp_path: Path) -> None:
    plain = random_head(3)
    del plain.config["eagle_aux_hidden_state_layer_ids"]
    folder = saved(plain, tmp_path / "head")
    with pytest.raises(ModelError, match="must have at least 4 layers, but has 2"):
        load_head(folder, target())
    deep = target()
    grown = object.__new__(Decoder)
    grown.__dict__.update(vars(deep) | {"num_layers": 16})
    assert load_head(folder, grown).taps == (2, 8, 13)
    with pytest.raises(ModelError, match="aux_layers must be left out"):
        load_head(folder, grown, "input")


def test_a_folder_with_the_head_one_level_down_is_told(tmp_path: Path) -> None:
    saved(random_head(3), tmp_path / "made" / "head")
    with pytest.raises(ModelError, match=r"must hold config\.json") as caught:
        load_head(str(tmp_path / "made"), target(), "input")
    assert str(caught.value.hint).endswith("made/head does")


def test_a_tied_target_does_not_tie_the_head(tmp_path: Path) -> None:
    """Its lm_head is stored, and used, whatever the target does; of one that is missing the target's is no stand-in."""
    plain = random_head(3)
    plain.config["tie_word_embeddings"] = True
    compare(plain, load_head(saved(plain, tmp_path / "head"), target(), "input"))
    del plain.weights["lm_head.weight"]
    with pytest.raises(ModelError, match=r"must hold lm_head\.weight"):
        load_head(saved(plain, tmp_path / "without"), target(), "input")


def test_no_draft_vocab_size_means_the_targets_vocabulary_and_lm_head(tmp_path: Path) -> None:
    plain = random_head(3, draft_vocab=None)
    own_head = plain.weights.pop("lm_head.weight")
    plain.config["draft_vocab_size"] = None
    loaded = load_head(saved(plain, tmp_path / "head"), target(), "input")
    plain.weights["lm_head.weight"] = plain_target("llama").lm_head.weight
    assert loaded.target_ids is None
    compare(plain, loaded)
    plain.weights["lm_head.weight"] = own_head
    with pytest.raises(ModelError, match=r"draft_vocab_size must be given where lm_head\.weight is stored"):
        load_head(saved(plain, tmp_path / "both"), target(), "input")


def test_d2t_is_a_difference(tmp_path: Path) -> None:
    plain = random_head(3)
    loaded = load_head(saved(plain, tmp_path / "head"), target(), "input")
    assert loaded.target_ids is not None
    kept = plain.weights["t2d"].nonzero().flatten()
    assert torch.equal(loaded.target_ids, kept) and not torch.equal(kept, plain.weights["d2t"])


@pytest.mark.parametrize("own", [True, False])
def test_the_embedding_is_the_heads_where_it_stores_one(tmp_path: Path, own: bool) -> None:
    plain = random_head(1)
    table = plain_target("llama").model.embed_tokens.weight.clone()
    plain.weights["embed_tokens.weight"] = table * 2 if own else table
    loaded = load_head(saved(plain, tmp_path / "head"), target())
    assert (loaded._embedding is target().embedding) == (not own)
    features = torch.ones((3, HIDDEN), dtype=torch.float64)
    plain.weights.pop("embed_tokens.weight")
    shared = load_head(saved(plain, tmp_path / "shared"), target())
    with torch.inference_mode():
        following = torch.tensor(TEXT[:3])
        same = torch.equal(states_of(loaded, features, following), states_of(shared, features, following))
    assert same == (not own)


# -- what is refused ------------------------------------------------------------------------------------------------------


def with_config(**changes: Any) -> Callable[[PlainHead], None]:
    return lambda head: head.config.update(changes)


def with_weight(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[PlainHead], None]:
    return lambda head: head.weights.update({name: change(head.weights[name])})


WRONG: dict[str, tuple[Callable[[PlainHead], object], str]] = {
    "another hidden size": (with_config(hidden_size=64), "hidden_size must be the target's 32, but got 64"),
    "another vocabulary": (with_config(vocab_size=300), "vocab_size must be the target's 259, but got 300"),
    "two layers": (with_config(num_hidden_layers=2), "num_hidden_layers must be 1, but got 2"),
    "a window": (with_config(sliding_window=8, model_type="mistral"), "sliding_window must be null"),
    "another residual": (with_config(norm_before_residual=True), "norm_before_residual must be false"),
    "a larger vocabulary": (with_config(draft_vocab_size=300), "draft_vocab_size must be at most the target's 259"),
    "a vocabulary that is none": (with_config(draft_vocab_size="all"), "draft_vocab_size must be an integer"),
    "two layers listed": (with_config(eagle_aux_hidden_state_layer_ids=[1, 2]), "must list three layers"),
    "a layer too deep": (with_config(eagle_aux_hidden_state_layer_ids=[0, 1, 9]), "must list layers of the target, which has 2"),
    "ids out of range": (with_weight("d2t", lambda d2t: d2t + VOCAB), "d2t must lead to ids from 0 to 258"),
    "an id twice": (
        with_weight("d2t", lambda d2t: torch.cat((d2t[:1], d2t[:1] - 1, d2t[2:]))),
        "d2t must give every draft token its own id",
    ),
    "another t2d": (with_weight("t2d", lambda t2d: t2d.roll(1)), "t2d must mark exactly the ids that d2t leads to"),
    "no d2t": (lambda head: head.weights.pop("d2t"), "must hold d2t"),
    "a layer more": (
        lambda head: head.weights.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)}),
        "every tensor must belong to the model, but got layers.1.mlp.up_proj.weight",
    ),
    "a matrix of another shape": (
        with_weight("fc.weight", lambda fc: fc[:, :64]),
        r"fc.weight must have shape \[32, 96\], but got \[32, 64\]",
    ),
    "one tensor twice": (
        lambda head: head.weights.update({"model.norm.weight": head.weights["norm.weight"].clone()}),
        "every tensor must be there once",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_heads_that_do_not_fit_are_refused_at_start_up(tmp_path: Path, what: str) -> None:
    head = random_head(3)
    change, message = WRONG[what]
    change(head)
    with pytest.raises(ModelError, match=message):
        load_head(saved(head, tmp_path / "head"), target(), "input")


def test_another_model_is_no_head() -> None:
    with pytest.raises(ModelError, match="num_hidden_layers must be 1, but got 2"):
        load_head(str(tiny_checkpoint("llama")), target())


OPTIONS = {
    "": "must name its head",
    "model=H,beams=4": "must have options of model, topk, steps, draft_tokens, aux_layers, but got 'beams'",
    "model=H,topk=0": "topk of --speculate eagle must be an integer from 1 to 256, but got '0'",
    "model=H,steps=many": "steps of --speculate eagle must be an integer from 1 to 256, but got 'many'",
    "model=H,draft_tokens=5": "draft_tokens must equal steps where topk is 1, but got 5 and 3",
    "model=H,topk=2,steps=2,draft_tokens=7": "draft_tokens must be at most the 6 that a tree of topk=2 and steps=2 can have",
    "model=H,aux_layers=both": "aux_layers must be input or output, but got 'both'",
    "model=H,aux_layers=input,topk=151,steps=1": "topk must be at most the head's vocabulary, but got 151",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_that_cannot_be(tmp_path: Path, options: str) -> None:
    folder = saved(random_head(3), tmp_path / "head")
    with pytest.raises(ConfigError, match=OPTIONS[options]):
        build_drafter("eagle:" + options.replace("=H", f"={folder}"), Target(target(), 16))


def test_a_target_whose_states_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    folder = saved(random_head(1), tmp_path / "head")
    with pytest.raises(ConfigError, match="must have a target that is one of our own model types"):
        build_drafter(f"eagle:model={folder}", Target(HashLM(), 16))


def test_the_defaults(tmp_path: Path) -> None:
    folder = saved(random_head(1), tmp_path / "head")
    large = (",topk=2,steps=200", (200, 256))
    for options, shape in (large, ("", (3, 3)), (",topk=4,steps=4", (4, 8)), (",topk=2,steps=1", (1, 2)), (",steps=5", (5, 5))):
        name, drafter = build_drafter(f"eagle:model={folder}{options}", Target(target(), 16))
        assert (name, drafter.depth, drafter.num_nodes) == ("eagle", *shape)


# -- vocabularies ---------------------------------------------------------------------------------------------------------


class _Fewer(ByteTokenizer):
    """A tokenizer that knows fewer ids than the target's head has rows."""

    vocab_size = 200


@pytest.mark.parametrize("kind", [1, 3])
@pytest.mark.parametrize("shape", ["topk=1,steps=3", "topk=3,steps=3,draft_tokens=9"])
def test_l09_ids_that_only_fill_up_the_targets_head_are_never_proposed(kind: int, shape: str) -> None:
    built: list[Any] = []

    def make(given: Target) -> Any:
        known = Target(given.model, given.page_size, given.device, given.attention, _Fewer())
        drafter = through_files(random_head(kind), shape)(known)
        inner = drafter.propose

        def propose(*args: Any) -> Any:
            draft = inner(*args)
            built.append(draft.tokens.max() if draft.tokens.numel() else torch.tensor(0))
            return draft

        drafter.propose = propose
        return drafter

    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    jobs = [Job(tuple(TEXT[:n]), params, seed=n) for n in range(1, 9)]
    assert_equal(run(target(), jobs, lag=1, drafters={"eagle": make}), reference(target(), jobs), (kind, shape))
    assert len(built) > 10 and int(torch.stack(built).max()) < 200


@pytest.mark.parametrize("shape", ["topk=1,steps=4", "topk=3,steps=3,draft_tokens=9"])
def test_a_reduced_vocabulary_is_mapped_before_the_noise(shape: str) -> None:
    """A head whose few ids are all the answer may have: the noise of the target's ids makes its guesses the target's samples."""
    plain = random_head(3)
    kept = plain.target_ids.tolist()
    params = SamplingParams(temperature=50.0, max_tokens=40, ignore_eos=True, allowed_token_ids=tuple(kept))
    jobs = [Job(tuple(TEXT[:n]), params, seed=n) for n in range(1, 7)]
    got = run(target(), jobs, lag=1, drafters={"eagle": through_files(plain, shape)})
    assert_equal(got, reference(target(), jobs), shape)
    drafted, accepted = sum(a.num_drafted for a in got), sum(a.num_accepted for a in got)
    assert accepted > 0.25 * drafted, "at this temperature the noise decides, and it is the target's"
