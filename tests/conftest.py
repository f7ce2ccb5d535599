"""Fixtures for all tests: poisoned uninitialized memory, fixed seeds, and a data set."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

RUN = """
output = "{output}"
seed = 3
[data]
path = "{data}"
batch_size = 128
shuffle_rows = 512
[model]
embedding_dim = 8
dense_arch = [32]
over_arch = [32]
[tables]
tt_ranks = 4
min_rows = 100
[linears]
tt_ranks = 4
min_features = 32
[training]
steps = 12
log_every = 3
checkpoint_every = 6
"""
TOGETHER = "tests/serving/"  # tests that share models that take long to compile
if "PYTEST_XDIST_WORKER" in os.environ:  # commands that tests start share cores with other workers
    os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)  # tensors are small: more threads would only wait for each other
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products on a GPU need it
# The fork server imports once what tests need in other processes; forking from it takes milliseconds.
multiprocessing.set_forkserver_preload(
    ["torch._dynamo", "comera_rec.training.trainer", "comera_rec.report.page", "comera_rec.cli.data", "pandas", "pytest"]
)
settings.register_profile("comera", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("comera")


class _Scheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER if nodeid.startswith(TOGETHER) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Scheduling:
    """Let one of several workers start with the tests that belong together, the largest group."""
    return _Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collections, which would take most of a second each."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let libraries that track their objects see them collected at exit."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _poisoned_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN (integers: the largest value), so that it can't be mistaken for zeros."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting() -> Iterator[None]:
    """Leave files to the system's cache, which outlives killed processes: waiting for disks takes longer than many tests.

    Keep what the fork server imports: programs that need less of it would make all later processes slow.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        patch.setattr(forkserver, "set_forkserver_preload", lambda modules: None)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def on_threads() -> Iterator[Callable]:
    """`on_threads(count, function)` -> the function's result when torch has that many threads."""

    def run(count: int, function: Callable) -> object:
        torch.set_num_threads(count)
        return function()

    yield run
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 4,000 synthetic rows, with its log beside it."""
    from data_pipeline.preprocess import PreprocessOptions, preprocess  # kernels are also tested without what these need
    from data_pipeline.synth import SynthOptions, synth

    folder = tmp_path_factory.mktemp("data_set")
    synth(SynthOptions(rows=4000, output=folder / "train.txt", seed=1, scale=0.001))
    preprocess(PreprocessOptions(inputs=(folder / "train.txt",), output=folder / "data"))
    return folder / "data"
