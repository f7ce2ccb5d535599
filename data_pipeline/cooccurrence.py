"""A vector for each value of a log: values that occur with the same values of other columns get similar ones.

This is a correspondence analysis of all columns together (Greenacre, Theory and Applications of Correspondence Analysis, 1984):
leading eigenvectors of D^-1/2 Z^T Z D^-1/2, where Z says which values each row has, and D how often each value occurs. For two
columns these are the singular vectors of their normalized table of counts. D is regularized, so that rare values that share a row
by chance don't take coordinates (Amini et al., Annals of Statistics 41, 2013).

Ids are ordered by these vectors (`data_pipeline.similarity`), which are also good values for rows to start from
(`comera_rec.training.start`). V values of all columns together, K coordinates.
"""

import threading

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, eigsh
from threadpoolctl import threadpool_limits

COORDINATES = 32
_LOCK = threading.Lock()
_REGULARIZATION = 1


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
    rng = np.random.default_rng(seed)
    start = rng.standard_normal(num_values).astype(np.float32)
    with _LOCK, threadpool_limits(1):  # sums depend on the number of BLAS's threads
        eigenvalues, eigenvectors = eigsh(operator, k=min(COORDINATES, num_values - 1), which="LA", v0=start, tol=1e-3, rng=rng)
    vectors = (eigenvectors * np.maximum(eigenvalues - 1, 0))[:, ::-1]  # the largest eigenvalue first
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    logarithms = np.log(np.maximum(counts, 1))
    logarithms *= vectors.std() / (logarithms.std() if logarithms.std() > 1e-6 else 1.0)
    return np.column_stack([vectors, logarithms]).astype(np.float32)
