"""The mask port: the one place where a step needs the host. It knows which rows are constrained; the worker alone has matchers.

    device     propose ──► forward ───────────► verify ──► ...
                  │ draft                ▲ bits    │ tokens
    worker        └─► advance, fill ─────┘         └─► advance: where did the grammar close?

Steps without a constrained row never touch it.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import torch

from slipstream.engine.plan import Admit, IntArray, Retire, StepPlan
from slipstream.observe.guard import declared
from slipstream.sampling.grammar import MaskWorker
from slipstream.sampling.nodes import GrammarMasks
from slipstream.speculate.base import Verdict
from slipstream.speculate.verify import SampledRows
