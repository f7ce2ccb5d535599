"""The quality benchmark: methods take the bytes that they claim, and folders are checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.quality.codes import Clustered, MultiGranular
from benchmarks.quality.data_sets import DataSet, ImplicitFeedback, Rows
from benchmarks.quality.embeddings import MIN_ROWS, PER_TABLE, Embeddings, shares
from benchmarks.quality.models import Model, Task, labeled_by, train
from benchmarks.quality.pruning import Thresholded, ThresholdSearch
from benchmarks.quality.storage import BITS, round_dense_, round_stochastically_
from benchmarks.quality.storage import METHODS as STORED_METHODS
from benchmarks.quality.tables import Digits, DoesNotFit
from comera_rec.convert.start import starting_rows

COUNTS = torch.arange(1500, 0, -1)


class Tiny(DataSet):
    """A data set whose label depends on one id."""

    name = "tiny"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.sizes = (1500, 1200, 5)
        self.counts = [torch.arange(size, 0, -1) for size in self.sizes]
        self.val, self.test, self._train = (self._rows(n, generator) for n in (300, 300, 2000))

    def _rows(self, count: int, generator: torch.Generator) -> Rows:
        ids = torch.stack([torch.randint(size, (count,), generator=generator) for size in self.sizes], dim=1)
        return Rows(ids=ids, dense=torch.randn(count, 2, generator=generator), labels=(ids[:, 2] > 1).float())

    def training_rows(self, generator: torch.Generator) -> Rows:
        return self._train.take(torch.randperm(2000, generator=generator))


@pytest.fixture
def task() -> Task:
    return Task(data=Tiny(), dim=8, batch=100, steps=20, rates=(0.01, 0.03))


@pytest.mark.parametrize("compression", [4, 10, 50])
@pytest.mark.parametrize("method", [*PER_TABLE, "TT", "TT + rows"])
def test_methods_stay_within_the_budget(method: str, compression: int, task: Task) -> None:
    try:
        embeddings = Embeddings(task.data.counts, 8, method, compression)
    except DoesNotFit:
        assert (method, compression) in (("low rank", 10), ("low rank", 50), ("QR", 50), ("group and place", 50))
        return
    assert embeddings.budget == 2700 * 8 // compression
    assert sum(embeddings.num_bytes()) <= 4 * embeddings.budget
    rows = embeddings(task.data.test.ids)
    assert rows.shape == (300, 3, 8)
    rows.square().sum().backward()
    assert all(p.grad is not None for p in embeddings.tables[0].parameters() if p.numel() > 8)
    assert len(embeddings.large) == sum(len(count) >= MIN_ROWS for count in task.data.counts) == 2


@pytest.mark.parametrize("method", ["dense", "TT", "low rank", "mixed dim", "neighbors", "prefixes", "group and place", "hashing"])
def test_every_method_starts_close_to_the_vectors(method: str, task: Task) -> None:
    embeddings = Embeddings(task.data.counts, 8, method, 4)
    vectors = [torch.randn(len(count) // 50 + 1, 8).repeat_interleave(50, dim=0)[: len(count)] for count in task.data.counts]

    @torch.no_grad()
    def error() -> float:
        ids = torch.cat([task.data.test.ids, task.data.val.ids])
        rows = torch.stack([starting_rows(of, len(of), 8)[ids[:, f]] for f, of in enumerate(vectors)], dim=1)
        return float((embeddings(ids) - rows[:, embeddings.columns]).square().mean())

    before = error()
    embeddings.start_(vectors, task.data.counts)
    assert error() < (0.9 if method == "hashing" else 0.6) * before


def test_who_predicts_like_the_teacher_has_nothing_to_learn(task: Task) -> None:
    teacher, rows = Model(task, "dense", 1), task.data.val
    ids = torch.cat([rows.ids, task.data.unlabeled_ids(rows)])
    labeled = labeled_by(teacher, ids, rows.dense)
    loss = nn.functional.binary_cross_entropy_with_logits(teacher(labeled), labeled.labels)
    assert max(float(gradient.abs().max()) for gradient in torch.autograd.grad(loss, list(teacher.parameters()))) < 1e-6
    with torch.no_grad():
        assert torch.equal(teacher(labeled)[: len(rows.labels)], teacher(rows))


@pytest.mark.parametrize("method", ["TT adaptive", "TT + rows adaptive", "TT SVD", "pruning", "PEP"])
def test_methods_that_shrink_while_training_end_within_the_budget(method: str, task: Task) -> None:
    found = train(task, method, 10, 0.01, 0)
    budget = found["dense_bytes"] / 10
    assert 0.9 * budget <= found["bytes"] <= budget
    assert found["index_bytes"] == (found["bytes"] / 2 if method in ("pruning", "PEP") else 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("method", STORED_METHODS)
def test_tables_of_narrow_numbers_fill_the_bytes_of_float32_ones(method: str, dtype: str, task: Task) -> None:
    narrow, wide = (train(dataclasses.replace(task, steps=3), method, 6, 0.01, 0, each) for each in (dtype, "float32"))
    assert narrow["bytes"] <= narrow["dense_bytes"] / 6
    assert narrow["optimizer_bytes"] >= wide["optimizer_bytes"], "at least as many numbers"


@pytest.mark.parametrize(("method", "bytes_per_row"), [("dense int8", 8 + 8), ("dense int4", 4 + 4), ("dense int2", 2 + 4)])
def test_rounded_dense_tables_count_the_bytes_that_serve_them(method: str, bytes_per_row: int, task: Task) -> None:
    found = train(dataclasses.replace(task, steps=3), method, 10, 0.01, 0)
    assert found["dense_bytes"] / found["bytes"] == pytest.approx(8 * 4 / bytes_per_row)
    weight = torch.randn(50, 8)
    before = weight.clone()
    round_dense_(weight, BITS[method])
    steps = before.max(dim=1).values - before.min(dim=1).values
    assert ((weight - before).abs().max(dim=1).values <= 0.51 * steps / (2 ** BITS[method] - 1)).all()
    assert max(len(row.unique()) for row in weight) <= 2 ** BITS[method]


def test_numbers_are_rounded_without_bias() -> None:
    table = nn.Linear(1, 20_000, bias=False)
    nn.init.constant_(table.weight, 1 + 2**-9)  # a quarter of the way between neighbors in bfloat16
    round_stochastically_(table)
    assert set(table.weight.unique().tolist()) == {1.0, 1 + 2**-7}
    assert table.weight.mean().item() == pytest.approx(1 + 2**-9, abs=2e-4)


def test_tables_share_a_budget_by_size_unless_the_smallest_form_is_larger() -> None:
    assert (Digits.least(4000, 8), Digits.least(1000, 8)) == (6 * 4 * 8, 5 * 4 * 8), "digits of base 4"
    assert shares((4000, 1000), 8, 10, Digits) == [3200, 800]
    assert shares((4000, 1000), 8, 100, Digits) == [240, 160]
    with pytest.raises(DoesNotFit):
        shares((4000, 1000), 8, 200, Digits)


@pytest.mark.parametrize("kind", [Clustered, MultiGranular, lambda counts, dim, budget: Thresholded(len(counts), dim)])
def test_tables_learn_rows(kind: Callable[[Tensor, int, int], nn.Module]) -> None:
    torch.manual_seed(0)
    table, ids, target = kind(COUNTS, 8, 2000), torch.arange(20), torch.randn(20, 8)
    optimizer = torch.optim.Adam(table.parameters(), 0.03)
    losses = []
    for _ in range(100):
        loss = (table(ids) - target).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_cce_gives_ids_with_similar_rows_the_same_code() -> None:
    torch.manual_seed(0)
    table, ids = Clustered(COUNTS, 8, 800), torch.arange(1500)
    assert table.size == 50
    assert table.num_bytes() == (4 * 800, 0)
    before = table(ids)
    table.cluster_()
    after = table(ids)
    assert table.num_bytes() == (4 * 800, 1500 * 4 * 6 / 8)
    assert not table.hashed.any()
    assert len({tuple(code) for code in table.codes_MD.tolist()}) > 50
    assert (after - before).square().mean() < 0.1 * before.var(dim=0).mean()
    with torch.no_grad():
        table.hashed[:50] = 1  # the first quarter's
    assert torch.allclose(table(ids) - after, torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]))


def test_mgqe_gives_rare_ids_the_first_vectors_and_pulls_rows_and_vectors_together() -> None:
    torch.manual_seed(0)
    table, ids = MultiGranular(COUNTS, 8, 800), torch.tensor([0, 149, 150, 1499, 3, 3])
    assert 1 <= table.tail_size < table.size
    rows = table(torch.arange(150, 1500)).unflatten(1, (table.parts, -1))
    for part in range(table.parts):
        distances = torch.cdist(rows[:, part], table.codebooks_DKn[part, : table.tail_size])
        assert distances.min(1).values.max() < 1e-3
    quantized, upstream = table(ids), torch.randn(6, 8)
    (quantized * upstream).mean(0).sum().backward()
    weight, codebooks = (p.detach().clone().requires_grad_() for p in (table.weight, table.codebooks_DKn))
    row = weight[ids].unflatten(1, (table.parts, -1))
    codes = torch.cdist(quantized.detach().unflatten(1, (table.parts, -1)).transpose(0, 1), codebooks.detach()).argmin(2)
    vector = torch.stack([codebooks[part, codes[part]] for part in range(table.parts)], dim=1)
    pull = (vector - row.detach()).square() + 0.25 * (row - vector.detach()).square()
    loss = pull.sum((1, 2)).mean() + ((row + vector).flatten(1) * upstream).mean(0).sum()
    loss.backward()
    assert torch.allclose(table.weight.grad, weight.grad, atol=1e-6)
    assert torch.allclose(table.codebooks_DKn.grad, codebooks.grad, atol=1e-6)


def test_pep_keeps_the_entries_that_exceed_their_thresholds_most() -> None:
    tables = [Thresholded(3, 2), Thresholded(1, 2)]
    with torch.no_grad():
        tables[0].weight.copy_(torch.tensor([[0.9, -0.8], [0.1, 0.6], [-0.7, 0.2]]))
        tables[1].weight.copy_(torch.tensor([[0.4, 0.0]]))
        for table in tables:
            table.logits.zero_()
    assert torch.allclose(tables[0](torch.tensor([0, 2])), torch.tensor([[0.4, -0.3], [-0.2, 0.0]]))
    search = ThresholdSearch(tables, budget=7, steps=10)  # three entries with their indices
    assert not search.step(), "four entries exceed one half"
    with torch.no_grad():
        tables[0].logits[1, 1] = 1.0
    assert search.step()
    masks = search.masks()
    assert [mask.tolist() for mask in masks] == [[[True, True], [False, False], [True, False]], [[False, False]]]
    tables[0].mask = masks[0].float()
    assert torch.equal(tables[0](torch.tensor([2])), torch.tensor([[-0.7, 0.0]]))
    assert tables[0].num_bytes() == (12, 12)


def test_implicit_feedback_draws_no_negative_that_the_user_had(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(
        "".join(f"{user} " + " ".join(str((user + i) % 40) for i in range(15)) + "\n" for user in range(30))
    )
    (tmp_path / "test.txt").write_text("".join(f"{user} {(user + 20) % 40}\n" for user in range(30)) + "7\n")
    data = ImplicitFeedback.read(tmp_path)
    assert [len(count) for count in data.counts] == [30, 40]
    for rows in (data.val, data.test, data.training_rows(torch.Generator().manual_seed(1))):
        assert rows.labels.mean() == 0.5
        positives, negatives = (set(map(tuple, rows.ids[rows.labels == label].tolist())) for label in (1, 0))
        assert not positives & negatives
    assert len(data.test.labels) == 60
    (tmp_path / "test.txt").unlink()
    with pytest.raises(ValueError, match=r"has no test.txt: give a folder with train.txt and test.txt"):
        ImplicitFeedback.read(tmp_path)


def test_the_last_interactions_of_a_user_are_for_test_and_validation(tmp_path: Path) -> None:
    """Users 5, 9 and 7 have four, three and two interactions; users' lines may alternate."""
    path = tmp_path / "games.txt"
    path.write_text("5 30\n7 30\n5 10\n9 10\n5 20\n7 50\n9 20\n5 40\n9 30\n")
    data = ImplicitFeedback.read(path)
    assert (data.name, [len(count) for count in data.counts]) == ("games", [3, 5])
    pairs = {split: rows.ids[rows.labels == 1].tolist() for split, rows in (("val", data.val), ("test", data.test))}
    users, items = {5: 0, 7: 1, 9: 2}, {10: 0, 30: 1, 50: 2, 20: 3, 40: 4}  # by frequency in training, then by number
    assert pairs == {"val": [[users[5], items[20]], [users[9], items[20]]], "test": [[users[5], items[40]], [users[9], items[30]]]}
    assert sum(int(count.sum()) for count in data.counts) == 2 * 5
