"""The head with gradients computes what the engine's head computes, and what each chain sees is what drafting sees."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.attention.kv import NUM_RESERVED_PAGES, KVCache
from slipstream.attention.layout import build_layout
from slipstream.attention.reference import ReferenceBackend
from slipstream.layers.decoder import Decoder
from slipstream.models.config import ModelConfig
from slipstream.speculate.heads.checkpoint import load_head
from slipstream.speculate.heads.layers import DraftHead
from slipstream.train.export import export
from slipstream.train.features import FeatureStore, Text, states_of, taps_of
from slipstream.train.module import Batch, Head, HeadShape
from slipstream.train.pipeline import _head_shape
from slipstream.train.vocabulary import DraftVocabulary
from slipstream.weights import load
from slipstream.weights.source import resolve
from slipstream.weights.text_side import open_checkpoint
from tests.train.tiny_training import NUM_LAYERS, Recorder, target

CPU = torch.device("cpu")
KEPT = torch.arange(0, 320, 2)
TEXTS = (Text(tuple(range(40, 59)), 7), Text(tuple(range(150, 100, -4)), 3), Text(tuple(range(60, 69)), 1))


@lru_cache(maxsize=1)
def model() -> Decoder:
    loaded = load(target(), dtype="float32").model
    assert isinstance(loaded, Decoder)
    return loaded


def shape() -> HeadShape:
    checkpoint = open_checkpoint(resolve(target()))
    assert isinstance(checkpoint.config, ModelConfig)
    return _head_shape(checkpoint.config, len(KEPT))


def random_head() -> Head:
    """With every weight large enough to matter, and states of three different scales."""
    head = Head(shape(), torch.tensor([0.5, 1.0, 3.0]))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            drawn = torch.rand(parameter.shape, generator=generator)
            parameter.copy_(drawn + 0.5 if "norm" in name else (drawn - 0.5) * 0.5)
    return head


def embed(tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        embedded = model().embedding(tokens)
    return embedded.clone()


def features(text: Text) -> Tensor:
    states = states_of(model(), taps_of(NUM_LAYERS), [text], ReferenceBackend(), CPU)
    return states.clone()


def loaded(head: Head, folder: Path) -> DraftHead:
    checkpoint = open_checkpoint(resolve(target()))
    assert isinstance(checkpoint.config, ModelConfig)
    export(head, DraftVocabulary(KEPT, 320, 1.0), checkpoint.config, folder, torch.float32)
    return load_head(str(folder), model())


def test_the_engines_head_computes_the_same_step_by_step(tmp_path: Path) -> None:
    """Exported, loaded, and run as a draft is: over the true states, then token by token on its own, KV rewritten in between."""
    head, text = random_head(), TEXTS[0]
    other = loaded(head, tmp_path / "head")
    assert other.taps == taps_of(NUM_LAYERS)
    assert other.target_ids is not None
    assert torch.equal(other.target_ids, KEPT)
    steps = 3
    batch = Batch.of([text], [features(text)], steps, CPU)
    mine = [states.detach() for states in head.unroll(batch, embed, steps)]
    tokens, num_rows = torch.tensor(text.token_ids), text.num_rows
    with torch.inference_mode():
        kv = KVCache((other.kv_layer,), 64 + NUM_RESERVED_PAGES, 1, CPU)

        def run(first: int, following: Tensor, states: Tensor) -> Tensor:
            layout = build_layout(
                page_tables=torch.arange(64)[None] + NUM_RESERVED_PAGES,
                page_size=1,
                base_lens=torch.tensor([first]),
                limits=torch.tensor([64]),
                query_lens=(len(following),),
                max_key_lens=(first + len(following),),
                num_chunks=1,
            )
            return other.forward(following, states, ReferenceBackend().begin(layout, kv))

        start = other.states(features(text))
        for chain, row in enumerate(range(text.prompt_len - 1, num_rows)):
            states = run(0, tokens[1 : row + 2], start[: row + 1])[-1:]
            for step in range(steps):
                assert torch.allclose(mine[step][chain], states[0], atol=2e-5)
                assert torch.allclose(head.logits(mine[step][chain]), other.logits(states)[0], atol=1e-4)
                if row + step + 3 >= len(tokens):  # behind the end there is no token to go on with
                    break
                states = run(row + step + 1, tokens[row + step + 2 : row + step + 3], states)


def test_a_batch_is_what_its_texts_are_alone() -> None:
    head, steps = random_head(), 3
    together = list(head.unroll(Batch.of(TEXTS, [features(text) for text in TEXTS], steps, CPU), embed, steps))
    alone = [list(head.unroll(Batch.of([text], [features(text)], steps, CPU), embed, steps)) for text in TEXTS]
    for step in range(steps):
        assert torch.allclose(together[step], torch.cat([states[step] for states in alone]), atol=1e-5)


def naive_chain(head: Head, text: Text, rows: Tensor, chain: int, num_steps: int) -> list[Tensor]:
    """One chain, every key and every score written out."""
    w = {name: parameter.detach() for name, parameter in head.named_parameters()}
    size, dim = head.shape, head.shape.head_dim
    layer = "midlayer."

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + size.norm_eps).rsqrt() * w[f"{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        angles = position / size.rope_theta ** (torch.arange(0, dim, 2) / dim)
        left, right = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)

    def look(token: int, state: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        embedded = norm(embed(torch.tensor([token]))[0], f"{layer}input_layernorm")
        x = torch.cat((embedded, norm(state, f"{layer}hidden_norm")))
        query, key, value = ((w[f"{layer}self_attn.{part}_proj.weight"] @ x).view(-1, dim) for part in "qkv")
        return turned(query, position), turned(key, position), value

    def attend(query: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        groups, out = size.num_heads // size.num_kv_heads, []
        for one in range(size.num_heads):
            weights = torch.stack([query[one] @ key[one // groups] / dim**0.5 for key, _ in seen]).softmax(0)
            out.append(sum(weight * value[one // groups] for weight, (_, value) in zip(weights, seen, strict=True)))
        return torch.cat(out)

    def finish(state: Tensor, mixed: Tensor) -> Tensor:
        state = state + w[f"{layer}self_attn.o_proj.weight"] @ mixed
        x = norm(state, f"{layer}post_attention_layernorm")
        gate, up = (w[f"{layer}mlp.{part}_proj.weight"] @ x for part in ("gate", "up"))
        return state + w[f"{layer}mlp.down_proj.weight"] @ (functional.silu(gate) * up)

    start = (rows * head.feature_scale) @ w["fc.weight"].T
    seen = []
    for position in range(chain + 1):
        query, key, value = look(text.token_ids[position + 1], start[position], position)
        seen.append((key, value))
    states = [finish(start[chain], attend(query, seen))]
    for step in range(1, num_steps):
        if chain + 1 + step >= len(text.token_ids):
            break
        query, key, value = look(text.token_ids[chain + 1 + step], states[-1], chain + step)
        seen.append((key, value))
        states.append(finish(states[-1], attend(query, seen)))
    return states


def test_every_chain_sees_what_is_written_down() -> None:
    head, steps = random_head(), 4
    for text in TEXTS[1:]:
        rows = features(text)
        unrolled = list(head.unroll(Batch.of([text], [rows], steps, CPU), embed, steps))
        for chain in range(text.num_rows - (text.prompt_len - 1)):
            wanted = naive_chain(head, text, rows, text.prompt_len - 1 + chain, steps)
            for step, states in enumerate(wanted):
                assert torch.allclose(unrolled[step][chain], states, atol=2e-5), (chain, step)


def test_targets_are_the_answers_tokens_behind_the_first() -> None:
    text = TEXTS[0]
    batch = Batch.of([text], [features(text)], 3, CPU)
    answer = list(text.token_ids[text.prompt_len :])
    assert batch.following(1).tolist() == answer[1:]
    assert batch.following(2).tolist() == [*answer[2:], -1]
    assert batch.following(3).tolist() == [*answer[3:], -1, -1]


def test_features_are_the_states_entering_the_layers(tmp_path: Path) -> None:
    """Of transformers; through files, in bfloat16."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(target(), dtype=torch.float32)
    store = FeatureStore(tmp_path / "features", TEXTS, 48, torch.bfloat16)
    recorder = Recorder()
    store.compute(model(), ReferenceBackend(), CPU, recorder, recorder.stop)
    assert not store.missing
    assert store.num_bytes == sum(path.stat().st_size for path in (tmp_path / "features").iterdir())
    for index, text in enumerate(TEXTS):
        with torch.no_grad():
            states = reference(torch.tensor([text.token_ids]), output_hidden_states=True).hidden_states
        wanted = torch.cat([states[layer][0, :-2] for layer in (2, 2, 2)], -1)
        assert torch.allclose(features(text), wanted, atol=1e-4)
        assert torch.equal(store.rows(index), features(text).to(torch.bfloat16))
