"""Ids in an order of similarity: values that occur with the same values of other columns become neighbors.

A TT table lets ids share slices: all ids of a group share a leading slice, and all ids at one place of their groups a trailing
slice. So ids that share slices should mean similar things. V values of all columns together, K coordinates.

1. `cooccurrence_vectors`: a vector for each value, from a correspondence analysis of all columns together (Greenacre, Theory and
   Applications of Correspondence Analysis, 1984): leading eigenvectors of D^-1/2 Z^T Z D^-1/2, where Z says which values each row
   has, and D how often each value occurs. For two columns these are the singular vectors of their normalized table of counts. D is
   regularized, so that rare values that share a row by chance don't take coordinates (Amini et al., Annals of Statistics 41, 2013).
2. `similarity_order`: bands of frequency, so that the most frequent ids stay first; within a band, groups of similar values by
   recursive bisection along the direction of largest variance (Boley, Data Mining and Knowledge Discovery 2, 1998); within a group,
   values in the order of their differences from the group's mean, so that a place means the same in every group. Small groups suit
   tables of any shape: neighbors remain similar where a shape's digits don't end with the groups.

The vectors themselves are good values for rows to start from, see `comera_rec.training.start`.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, eigsh

COORDINATES = 32
_ORDERED_BY = 16  # leading coordinates; those beyond say little about the whole
_FIRST_BAND, _BAND_GROWTH = 256, 16
_GROUP = 16
_REGULARIZATION = 1
_SAMPLE = 4096  # values that determine a direction


def cooccurrence_vectors(values: np.ndarray, ends: np.ndarray, num_values: int, seed: int = 0) -> np.ndarray:
    """Return a vector for each value, float32 [V, K + 1], from the values of rows.

    The first K coordinates, of falling importance, have length one, or zero for values that don't occur. The last is the logarithm
    of the count, scaled.

    Args:
        values: int32 values of all rows, concatenated; different columns have different values.
        ends: [rows + 1] where the values of each row begin and end.
        num_values: V.
        seed: of the vector from which the solver starts; coordinates of nearly equal importance depend on it.
    """
    rows = csr_array((np.ones(len(values), np.float32), values, ends), shape=(len(ends) - 1, num_values))
    counts = np.bincount(values, minlength=num_values)
    if np.count_nonzero(counts) < 3:
        return np.zeros((num_values, 1), np.float32)
    scale = (1 / np.sqrt(counts + _REGULARIZATION)).astype(np.float32)

    def multiply(x: np.ndarray) -> np.ndarray:
        return scale * (rows.T @ (rows @ (scale * x.ravel().astype(np.float32))))

    operator = LinearOperator((num_values, num_values), matvec=multiply, dtype=np.float32)
    start = np.random.default_rng(seed).standard_normal(num_values).astype(np.float32)
    eigenvalues, eigenvectors = eigsh(operator, k=min(COORDINATES, num_values - 1), which="LA", v0=start, tol=1e-3)
    vectors = (eigenvectors * np.maximum(eigenvalues - 1, 0))[:, ::-1]  # the largest eigenvalue first
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    logarithms = np.log(np.maximum(counts, 1))
    logarithms *= vectors.std() / max(logarithms.std(), 1e-12)
    return np.column_stack([vectors, logarithms]).astype(np.float32)


def similarity_order(vectors: np.ndarray) -> np.ndarray:
    """Return values [M], given in the order of their frequencies with vectors [M, K + 1], in the order of their positions."""
    vectors = np.column_stack([vectors[:, :-1][:, :_ORDERED_BY], vectors[:, -1]])
    bands = np.split(np.arange(len(vectors)), np.flatnonzero(np.diff(band_of(np.arange(len(vectors))))) + 1)
    return np.concatenate([band[_by_similarity(vectors[band])] for band in bands])


def band_of(positions: np.ndarray) -> np.ndarray:
    """Return the band of each position: [0, 256), [256, 4096), [4096, 65536), ... are bands 0, 1, 2, ..."""
    return np.searchsorted(_FIRST_BAND * _BAND_GROWTH ** np.arange(8), positions, side="right")


def _by_similarity(vectors: np.ndarray) -> np.ndarray:
    """Return the order of values within a band."""
    groups = _bisect(vectors, _GROUP)
    differences = np.empty_like(vectors)
    for members in groups:
        differences[members] = vectors[members] - vectors[members].mean(axis=0)
    place = np.empty(len(vectors), np.int64)
    place[np.concatenate(_bisect(differences, max(2, len(vectors) // 256)))] = np.arange(len(vectors))
    return np.concatenate([members[np.argsort(place[members], kind="stable")] for members in groups])


def _bisect(vectors: np.ndarray, most: int) -> list[np.ndarray]:
    """Cut rows into groups of `most` similar ones, the last of them smaller, such that neighboring groups are similar."""
    waiting, groups = [np.arange(len(vectors))], []
    while waiting:
        members = waiting.pop()
        if len(members) <= most:
            groups.append(members)
            continue
        centered = vectors[members] - vectors[members].mean(axis=0)
        sample = centered[:: -(-len(members) // _SAMPLE)]
        direction = np.linalg.eigh(sample.T @ sample)[1][:, -1]
        members = members[np.argsort(centered @ direction, kind="stable")]
        half = max(1, -(-len(members) // most) // 2) * most
        waiting += [members[half:], members[:half]]
    return groups
