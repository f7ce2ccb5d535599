"""A click model with a known answer: columns distributed like Criteo's, and the exact probability of every label.

    logit = b + sum_i a_i s(I_i) + sum_c w_c(C_c) + sum_{c<c'} <v_c(C_c), v_c'(C_c')>

s is the standardized logarithm of a count. The effect w and the latent vector v of a value are Gaussians hashed from (seed, column,
value), so no table of them exists. They shrink with the value's frequency rank by the power `decay`, so that learnable effects
dominate. The pairs are summed by the identity of factorization machines (Rendle, ICDM 2010, section III.B): with s = sum_c v_c,
sum_{c<c'} <v_c, v_c'> = (|s|^2 - sum_c |v_c|^2) / 2. Missing cells contribute nothing.

With groups, values that occur together have something in common, as an ad's campaign and advertiser have. Each row has a topic,
each value of a column belongs to a group, which is a range of topics, and a cell has a value of the row's topic with the
probability `groups`. This is also the share of the group in the variance of w, and it doesn't shrink with the rank: rare values
inherit from their group. Values of similar frequency are spread over groups evenly, few groups for frequent values, so
frequencies hardly change.

Arrays without a suffix hold one number per row. Suffixes: B rows, N normals, D latent dimensions. Categories are represented by
their frequency ranks, from 0.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from data_pipeline.splits import mix64


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


# Columns of Criteo's Kaggle log: missing rates and distributions of counts as in its first 10,000 rows, exponents and shifts fitted
# to the shares of its most frequent values and the number of distinct ones, cardinalities of the whole log.
LARGEST_COUNT = 23_159_456
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
LABEL_RATE = 0.25
# Standard deviations of the logit's three parts: the best AUC is then about 0.80, and that of the counts alone about 0.65.
PART_STDS = (0.7, 0.9, 0.75)
# The effects of the value at rank k have standard deviations proportional to (1 + k / HEAD)^-decay.
HEAD = 100
DECAY = 0.5
# Pairs of few-valued columns can be learned from a few hundred thousand rows.
PAIRED_COLUMNS = ("C2", "C5", "C8", "C9", "C14", "C17", "C20", "C23")
_TOPICS = 256
_PILOT_ROWS = 20_000
# Uniform draws per row: one per category, two per pair of normals, one per missing group, one for the label; with groups, one for
# the topic and one per category for whether the cell follows it.
_RANKS_END = len(CATEGORY_SPECS)
_NORMALS_END = _RANKS_END + len(INTEGER_SPECS) + len(INTEGER_SPECS) % 2
_MISSING_END = _NORMALS_END + len(MISSING_RATES)
DRAWS = _MISSING_END + 1


@dataclass(frozen=True, kw_only=True)
class PlantedRows:
    """Rows of the model: labels, their true probabilities, and each column's cells and missing mask."""

    label: np.ndarray
    probability: np.ndarray
    integers: dict[str, np.ndarray]
    categories: dict[str, np.ndarray]
    missing: dict[str, np.ndarray]


