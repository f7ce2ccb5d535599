"""Distributions of the columns of Criteo's Kaggle log, for synthetic logs that resemble it.

Missing rates and distributions of counts were measured on the log's first 10,000 rows; exponents and shifts were fitted to the
shares of its most frequent values and the number of distinct ones. Cardinalities are those of the whole log.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_COUNT = 23_159_456


@dataclass(frozen=True)
class IntegerSpec:
    """A count floor(exp(mu + sigma z)) + shift for a standard normal z; columns of one missing_group are missing together."""

    mu: float
    sigma: float
    missing_group: str
    shift: int = 0


@dataclass(frozen=True)
class CategorySpec:
    """Zipf-Mandelbrot ranks: P(rank < x) ~ (x + q)^(1 - exponent), up to a constant, over `cardinality` values."""

    cardinality: int
    exponent: float
    shift: float
    missing_group: str = "never"


MISSING_RATES = {
    "never": 0.0, "I1": 0.4481, "I3": 0.2037, "I4": 0.1978, "I5": 0.0493, "I6": 0.2511, "I7": 0.0492, "I8": 0.001, "I12": 0.7735,
    "C3": 0.0357, "C6": 0.1332, "C19": 0.4496, "C22": 0.8182,
}  # fmt: skip
INTEGER_SPECS = {
    "I1": IntegerSpec(0.1, 1.6, "I1"),
    "I2": IntegerSpec(1.5, 2.9, "never", shift=-1),
    "I3": IntegerSpec(2.0, 1.5, "I3"),
    "I4": IntegerSpec(1.45, 1.15, "I4"),
    "I5": IntegerSpec(7.6, 2.2, "I5"),
    "I6": IntegerSpec(3.6, 1.65, "I6"),
    "I7": IntegerSpec(1.2, 1.75, "I7"),
    "I8": IntegerSpec(2.0, 1.1, "I8"),
    "I9": IntegerSpec(3.7, 1.55, "I7"),
    "I10": IntegerSpec(0.0, 0.6, "I1"),
    "I11": IntegerSpec(0.45, 1.05, "I7"),
    "I12": IntegerSpec(-0.9, 1.4, "I12"),
    "I13": IntegerSpec(1.65, 1.2, "I4"),
}
CATEGORY_SPECS = {
    "C1": CategorySpec(1460, 1.95, 0.85),
    "C2": CategorySpec(583, 2.15, 15.96),
    "C3": CategorySpec(10131227, 1.05, 1.63, "C3"),
    "C4": CategorySpec(2202608, 1.10, 1.38, "C3"),
    "C5": CategorySpec(305, 2.70, 1.18),
    "C6": CategorySpec(24, 2.70, 1.60, "C6"),
    "C7": CategorySpec(12517, 1.30, 69.20),
    "C8": CategorySpec(633, 2.30, 1.00),
    "C9": CategorySpec(3, 1.40, 0.04),
    "C10": CategorySpec(93145, 1.05, 0.17),
    "C11": CategorySpec(5683, 1.50, 69.20),
    "C12": CategorySpec(8351593, 1.05, 1.38, "C3"),
    "C13": CategorySpec(3194, 1.45, 49.95),
    "C14": CategorySpec(27, 2.95, 2.66),
    "C15": CategorySpec(14992, 1.70, 81.45),
    "C16": CategorySpec(5461306, 1.10, 2.66, "C3"),
    "C17": CategorySpec(10, 1.05, 0.32),
    "C18": CategorySpec(5652, 1.85, 36.06),
    "C19": CategorySpec(2173, 1.20, 0.04, "C19"),
    "C20": CategorySpec(4, 2.85, 5.10, "C19"),
    "C21": CategorySpec(7046547, 1.05, 1.00, "C3"),
    "C22": CategorySpec(18, 3.00, 2.00, "C22"),
    "C23": CategorySpec(15, 2.80, 2.66),
    "C24": CategorySpec(286181, 1.20, 1.38, "C3"),
    "C25": CategorySpec(105, 3.00, 3.50, "C19"),
    "C26": CategorySpec(142572, 1.20, 4.33, "C19"),
}
