"""The small plan and its rows, as the studies' tests have them."""

from tests.bench.conftest import small, store, undisturbed

__all__ = ["small", "store", "undisturbed"]
