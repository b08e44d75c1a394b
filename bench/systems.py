"""What is not Slipstream: other engines that take turns with it. slipstream/cli/timed_engine.py has ours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.cli.timed_engine import Ids, Sample
from slipstream.errors import ConfigError


class Transformers:
    """`generate` of transformers: one static batch, the library's own attention and cache, the same weights and dtype."""

    name = "transformers"

    def __init__(self, path: str, is_gguf: bool, dtype: torch.dtype) -> None:
        import os

        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise ConfigError(
                f"transformers must be installed to be compared with, but got: {error}",
                hint="pip install 'slipstream[transformers]', or --no-transformers",
            ) from None
        where: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if is_gguf:
            where = {"pretrained_model_name_or_path": os.path.dirname(path), "gguf_file": os.path.basename(path)}
        self._model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype).eval()

    def run(self, prompts: Sequence[Ids], output_len: int) -> tuple[Sample, list[Ids]]:
        """Answer all prompts at once; see `System`."""
        from transformers import GenerationConfig

        # No end token: every answer has `output_len` tokens, as with ignore_eos.
        settings = GenerationConfig(do_sample=False, max_new_tokens=output_len, eos_token_id=None, pad_token_id=0)
        wall, cpu = time.perf_counter(), time.process_time()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        answers = out[:, ids.shape[1] :].tolist()
        sample = Sample(time.perf_counter() - wall, time.process_time() - cpu, sum(map(len, answers)))
        return sample, answers
