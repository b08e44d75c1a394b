"""Words and columns for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows with their columns under each other; those in `right` end at the same place instead of beginning there."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """Bytes in decimal units: 98.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def count_text(count: int) -> str:
    """A number of parameters: 135M, 1.5B."""
    if count < 10**6:
        return str(count)
    return f"{count / 10**6:.0f}M" if count < 10**9 else f"{count / 10**9:.2f}B"


def duration_text(seconds: float) -> str:
    """How long something takes: 40 s, 12 min, 2.3 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def ago_text(seconds: float) -> str:
    """How long ago: just now, 5 minutes ago, 3 days ago."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (count := int(seconds // length)) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