class PlantedModel:
    """The click model determined by a seed, a scale and a decay.

    Args:
        seed: chooses effects, latent vectors and the values that stand for ranks.
        scale: multiplies the cardinalities of Criteo's Kaggle log; each column keeps at least 3 values.
        decay: how fast effects and latent vectors shrink with frequency rank; with 0 those of rare values are as large as others.
        groups: how much values of a group have in common, from 0, nothing, to 1.
    """

    def __init__(self, *, seed: int, scale: float, decay: float = DECAY, groups: float = 0.0) -> None:
        self._decay, self._groups = np.float32(decay), np.float32(groups)
        self.draws = DRAWS + (1 + len(CATEGORY_SPECS) if groups else 0)
        self._cardinalities = {name: max(3, round(spec.cardinality * scale)) for name, spec in CATEGORY_SPECS.items()}
        pilot = np.random.default_rng([seed, 1])
        self._keys = dict(zip(CATEGORY_SPECS, pilot.integers(2**63, size=len(CATEGORY_SPECS), dtype=np.uint64), strict=True))
        self._integer_weights = pilot.choice([-1, 1], len(INTEGER_SPECS)) * pilot.uniform(0.5, 1, len(INTEGER_SPECS))
        self._normal_quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / 2**16) for i in range(2**16)], dtype=np.float32)
        # Fixing each part's spread on a pilot sample makes every seed and scale equally hard.
        integers, ranks, missing = self._draw_cells(pilot.random((_PILOT_ROWS, self.draws)))
        parts = self._parts(integers, ranks, missing)
        self._factors = [np.float64(std / part.std()) for std, part in zip(PART_STDS, parts, strict=True)]
        self._bias = _bias_for(LABEL_RATE, self._combine(parts))

    def rows(self, uniform: np.ndarray) -> PlantedRows:
        """Compute rows from uniform draws [B, draws] in [0, 1)."""
        integers, ranks, missing = self._draw_cells(uniform)
        probability = _sigmoid(self._combine(self._parts(integers, ranks, missing)) + self._bias)
        return PlantedRows(
            label=(uniform[:, DRAWS - 1] < probability).astype(np.int8),
            probability=probability,
            integers=integers,
            categories={name: _spell(rank, self._keys[name]) for name, rank in ranks.items()},
            missing=missing,
        )

    def _draw_cells(self, uniform: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Draw integers, ranks and missing masks, each by column."""
        ranks = {
            name: _draw_ranks(uniform[:, i], spec, self._cardinalities[name])
            for i, (name, spec) in enumerate(CATEGORY_SPECS.items())
        }
        if self._groups:
            topic = (uniform[:, DRAWS] * _TOPICS).astype(np.uint32)
            for i, (name, rank) in enumerate(ranks.items(), start=DRAWS + 1):
                moved = _with_topic(rank, topic, self._keys[name])
                follows = (uniform[:, i] < self._groups) & (moved < self._cardinalities[name])
                ranks[name] = np.where(follows, moved, rank)
        normals_BN = _box_muller(uniform[:, _RANKS_END:_NORMALS_END])
        integers = {}
        for i, (name, spec) in enumerate(INTEGER_SPECS.items()):
            count = np.minimum(np.exp(spec.mu + spec.sigma * normals_BN[:, i]), LARGEST_COUNT).astype(np.int32)
            integers[name] = count + np.int32(spec.shift)
        groups = uniform[:, _NORMALS_END:_MISSING_END] < np.array(list(MISSING_RATES.values()))
        by_group = dict(zip(MISSING_RATES, groups.T, strict=True))
        missing = {name: by_group[spec.missing_group] for name, spec in (INTEGER_SPECS | CATEGORY_SPECS).items()}
        return integers, ranks, missing

    def _parts(
        self, integers: dict[str, np.ndarray], ranks: dict[str, np.ndarray], missing: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the logit's parts before scaling: counts, main effects, pairs."""
        rows = len(integers["I1"])
        count_part, main_part = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        for (name, spec), weight in zip(INTEGER_SPECS.items(), self._integer_weights, strict=True):
            logarithm = np.log1p((integers[name] - spec.shift).astype(np.float32))
            count_part += np.where(missing[name], 0, np.float32(weight / spec.sigma) * (logarithm - np.float32(max(spec.mu, 0))))
        sum_DB = np.zeros((4, rows), np.float32)
        squares = np.zeros(rows, np.float32)
        for name, rank in ranks.items():
            size = np.where(missing[name], 0, (1 + rank.astype(np.float32) / HEAD) ** -self._decay)
            mixed = mix64(rank.astype(np.uint64) + self._keys[name])
            effect = size * self._normal_quantiles[mixed >> np.uint64(48)]
            if self._groups:
                shared = np.where(missing[name], 0, self._normal_quantiles[_hash_groups(rank, self._keys[name]) >> np.uint64(48)])
                effect = np.sqrt(1 - self._groups) * effect + np.sqrt(self._groups) * shared
            main_part += effect
            if name in PAIRED_COLUMNS:
                quantile_numbers_DB = mix64(mixed).view(np.uint16).reshape(-1, 4).T
                latent_DB = size * self._normal_quantiles[quantile_numbers_DB]
                sum_DB += latent_DB
                squares += np.square(latent_DB).sum(axis=0)
        return count_part, main_part, (np.square(sum_DB).sum(axis=0) - squares) / 2

    def _combine(self, parts: tuple[np.ndarray, ...]) -> np.ndarray:
        counts, main, pairs = (factor * part for factor, part in zip(self._factors, parts, strict=True))
        return counts + main + pairs


def _draw_ranks(uniform: np.ndarray, spec: CategorySpec, cardinality: int) -> np.ndarray:
    """Draw uint32 ranks by inverting P(rank < x) = (q^e - (x + q)^e) / (q^e - (K + q)^e), e = 1 - exponent."""
    e = 1 - spec.exponent
    first, last = spec.shift**e, (cardinality + spec.shift) ** e
    rank: np.ndarray = (first + uniform * (last - first)) ** (1 / e) - spec.shift
    # Rounding may exceed either end.
    return rank.clip(0, cardinality - 1).astype(np.uint32)


def _block_of(rank: np.ndarray, key: np.uint64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first rank of each rank's block, its size G, and which of its G groups its first rank belongs to.

    A block has one value of each group. Four blocks cover the ranks from one power of two to the next, until G is `_TOPICS`.
    """
    octave = np.frexp(np.maximum(rank, 1))[1] - 1
    size = np.left_shift(np.uint32(1), np.clip(octave - 2, 0, _TOPICS.bit_length() - 1).astype(np.uint32))
    first = rank // size * size
    return first, size, (mix64(first.astype(np.uint64) + ~key) >> np.uint64(32)).astype(np.uint32)


def _with_topic(rank: np.ndarray, topic: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return the rank in the same block whose group has the topic."""
    first, size, shift = _block_of(rank, key)
    moved: np.ndarray = first + (topic * size // _TOPICS - shift & size - 1)
    return moved


def _hash_groups(rank: np.ndarray, key: np.uint64) -> np.ndarray:
    """Hash each rank's group, which stands for a range of topics: uint64."""
    first, size, shift = _block_of(rank, key)
    group = rank - first + shift & size - 1
    return mix64(mix64((size + group).astype(np.uint64)) + key)


def _box_muller(uniform: np.ndarray) -> np.ndarray:
    """Turn an even number of columns of uniforms into as many standard normals."""
    half = uniform.shape[1] // 2
    radius_BN = np.sqrt(-2 * np.log1p(-uniform[:, :half]))
    angle_BN = 2 * np.pi * uniform[:, half:]
    return np.concatenate([radius_BN * np.cos(angle_BN), radius_BN * np.sin(angle_BN)], axis=1)


def _spell(rank: np.ndarray, key: np.uint64) -> np.ndarray:
    """Map ranks to uint32 category values by a bijection (murmur3's finalizer), so that no two ranks share a value."""
    x = rank ^ np.uint32(key & np.uint64(0xFFFFFFFF))
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    odds: np.ndarray = np.exp(-x)
    return 1 / (1 + odds)


def _bias_for(rate: float, logit: np.ndarray) -> float:
    """Find the b for which sigmoid(logit + b) has the mean `rate`, by bisection."""
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(logit + middle).mean() < rate else (low, middle)
    return low
