"""Captured steps equal eager ones, and are recaptured when shapes, ranks or learning rates change; and bfloat16.

Without a GPU, a stand-in replaces the graph. A graph is bound to the memory and the numbers that it was captured with; the stand-in
checks that these are unchanged, and calls the captured function again.
"""

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from comera_rec import LinearCompression, RankConfig, RankScheduler, TTEmbeddingBagConfig, build_dlrm
from comera_rec.data import Batch
from comera_rec.data.batch import keyed_rows, one_per_row
from comera_rec.nn import update_in_backward_
from comera_rec.training.capture import CapturedUpdate, CudaRecorder, why_not_captured
from comera_rec.training.config import load_config
from comera_rec.training.trainer import Trainer

RANKS = RankConfig(early_steps=9, late_steps=12, target_size=0.5, truncate_every=4)
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class StandIn:
    """Replaces a `CudaRecorder`; `frozen` returns everything whose changes a graph would not see."""

    def __init__(self, frozen: Callable[[], Hashable]) -> None:
        self._frozen = frozen

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        return call()

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        self._call, self._captured = call, self._frozen()
        self._loss = torch.empty(())
        return self._loss

    def replay(self) -> None:
        assert self._frozen() == self._captured, "a graph would have replayed what no longer holds"
        self._loss.copy_(self._call())


