"""Views made side by side on the cores of a CPU.

Drawing noise, equalising and transforming to frequencies use one core each, whatever the batch. A thread for every
view uses all of them; inside a thread operators then keep to one core, so that nothing is in each other's way.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def run_all(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Every job, on as many threads as torch uses; in the modes (no gradients, inference) of the caller."""
    threads = min(torch.get_num_threads(), len(jobs))
    if threads < 2:
        return [job() for job in jobs]
    inference = torch.is_inference_mode_enabled()

    def run(job: Callable[[], T]) -> T:
        with torch.inference_mode(inference), torch.no_grad():
            return job()

    return list(_pool(threads).map(run, jobs))


@functools.lru_cache(maxsize=8)
def _pool(threads: int) -> ThreadPoolExecutor:
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "safer-tta-views", initializer=lambda: torch.set_num_threads(1))
    # All threads start now: setting their number sets the process's default too, which is put back here.
    barrier = threading.Barrier(threads)
    list(pool.map(lambda _: barrier.wait(), range(threads)))
    torch.set_num_threads(before)
    return pool


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of these threads
