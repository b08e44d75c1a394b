"""What every test relies on: one thread, no network, no settings from the outside, and examples drawn the same every time."""

from __future__ import annotations

import os
import signal

# Before torch is imported: the order of sums must not depend on the machine, and workers must not fight for its cores.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# Where fetched models are kept, and the switch that masks what the CPU can do.
KEPT = ("SLIPSTREAM_CACHE", "SLIPSTREAM_CPU_ISA")
for _name in [name for name in os.environ if name.startswith("SLIPSTREAM_") and name not in KEPT]:
    del os.environ[_name]

# A shell lets what it starts in the background ignore Ctrl-C, which some tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import settings  # noqa: E402 - behind the environment on purpose

settings.register_profile("slipstream", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("slipstream")