class Training:
    """A small DLRM, its optimizer and the step under test."""

    def __init__(
        self, device: str, *, capture: bool, ranks: RankConfig | None = None, lr: float | Tensor = 0.01, optimizer: str = "Adam"
    ) -> None:
        torch.manual_seed(0)
        tables = [
            TTEmbeddingBagConfig(name="t1", num_embeddings=5000, embedding_dim=16, feature_names=["f1"], tt_ranks=8),
            EmbeddingBagConfig(name="t2", num_embeddings=30, embedding_dim=16, feature_names=["f2"]),
        ]
        self.model = build_dlrm(
            tables, dense_in_features=5, dense_arch_layer_sizes=[64, 16], over_arch_layer_sizes=[64, 64, 1],
            linears=LinearCompression(tt_ranks=8, min_features=64, policy="always"),
        ).to(device)  # fmt: skip
        if optimizer == "Adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=lr, fused=True)
        else:
            self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=lr)
            update_in_backward_(self.model, self.optimizer)
        # As the optimizers of FBGEMM's tables, whose rates are numbers.
        self.other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        self.scheduler = RankScheduler(self.model, self.optimizer, ranks) if ranks else None
        self.update: Callable[[Batch], Tensor] = self._update
        self.recorder = Mock(wraps=StandIn(self._frozen) if device == "cpu" else CudaRecorder(torch.device(device)))
        if capture:
            self.update = CapturedUpdate(self._update, [self.optimizer, self.other], self.recorder)

    def _update(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(self.model(batch.dense, batch.sparse).squeeze(1), batch.labels)
        (self.scheduler.loss(loss) if self.scheduler else loss).backward()
        self.optimizer.step()
        return loss.detach()

    def _frozen(self) -> Hashable:
        memory = [(p.data_ptr(), p.shape) for p in self.model.parameters()]
        groups = [*self.optimizer.param_groups, *self.other.param_groups]
        rates = [group["lr"] for group in groups if not isinstance(group["lr"], Tensor)]
        return (*memory, *rates, self.scheduler and self.scheduler.stage)

    @property
    def calls(self) -> list[str]:
        """Names of the methods that the recorder's calls were of."""
        return [name for name, *_ in self.recorder.method_calls]

    def run(self, seeds: Iterable[int], **shape: Any) -> Tensor:
        losses = []
        for seed in seeds:
            losses.append(self.update(batch(seed, **shape).to(next(self.model.parameters()).device)))
            if self.scheduler is not None and self.scheduler.step() and isinstance(self.update, CapturedUpdate):
                self.update.reset()
        return torch.stack(losses).cpu()


def batch(seed: int, lengths: tuple[int, int] = (1, 1), size: int = 12) -> Batch:
    """Draw a batch in which all bags of a feature have the same length."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randint(limit, (size * n,), generator=generator) for limit, n in zip((5000, 30), lengths, strict=True)]
    per_bag = torch.tensor(lengths).repeat_interleave(size)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), per_bag.cumsum(0)])
    sparse = KeyedJaggedTensor(
        keys=["f1", "f2"], values=torch.cat(values), lengths=per_bag, offsets=ends, length_per_key=[size * n for n in lengths]
    )
    dense, labels = torch.randn(size, 5, generator=generator), torch.rand(size, generator=generator).round()
    return Batch(dense=dense, sparse=sparse, labels=labels)


@every_device
@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad in backward"])
def test_captured_steps_equal_eager_ones_while_ranks_shrink(device: str, optimizer: str) -> None:
    eager, captured = (Training(device, capture=capture, ranks=RANKS, optimizer=optimizer) for capture in (False, True))
    torch.testing.assert_close(captured.run(range(32)), eager.run(range(32)))
    torch.testing.assert_close(captured.model.state_dict(), eager.model.state_dict())
    assert captured.scheduler.stage == "done"
    for actual, expected in zip(captured.scheduler.history, eager.scheduler.history, strict=True):
        assert actual.pop("loss") == pytest.approx(expected.pop("loss"))
        assert actual == expected
    # After every truncation and change of stage, eager steps precede a new graph.
    recorded = len(eager.scheduler.history) - 1
    assert captured.calls.count("capture") > recorded / 2
    assert captured.calls.count("run") + captured.calls.count("replay") == 32


@every_device
def test_a_graph_is_only_used_for_inputs_of_its_layout(device: str) -> None:
    eager, captured = (Training(device, capture=capture) for capture in (False, True))
    for seeds, shape in [
        *((range(1), {"size": 12 + number % 2}) for number in range(6)),  # never twice the same in a row
        (range(5), {"lengths": (2, 1)}),
        (range(5), {"lengths": (1, 2)}),
    ]:
        torch.testing.assert_close(captured.run(seeds, **shape), eager.run(seeds, **shape))
    settled = ["run"] * 3 + ["capture", "replay", "replay"]
    assert captured.calls == ["run"] * 6 + settled * 2


@every_device
def test_learning_rates_that_change(device: str) -> None:
    def losses(capture: bool, rate: float | Tensor) -> tuple[Tensor, list[str]]:
        training = Training(device, capture=capture, lr=rate)
        first = training.run(range(5))
        for group in training.optimizer.param_groups:
            if isinstance(rate, Tensor):
                group["lr"].fill_(0.1)
            else:
                group["lr"] = 0.1
        return torch.cat([first, training.run(range(5))]), training.calls

    expected, _ = losses(False, 0.01)
    actual, calls = losses(True, 0.01)
    torch.testing.assert_close(actual, expected)
    assert calls.count("capture") == 2, "a number is part of the graph"
    actual, calls = losses(True, torch.tensor(0.01, device=device))
    torch.testing.assert_close(actual, expected)
    assert calls.count("capture") == 1, "a tensor is read by every replay"
    training = Training(device, capture=True)
    training.run(range(5))
    training.other.param_groups[0]["lr"] = 0.25
    training.run(range(5))
    assert training.calls.count("capture") == 2, "so is the number of another optimizer"


def test_a_capture_that_fails_leaves_steps_eager_if_it_may() -> None:
    expected, training, errors = Training("cpu", capture=False), Training("cpu", capture=False), list[RuntimeError]()
    training.recorder.capture.side_effect = RuntimeError("operation not permitted when stream is capturing")
    training.update = CapturedUpdate(training._update, [training.optimizer], training.recorder, errors.append)
    torch.testing.assert_close(training.run(range(8)), expected.run(range(8)))
    assert [str(error) for error in errors] == ["operation not permitted when stream is capturing"]
    training.update = CapturedUpdate(training._update, [training.optimizer], training.recorder)
    with pytest.raises(RuntimeError, match="not permitted"):
        training.run(range(8))


def test_lengths_that_batches_share_are_not_written() -> None:
    shared = one_per_row(2, 4, torch.device("cpu"))
    update = CapturedUpdate(lambda batch: batch.sparse.lengths().sum(), [], Mock(wraps=StandIn(lambda: None)))
    for lengths, offsets in [shared] * 6 + [(torch.arange(8).clamp(max=1), torch.arange(9))]:
        sparse = keyed_rows(["a", "b"], torch.zeros(8, dtype=torch.int64), lengths, offsets, 4, [4, 4])
        update(Batch(dense=torch.zeros(4, 0), sparse=sparse, labels=torch.zeros(4)))
    assert [each._version for each in shared] == [0, 0]


def test_why_an_optimizer_cannot_be_captured() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    changing = torch.optim.Adagrad(parameters, lr_decay=0.1), torch.optim.Adagrad(parameters, lr=torch.tensor(0.1))
    for optimizer in (torch.optim.Adam(parameters), *changing):
        assert f"{type(optimizer).__name__} can't be captured" in str(why_not_captured(optimizer, rates_vary=False))
    constant = torch.optim.Adagrad(parameters)
    assert "with constant rates" in str(why_not_captured(constant, rates_vary=True))
    assert why_not_captured(constant, rates_vary=False) is None
    assert why_not_captured(torch.optim.Adam(parameters, fused=True), rates_vary=True) is None


def test_bfloat16_trains_like_float32(config_file: Path, tmp_path: Path) -> None:
    """NE on the test split agrees to half a percent after 24 steps, and products are indeed in bfloat16."""
    results, seen = {}, set()
    same = ["training.steps=24", "optimizer.lr_dense=0.005", "optimizer.lr_cores=0.005"]

    def note(module: nn.Module, _: Any, logits: Tensor) -> None:
        if module.training:
            seen.add(logits.dtype)

    for precision in ("float32", "bfloat16"):
        trainer = Trainer(load_config(config_file, [*same, f"training.precision={precision}", f"output={tmp_path / precision}"]))
        trainer.model.over_arch.register_forward_hook(note)
        results[precision] = trainer.train()
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert seen == {torch.float32, torch.bfloat16}
    assert results["float32"]["ne"] < 0.95, "it learns"
    assert results["bfloat16"]["ne"] == pytest.approx(results["float32"]["ne"], rel=0.005)
