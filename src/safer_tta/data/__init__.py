"""Images of several domains, and streams of them under attack."""

from ..errors import DataError, StoreError
from .domains import Dataset, Domain, open_dataset
from .store import ArrayStore
from .streams import Batch, Stream, StreamSpec, excerpt

__all__ = [
    "ArrayStore",
    "Batch",
    "DataError",
    "Dataset",
    "Domain",
    "StoreError",
    "Stream",
    "StreamSpec",
    "excerpt",
    "open_dataset",
]
