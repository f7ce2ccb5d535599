"""Shared by all tests: poisoned uninitialised memory, fixed seeds, and random jagged batches."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

try:
    from torchrec import KeyedJaggedTensor
except ImportError:  # tests of kernels run without it, see benchmarks/gpu
    KeyedJaggedTensor = None  # type: ignore[assignment, misc]

TOGETHER = "tests/serving/"  # tests that share models which take long to compile
if "PYTEST_XDIST_WORKER" in os.environ:  # commands that tests start share the cores with other workers'
    os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)  # tensors here are small: threads would only wait for each other, long where the cores are shared
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic products on a GPU need
settings.register_profile("comera", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("comera")


class _Scheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER if nodeid.startswith(TOGETHER) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Scheduling:
    """Of several workers one begins with the tests that go together, the largest group."""
    return _Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of garbage collection, which would take most of a second each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let libraries that count their objects find them collected at exit."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN (integers: the largest), so that reading it cannot pass for a zero."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def on_threads() -> Iterator[Callable]:
    """`on_threads(count, function)` -> what the function returns where torch has that many threads."""

    def run(count: int, function: Callable) -> object:
        torch.set_num_threads(count)
        return function()

    yield run
    torch.set_num_threads(1)


def _random_jagged(
    features: Mapping[str, int], batch: int, *, weighted: bool = False, longest: int = 4, seed: int = 0
) -> KeyedJaggedTensor:
    """Bags of 0 to `longest` ids below each feature's limit; the first and the last id of every table occur, ids repeat."""
    generator = torch.Generator().manual_seed(seed)
    lengths, values = [], []
    for limit in features.values():
        length = torch.randint(0, longest + 1, (batch,), generator=generator)
        ids = torch.randint(0, limit, (int(length.sum()),), generator=generator)
        ids[:1] = 0
        ids[-2:] = limit - 1
        lengths.append(length)
        values.append(ids)
    flat = torch.cat(values)
    weights = torch.rand(len(flat), generator=generator) + 0.5 if weighted else None
    return KeyedJaggedTensor(keys=list(features), values=flat, lengths=torch.cat(lengths), weights=weights)


@pytest.fixture(scope="session")
def random_jagged() -> Callable[..., KeyedJaggedTensor]:
    """`random_jagged({feature: limit}, batch, weighted=..., longest=..., seed=...)` -> KeyedJaggedTensor."""
    return _random_jagged
