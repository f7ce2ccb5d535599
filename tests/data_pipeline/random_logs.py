"""Small random logs as rows of text cells."""

from __future__ import annotations

import random

Rows = list[list[str]]


def random_rows(count: int, *, labeled: bool = True, seed: int = 0) -> Rows:
    """Draw rows with frequent, rare and single values, and about a quarter of the cells missing."""
    draw = random.Random(seed)

    def count_cell() -> str:
        return draw.choice(["", str(draw.randint(-2, 9)), str(int(draw.expovariate(0.001)))])

    def category_cell() -> str:
        return draw.choice(["", "0", f"{draw.randint(1, 4):08x}", f"{draw.getrandbits(32):08x}", f"{draw.randint(0, 40):X}"])

    return [
        ([str(draw.randint(0, 1))] if labeled else []) + [count_cell() for _ in range(13)] + [category_cell() for _ in range(26)]
        for _ in range(count)
    ]


def to_text(rows: Rows, newline: str = "\n") -> bytes:
    return "".join("\t".join(row) + newline for row in rows).encode()
