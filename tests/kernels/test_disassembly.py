"""What the compiler made of the hot loops: a tile's accumulators stay in registers."""

from __future__ import annotations

import re
import shutil
import subprocess

from slipstream.kernels.cpu.library import Kernels

TILE = re.compile(r"^[0-9a-f]+ <.*\b((?:(?:float_|bfloat16_)?tile|score_rows|mix_columns)<[^>]*>)\(.*>:$")
SPILL = re.compile(r"zmm\d+.*\(%r[sb]p|\(%r[sb]p\).*zmm")


def test_tiles_do_not_spill(library: Kernels) -> None:
    objdump = shutil.which("objdump")
    assert objdump is not None, "objdump must be there: binutils, which g++ needs for its assembler, has it"
    command = [objdump, "--disassemble", "--demangle", "--no-show-raw-insn", str(library.path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spills: dict[str, int] = {}
    tile: str | None = None
    for line in text.splitlines():
        if line.endswith(">:"):
            found = TILE.match(line)
            tile = found[1] if found else None
            if tile:
                spills[tile] = 0
        elif tile and SPILL.search(line):
            spills[tile] += 1
    products, attention = 5 * 6 + 2 * 12, 3 * 6 + 3 * 6 * 3
    assert len(spills) == products + attention, f"tiles that were found: {sorted(spills)}"
    assert {name: count for name, count in spills.items() if count} == {}
