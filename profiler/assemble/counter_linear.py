"""Linear algebra of some hundreds of unknowns, in tiles.

A BLAS spreads even such small work over threads, which on a busy machine wait for each other a hundred times longer
than they work. Tiles are too small for it to do so (OpenBLAS: products of up to 64³).

Non-negativity by block principal pivoting: J. Kim and H. Park, "Fast nonnegative matrix factorization: an
active-set-like method and comparisons", SIAM J. Sci. Comput. 33 (2011), section 3.
"""

from __future__ import annotations

import numpy as np

from spikeprof.profiler.assemble.counter_overlap import Floats

_TILE = 60
_PIVOTS_MAX, _FULL_EXCHANGES, _TOLERANCE = 100, 3, 1e-9


def times(left: Floats, right: Floats) -> Floats:
    """The matrix product."""
    product = np.zeros((left.shape[0], right.shape[1]))
    for i in range(0, left.shape[0], _TILE):
        for j in range(0, right.shape[1], _TILE):
            for k in range(0, left.shape[1], _TILE):
                tile = left[i : i + _TILE, k : k + _TILE] @ right[k : k + _TILE, j : j + _TILE]
                product[i : i + _TILE, j : j + _TILE] += tile
    return product


def applied(matrix: Floats, vector: Floats) -> Floats:
    """The matrix times the vector."""
    return np.asarray(np.einsum("ij,j->i", matrix, vector))


def inverse(matrix: Floats) -> Floats:
    """The inverse of a symmetric, positive definite matrix, by way of its Cholesky factor."""
    size, rest = len(matrix), matrix.copy()
    lower, inverted = np.zeros_like(matrix), np.zeros_like(matrix)
    for begin in range(0, size, _TILE):
        before, tile, below = slice(0, begin), slice(begin, begin + _TILE), slice(begin + _TILE, size)
        own = np.linalg.inv(np.linalg.cholesky(rest[tile, tile]))
        lower[below, tile] = times(rest[below, tile], own.T)
        rest[below, below] -= times(lower[below, tile], lower[below, tile].T)
        inverted[tile, before] = -times(own, times(lower[tile, before], inverted[before, before]))
        inverted[tile, tile] = own
    return times(inverted.T, inverted)


def nonnegative(inverted: Floats, right: Floats, bound: int) -> Floats:
    """The x that minimises ``x·matrix·x / 2 - right·x`` with its first ``bound`` elements not negative.

    ``inverted`` is the inverse of the matrix, which is symmetric and positive definite.
    """
    unbound = applied(inverted, right)
    zero = np.zeros(bound, bool)
    fewest, left, x = bound + 1, _FULL_EXCHANGES, unbound
    for _ in range(_PIVOTS_MAX):
        x, slope = unbound, np.zeros(0)
        held = np.flatnonzero(zero)
        if len(held):
            slope = _solved(inverted[np.ix_(held, held)], -unbound[held])
            x = unbound + applied(inverted[:, held], slope)
        wrong = ~zero & (x[:bound] < -_TOLERANCE * np.abs(x).max(initial=0))
        wrong[held] = slope < -_TOLERANCE * np.abs(right).max(initial=0)
        count = int(np.count_nonzero(wrong))
        if not count:
            break
        if count < fewest:
            fewest, left = count, _FULL_EXCHANGES
        elif left:
            left -= 1
        else:  # exchanging all at once goes round in circles: the last one alone does not
            wrong[: np.flatnonzero(wrong)[-1]] = False
        zero ^= wrong
    x = x.copy()
    x[:bound] = np.where(zero, 0, np.maximum(x[:bound], 0))
    return x


def _solved(matrix: Floats, right: Floats) -> Floats:
    if len(matrix) <= _TILE:
        return np.asarray(np.linalg.solve(matrix, right))
    return applied(inverse(matrix), right)
