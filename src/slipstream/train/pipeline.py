"""The stages of `train-draft` in a row. Each looks at what is there already and does the rest.

    prompts ─► answers ─► features ─► draft vocabulary ─► training ─► head ─► measured on prompts held out ─► report
               .jsonl      shards                          checkpoint          by the engine itself

What cannot work is refused before anything long begins.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slipstream.attention.registry import backend_for
from slipstream.config import EngineConfig
from slipstream.engine.build import engine_around, load_configured, pick_device
from slipstream.engine.compat import check_startup
from slipstream.errors import ConfigError, ModelError, SlipstreamError
from slipstream.frontend.model_info import model_info
from slipstream.frontend.prepare import Frontend
from slipstream.kernels.torch_threads import torch_threads
from slipstream.layers.decoder import Decoder
from slipstream.models.config import ModelConfig
from slipstream.seeds import signed64, splitmix64
from slipstream.train.answers import Answer, AnswerFile, collect
from slipstream.train.export import export
from slipstream.train.features import FeatureStore, Text, disk_bytes
from slipstream.train.folder import OutFolder
from slipstream.train.loop import Trainer
from slipstream.train.measure import Measured, measure
from slipstream.train.module import Head, HeadShape
from slipstream.train.progress import Reporter
from slipstream.train.prompts import Prompt, digest, read_prompts, split
from slipstream.train.settings import MIN_LAYERS, TrainSettings
from slipstream.train.vocabulary import DraftVocabulary, choose_vocabulary
from slipstream.types import EngineRequest, SamplingParams
from slipstream.weights.loaded import LoadedModel
from slipstream.weights.source import ModelSource, resolve
from slipstream.weights.text_side import Checkpoint, open_checkpoint

MOST_MEASURED = 200  # prompts held out
EXPORT_DTYPE = torch.bfloat16
SAMPLED_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class _Data:
    """Prompts, as the engine takes them, by key: `left_out` do not fit the context with an answer."""

    train: Mapping[str, EngineRequest]
    held_out: Sequence[EngineRequest]
    left_out: int


class Pipeline:
    """One run of `train-draft`.

    Args:
        config: model and engine. Its drafters, if any, write the answers; the head is measured without them.
        settings: how the head is made.
        reporter: is told what happens.

    Raises `ConfigError` or `ModelError` for whatever cannot work, `SlipstreamError` for what fails on the way.
    """

    def __init__(self, config: EngineConfig, settings: TrainSettings, reporter: Reporter) -> None:
        check_startup(config)
        self._config = config
        self._settings = settings
        self._reporter = reporter
        prompts = read_prompts(settings.prompts)
        chosen = prompts[: settings.num_prompts]
        if settings.num_prompts is not None and len(prompts) < settings.num_prompts:
            raise ConfigError(f"--num-prompts must be at most the {len(prompts)} there are, but got {settings.num_prompts}")
        with reporter.loading() as on_progress:
            source = resolve(config.model, on_progress)
        self._checkpoint = open_checkpoint(source, config.max_model_len)
        self._target = _trainable(self._checkpoint)
        self._frontend = Frontend(model_info(self._checkpoint.text, config))
        self._data = self._requests(chosen)
        self._folder = OutFolder(settings.out)
        model = {"name": config.model, "files": _fingerprint(source)}
        context = {"dtype": config.dtype, "max_model_len": config.max_model_len}
        data = {"MODEL": model, "the prompts": digest(chosen), **settings.of_data(), **context}
        self._folder.claim(data, settings.of_training())
        self._made_of = {**data, **settings.of_training()}
        self._say_sizes(len(prompts), len(chosen))

    def run(self, stop: threading.Event) -> dict[str, Any]:
        """Make the head, or what is left to do; returns the report, which is also in report.json.

        Once `stop` is set, the stage that runs ends at its next step with `KeyboardInterrupt`; what it did is kept.
        """
        folder = self._folder
        report = folder.read(folder.report)
        if report is not None and report.get("settings") == self._made_of and folder.head.is_dir():
            return report
        num_threads = self._config.num_threads or torch.get_num_threads()  # before the target's kernels claim all but one
        answers = self._answers(stop)
        texts = [Text(one.prompt_token_ids + one.token_ids, len(one.prompt_token_ids)) for one in answers]
        useful = [text for text in texts if text.is_useful]
        if not useful:
            raise ConfigError("the answers must have two tokens or more, but none has", hint="--max-tokens, or other prompts")
        store = self._features(useful, stop)
        vocabulary = self._vocabulary(useful)
        with folder.timed("training"):
            trainer = self._trainer(store, vocabulary)  # where all else was done before, this loads the target
            with torch_threads(num_threads):
                trainer.run(self._reporter, stop)
        export(trainer.head, vocabulary, self._target, folder.head, EXPORT_DTYPE)
        measured = None
        if self._data.held_out:
            with folder.timed("measuring"):
                measured = measure(
                    self._loaded,
                    self._config,
                    folder.head,
                    self._data.held_out[:MOST_MEASURED],
                    self._settings.unroll,
                    self._reporter,
                    stop,
                )
        return self._report(answers, useful, vocabulary, trainer, measured)

    @cached_property
    def _loaded(self) -> LoadedModel:
        with self._reporter.loading() as on_progress:
            return load_configured(self._config, on_progress)

    @property
    def _model(self) -> Decoder:
        model = self._loaded.model
        assert isinstance(model, Decoder)  # `_trainable` has seen to it
        return model

    @property
    def _num_known_ids(self) -> int:
        text = self._checkpoint.text
        return min(text.vocab_size, text.tokenizer.vocab_size)

    @cached_property
    def _device(self) -> torch.device:
        return pick_device(self._config.device)

    def _requests(self, chosen: Sequence[Prompt]) -> _Data:
        train, held_out = split(chosen, self._settings.held_out)
        asked = {prompt.key: request for prompt in chosen if (request := self._request(prompt)) is not None}
        data = _Data(
            {prompt.key: asked[prompt.key] for prompt in train if prompt.key in asked},
            [asked[prompt.key] for prompt in held_out if prompt.key in asked],
            len(chosen) - len(asked),
        )
        if not data.train:
            raise ConfigError(
                f"--max-tokens must leave room for a prompt in the context of {self._frontend.info.context_len} tokens, "
                f"but got {self._settings.max_tokens}"
            )
        return data

    def _request(self, prompt: Prompt) -> EngineRequest | None:
        """None where prompt and answer do not fit the context. Nothing but --temperature shapes the answers: the drafter applies
        penalties and truncations to the head's logits itself, when it drafts.
        """
        settings, info = self._settings, self._frontend.info
        seed = signed64(splitmix64(settings.seed) ^ int(prompt.key, 16))
        params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens, seed=seed)
        try:
            if info.chat_template is not None:
                text = self._frontend.chat_prompt(prompt.messages)
            elif prompt.is_plain:
                text = prompt.messages[0]["content"]
            else:
                raise ConfigError(
                    f"{prompt.where}: a prompt must be one text for a model without a chat template, but is a conversation"
                )
            prepared = self._frontend.prepare(prompt.key, text, SamplingParams(max_tokens=1, seed=0))
            if len(prepared.prompt_token_ids) + settings.max_tokens > info.context_len:
                return None
            return self._frontend.prepare(prompt.key, prepared.prompt_token_ids, params).requests[0]
        except ConfigError:
            raise
        except SlipstreamError as error:
            if error.code == "context_length_exceeded":
                return None
            raise ConfigError(f"{prompt.where}: {error.message}", hint=error.hint) from None

    def _say_sizes(self, num_found: int, num_chosen: int) -> None:
        data, settings = self._data, self._settings
        left_out = f", {data.left_out} left out: too long" if data.left_out else ""
        self._reporter.line(
            f"{num_found} prompts, {num_chosen} used: {len(data.train)} to train on, {len(data.held_out)} held out{left_out}"
        )
        rows = sum(len(one.prompt_token_ids) + settings.max_tokens for one in data.train.values())
        size = disk_bytes(rows, self._target.hidden_size, getattr(torch, settings.feature_dtype))
        self._reporter.line(f"the target's states will take at most {size / 1e6:.0f} MB in {self._folder.features}")
        shape = _head_shape(self._target, min(settings.draft_vocab_size, self._num_known_ids))
        hidden, dim = shape.hidden_size, shape.head_dim
        attention = hidden * dim * (3 * shape.num_heads + 4 * shape.num_kv_heads)
        weights = 3 * hidden**2 + attention + 3 * hidden * shape.intermediate_size + hidden * shape.draft_vocab_size
        self._reporter.line(f"the head has about {weights / 1e6:.1f} M weights; training it takes {weights * 16 / 1e6:.0f} MB")

    def _answers(self, stop: threading.Event) -> list[Answer]:
        requests = self._data.train
        file = AnswerFile(self._folder.answers, {key: one.prompt_token_ids for key, one in requests.items()})
        try:
            if file.missing:
                with self._folder.timed("answers"):
                    engine = engine_around(self._loaded, self._config)
                    width = self._config.max_num_seqs
                    collect(file, engine, requests, self._frontend.info.tokenizer, width, self._reporter, stop)
            return file.in_order()
        finally:
            file.close()

    def _features(self, texts: Sequence[Text], stop: threading.Event) -> FeatureStore:
        dtype = getattr(torch, self._settings.feature_dtype)
        store = FeatureStore(self._folder.features, texts, self._target.hidden_size, dtype)
        rows = sum(text.num_rows for text in texts)
        tokens = sum(len(text.token_ids) - text.prompt_len for text in texts)
        self._reporter.line(f"{len(texts)} answers, {tokens} tokens; their {rows} states take {store.num_bytes / 1e6:.0f} MB")
        if store.missing:
            store.check_disk()
            device, kernels = self._device.type, self._config.cpu_kernels
            attention = backend_for(self._config.attention_backend, self._model.kv_layers, device, kernels)
            with self._folder.timed("features"):
                store.compute(self._model, attention, self._device, self._reporter, stop)
        return store

    def _vocabulary(self, texts: Sequence[Text]) -> DraftVocabulary:
        text, size = self._checkpoint.text, self._settings.draft_vocab_size
        found = choose_vocabulary(texts, size, text.eos_token_ids, self._num_known_ids, text.vocab_size)
        self._reporter.line(
            f"draft vocabulary: {len(found.target_ids)} of {text.vocab_size} ids, {found.coverage:.1%} of the answers' tokens"
        )
        return found

    def _trainer(self, store: FeatureStore, vocabulary: DraftVocabulary) -> Trainer:
        model, device = self._model, self._device
        head = Head(_head_shape(self._target, len(vocabulary.target_ids)), store.scale())
        norm, rows = _norm_and_rows(model, vocabulary.target_ids.to(device))
        head.initialise(self._settings.seed, norm, rows)
        head.to(device)

        def embed(tokens: Tensor) -> Tensor:
            with torch.inference_mode():
                embedded = model.embedding(tokens).to(torch.float32)
            return embedded.clone()  # an inference tensor cannot be part of what has gradients

        return Trainer(head, embed, store, vocabulary.draft_ids(), self._settings, self._folder.checkpoint)

    def _report(
        self,
        answers: Sequence[Answer],
        texts: Sequence[Text],
        vocabulary: DraftVocabulary,
        trainer: Trainer,
        measured: Measured | None,
    ) -> dict[str, Any]:
        ended = [one.finish_reason for one in answers]
        report = {
            "settings": self._made_of,
            "data": {
                "num_answers": len(answers),
                "num_answer_tokens": sum(len(one.token_ids) for one in answers),
                "num_prompt_tokens": sum(len(one.prompt_token_ids) for one in answers),
                "num_trained_on": len(texts),
                "num_left_out": self._data.left_out,
                "finish_reasons": {reason: ended.count(reason) for reason in sorted(set(ended))},
                "draft_vocab_size": len(vocabulary.target_ids),
                "coverage": vocabulary.coverage,
            },
            "num_parameters": sum(parameter.numel() for parameter in trainer.head.parameters()),
            "num_steps": trainer.num_steps,
            "epochs": [tally.as_json() for tally in trainer.place.tallies],
            "held_out": None if measured is None else asdict(measured),
            "seconds": self._folder.times(),
        }
        self._folder.write(self._folder.report, report)
        return self._folder.read(self._folder.report) or {}  # as it will be read from now on


def _trainable(checkpoint: Checkpoint) -> ModelConfig:
    """The target's configuration. Raises `ModelError` for a target that no head can be made for."""
    config, name = checkpoint.config, checkpoint.text.name
    if not isinstance(config, ModelConfig):
        raise ModelError(
            f"MODEL must be one of our own model types, but {name} ({config.model_type}) runs through transformers",
            hint="its states cannot be reached",
        )
    if config.num_layers < MIN_LAYERS:
        raise ModelError(f"MODEL must have at least {MIN_LAYERS} layers, but {name} has {config.num_layers}")
    return config


def _head_shape(target: ModelConfig, draft_vocab_size: int) -> HeadShape:
    return HeadShape(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        norm_eps=target.norm_eps,
        rope_theta=target.rope.theta,
        draft_vocab_size=draft_vocab_size,
    )


@torch.inference_mode()
def _norm_and_rows(model: Decoder, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The final norm's weight, and the head's rows of some ids, in float32 on the CPU.

    A product may have packed its weight away; applied to the unit vectors it gives it back, exactly.
    """
    unit = torch.eye(model.hidden_size, dtype=model.dtype, device=ids.device)
    rows = model.head(unit)[:, ids].T
    return model.norm.weight.to("cpu", torch.float32).clone(), rows.to("cpu", torch.float32).clone()


def _fingerprint(source: ModelSource) -> str:
    """What tells a model's files from another's: sizes, small files, and a sample of the large ones."""
    digest = hashlib.blake2b(digest_size=8)
    files = [source.path] if source.is_gguf else sorted([*source.path.glob("*.json"), *source.path.glob("*.safetensors")])
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name if not source.is_gguf else ''} {size} ".encode())
        with path.open("rb") as file:
            for place in range(16):
                file.seek(max(0, (size - SAMPLED_BYTES) * place // 15))
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()
