"""The assignment problem: match rows to columns one to one so that the sum of what is matched is largest.

This is the Hungarian method with potentials, in O(n³): rows join one after the other, each by a shortest path through
the matches so far.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def match(gains: Tensor) -> Tensor:
    """Return for every row of a square matrix (K,K) its own column, (K,); the sum of their gains is the largest one."""
    columns = _match(-gains.double().cpu().numpy())
    return torch.from_numpy(columns).to(gains.device)


def _match(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the column of every row at the least total cost. Row and column 0 of the tables stand for "none"."""
    size = len(costs)
    of_row, of_column = np.zeros(size + 1), np.zeros(size + 1)  # the potentials
    row_of = np.zeros(size + 1, dtype=np.int64)
    for row in range(1, size + 1):
        row_of[0], column = row, 0
        shortest, before = np.full(size + 1, np.inf), np.zeros(size + 1, dtype=np.int64)
        used = np.zeros(size + 1, dtype=bool)
        while row_of[column]:
            used[column] = True
            reduced = costs[row_of[column] - 1] - of_row[row_of[column]] - of_column[1:]
            nearer = ~used[1:] & (reduced < shortest[1:])
            shortest[1:][nearer], before[1:][nearer] = reduced[nearer], column
            column = int(np.where(used, np.inf, shortest).argmin())
            gap = shortest[column]
            of_row[row_of[used]] += gap
            of_column[used] -= gap
            shortest[~used] -= gap
        while column:  # along the path, every column takes the row of the one before it
            row_of[column] = row_of[before[column]]
            column = int(before[column])
    columns = np.empty(size, dtype=np.int64)
    columns[row_of[1:] - 1] = np.arange(size)
    return columns
