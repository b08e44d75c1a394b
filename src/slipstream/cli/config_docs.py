"""docs/configuration.md, made from the fields of `EngineConfig`. `scripts/config-docs` writes it."""

from __future__ import annotations

from typing import Any

from slipstream.cli.flags import setting_values
from slipstream.config import GROUPS, EngineConfig, env_name, field_group, flag_name

_INTRODUCTION = """\
# Configuration

<!-- Made by scripts/config-docs from src/slipstream/config.py. Change it there. -->

Every setting has one name. `max_num_seqs` is `--max-num-seqs` as a flag of `slipstream serve`, `SLIPSTREAM_MAX_NUM_SEQS` as a
variable, `max_num_seqs = 8` in a config file and `max_num_seqs=8` as an argument of `LLM` and `EngineConfig`. What is said in
several places is taken from the first of:

1. flags,
2. `SLIPSTREAM_*` variables (an empty one counts as not set),
3. the TOML file that `--config FILE` or `SLIPSTREAM_CONFIG` names,
4. defaults.

`LLM(...)` and `EngineConfig(...)` look at their arguments alone. A setting that does not exist, or a value that cannot hold, ends
the start with a message that names the flag or file; nothing is rounded. A variable that is no setting is told as a warning: it
may be somebody else's.

What is `on|off` here is a flag and its opposite on the command line, `--debug` and `--no-debug`. What may be repeated is a flag
given several times, words separated by spaces in a variable, and a list in a config file.

```toml
# slipstream.toml
model = "smollm2-135m"
max_num_seqs = 8
api_key = "secret"
```

`SLIPSTREAM_CACHE` names the folder of fetched models and of compiled kernels; by default it is `slipstream` in the user's cache
folder. `CXX` names the kernels' compiler, by default `g++`, `c++` or `clang++`; `SLIPSTREAM_CPU_ISA=none` switches them off.
"""


def reference() -> str:
    """The whole file."""
    parts = [_INTRODUCTION]
    for group in GROUPS:
        rows = [_row(name) for name in EngineConfig.model_fields if field_group(name) == group]
        parts.append(f"\n## {group}\n\n| flag | values | default | |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def _row(name: str) -> str:
    field = EngineConfig.model_fields[name]
    values = setting_values(field.annotation).replace("|", r"\|")
    return f"| `{flag_name(name)}`<br>`{env_name(name)}` | {values} | {_default(field.default)} | {field.description} |"


def _default(value: Any) -> str:
    if value in (None, ()):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


if __name__ == "__main__":
    print(reference(), end="")
