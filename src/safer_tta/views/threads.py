"""Make views in parallel on the cores of a CPU.

Torch draws noise, equalises and transforms to frequencies on one core. With one thread for every view all cores are
used, and inside a thread operators use one core each.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def run_all(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run all jobs without gradients, on as many threads as torch uses and in the caller's inference mode."""
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
    # All threads start now: each sets the number of threads for the whole process too, which is restored here.
    barrier = threading.Barrier(threads)
    list(pool.map(lambda _: barrier.wait(), range(threads)))
    torch.set_num_threads(before)
    return pool


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process does not have these threads
