"""Collections on a GPU equal those on the CPU, whatever the lengths of features, and their steps don't wait for the device."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.optim import apply_optimizer_in_backward

from comera_rec.recsys import TTEmbeddingBagCollection, TTEmbeddingBagConfig
from comera_rec.tt import TTShape

pytestmark = pytest.mark.gpu

BATCH = 5
TABLES = {"one": ("a",), "two": ("b", "c"), "three": ("d",)}


def make(dense: tuple[str, ...], *, weighted: bool = False) -> TTEmbeddingBagCollection:
    torch.manual_seed(0)
    configs = [
        TTEmbeddingBagConfig(
            name=name, num_embeddings=50 + 10 * len(names), embedding_dim=16, feature_names=list(names),
            shape=None if name in dense else TTShape.for_table(50 + 10 * len(names), 16, tt_ranks=4, order=2),
        )
        for name, names in TABLES.items()
    ]  # fmt: skip
    return TTEmbeddingBagCollection(configs, is_weighted=weighted)


def draw(keys: str = "abcd", *, weighted: bool = False, device: str = "cpu") -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (len(keys) * BATCH,), dtype=torch.int32)
    values = torch.randint(50, (int(lengths.sum()),))
    weights = torch.rand(len(values)) if weighted else None
    return KeyedJaggedTensor(keys=list(keys), values=values, lengths=lengths, weights=weights).to(torch.device(device))


@pytest.mark.parametrize("keys", ["abcd", "dcba"])
@pytest.mark.parametrize(("dense", "weighted"), [((), False), ((), True), (("two",), False), (("one", "two", "three"), False)])
def test_a_gpu_collection_equals_one_on_the_cpu(keys: str, dense: tuple[str, ...], weighted: bool) -> None:
    on_cpu = make(dense, weighted=weighted)
    on_gpu = copy.deepcopy(on_cpu).to("cuda")
    batch = draw(keys, weighted=weighted)
    moved = batch.to(torch.device("cuda"))  # before its first use, which leaves tensors in it that TorchRec doesn't move
    expected, actual = on_cpu(batch), on_gpu(moved)
    assert actual.keys() == expected.keys()
    torch.testing.assert_close(actual.values().cpu(), expected.values(), rtol=1e-4, atol=1e-5)
    expected.values().sin().sum().backward()
    actual.values().sin().sum().backward()
    for one, other in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("mode", ["fatal", "warning"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_step_does_not_wait_for_the_device(optimizer: type[torch.optim.Optimizer], mode: str) -> None:
    collection = make(()).to("cuda")
    collection.bounds_check.mode = mode
    apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.1})
    batches = [draw(device="cuda") for _ in range(4)]
    if mode != "fatal":
        batches[2].values().fill_(-1)
    torch.cuda.synchronize()
    for number, batch in enumerate(batches):
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first step compiles, and makes states
        try:
            collection(batch).values().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert collection.bounds_check.num_bad_ids == (len(batches[2].values()) if mode != "fatal" and number >= 2 else 0)


FATAL = """
import sys; sys.path.insert(0, {folder!r})
from test_collection_gpu import draw, make, torch
batch = draw(device="cuda")
batch.values()[0] = 1000
make({dense!r}).to("cuda")(batch)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("dense", [(), ("one",)])
def test_a_bad_id_ends_the_process_if_it_is_fatal(dense: tuple[str, ...]) -> None:
    program = FATAL.format(folder=str(Path(__file__).parent), dense=dense)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode
    assert "device-side assert" in ended.stderr
