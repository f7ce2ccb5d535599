"""Ids in an order of similarity: values that occur with the same values of other columns become neighbors.

A TT table lets ids share slices: all ids of a group share a leading slice, and all ids at one place of their groups a trailing
slice. So ids that share slices should mean similar things. `similarity_order` compares vectors, such as those of
`data_pipeline.cooccurrence`, in bands of frequency, so that the most frequent ids stay first; within a band, it makes groups of
similar values by recursive bisection along the direction of largest variance (Boley, Data Mining and Knowledge Discovery 2, 1998);
within a group, values are in the order of their differences from the group's mean, so that a place means the same in every group.
Small groups suit tables of any shape: neighbors remain similar where a shape's digits don't end with the groups.

M values, K coordinates.
"""

import numpy as np

_ORDERED_BY = 16  # leading coordinates; those beyond say little about the whole
_FIRST_BAND, _BAND_GROWTH = 256, 16
_GROUP = 16
_SAMPLE = 4096  # values that determine a direction


def similarity_order(vectors: np.ndarray) -> np.ndarray:
    """Return values [M], given in the order of their frequencies with vectors [M, K + 1], in the order of their positions."""
    if not len(vectors):
        return np.empty(0, np.int64)
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
