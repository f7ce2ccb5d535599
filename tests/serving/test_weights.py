"""New weights for the code of a package give the scores of the model that was trained further; what doesn't fit is refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import comera_rec as cr
from comera_rec.serving.package import ServingModel, read_metadata
from comera_rec.serving.runs import export_run
from comera_rec.serving.versions import ModelFile
from comera_rec.training.config import load_config
from comera_rec.training.trainer import Trainer
from data_pipeline.manifest import file_sha256

ROWS = {"user": 300, "item": 200, "day": 7}
LENGTHS = torch.tensor([2, 1, 0, 3, 1, 1, 1, 1, 1])
FEATURES = KeyedJaggedTensor(list(ROWS), torch.arange(int(LENGTHS.sum())) % 7, lengths=LENGTHS)
SAMPLE = (torch.rand(3, 2), FEATURES)


class Scores(nn.Module):
    """Pooled bags into a linear layer, whose bias has one number; weights may be uniform, and there is a constant."""

    def __init__(self, tt_ranks: int = 2) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name]) for name, rows in ROWS.items()
        ]
        self.tables = EmbeddingBagCollection(configs)
        cr.compress_(self, tables=cr.TableCompression(tt_ranks=tt_ranks, min_rows=100, hot_rows=0.3))
        self.over = nn.Linear(8 * len(ROWS) + 2, 1)
        self.slope = nn.Parameter(torch.ones(()))
        with torch.no_grad():
            for parameter in self.over.parameters():
                parameter.zero_()

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        inputs = [self.tables(features).values(), dense * torch.tensor([2.0, 3.0])]
        return self.slope * self.over(torch.cat(inputs, dim=1))


def trained_further(model: Scores) -> Tensor:
    """Change every weight; return the model's scores."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
        return model.eval()(*SAMPLE)


def tensors() -> tuple[Tensor, ...]:
    return SAMPLE[0], FEATURES.values(), FEATURES.lengths()


def test_a_package_takes_new_weights(tmp_path: Path) -> None:
    model = Scores()
    cr.export(model, SAMPLE, tmp_path / "model.pt2", form="fast", dtype="int8")
    package = ServingModel(tmp_path / "model.pt2")
    for _ in range(2):
        expected = trained_further(model)
        metadata = cr.export(model, SAMPLE, tmp_path / "model.weights")
        assert metadata == read_metadata(tmp_path / "model.weights")
        assert (metadata.form, metadata.dtype) == ("fast", "int8")
        package.update(tmp_path / "model.weights")
        torch.testing.assert_close(package(*tensors())[0], expected, rtol=1e-4, atol=0.2)
    assert float(ServingModel(tmp_path / "model.pt2")(*tensors())[0].abs().max()) == 0

    with pytest.raises(ValueError, match=r"model\.weights has weights alone: give the MODEL\.pt2 that they are for"):
        ServingModel(tmp_path / "model.weights")
    before = package(*tensors())[0]
    (tmp_path / "model.weights").rename(tmp_path / "damaged.weights")
    with (tmp_path / "damaged.weights").open("r+b") as file:
        file.seek(1000)
        file.write(b"damaged")
    with pytest.raises(ValueError, match="is not a package, or a damaged one"):
        package.update(tmp_path / "damaged.weights")
    with pytest.raises(ValueError, match=r"fit .*model\.pt2 \(they differ in code\): .*ranks or sizes.* export it to model\.pt2"):
        cr.export(Scores(tt_ranks=3), SAMPLE, tmp_path / "model.weights")
    assert not (tmp_path / "model.weights").exists()
    with pytest.raises(ValueError, match=r"other\.pt2 doesn't exist"):
        cr.export(model, SAMPLE, tmp_path / "other.weights")
    assert torch.equal(package(*tensors())[0], before)


def test_the_server_takes_the_weights_of_its_package(
    trained: Path, package: Callable[[str], Path], request_of: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(trained.parent / "run.toml", ("seed=4", f"output={tmp_path / 'further'}"))
    Trainer(config).train()
    path, weights = tmp_path / "model.pt2", tmp_path / "model.weights"
    path.write_bytes(package("portable").read_bytes())
    observed = list[str]()
    file = ModelFile(path, data=None, threads=1, observe=observed.append)
    first, started = file.current.model(*request_of(3))[0], file.current
    metadata = export_run(tmp_path / "further", weights)
    assert metadata.run.ne == pytest.approx(metadata.run.trained_ne, rel=1e-5)
    assert metadata.run.ne != read_metadata(path).run.ne

    async def watch(change: Callable[[], object]) -> None:
        observed.clear()
        watching = asyncio.create_task(file.watch(0.01))
        change()
        for _ in range(1000):
            if observed:
                break
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(watch(lambda: None))
    assert observed == ["loaded"]
    assert started is file.current, "requests that wait get the new weights and their version"
    assert file.current.number == file_sha256(weights)[:12]
    scores = file.current.model(*request_of(3))[0]
    assert not torch.allclose(scores, first, atol=1e-4)
    again = ModelFile(path, data=None, threads=1).current
    assert (again.number, again.model(*request_of(3))[0].tolist()) == (file.current.number, scores.tolist())

    (tmp_path / "broken").write_bytes(b"odd")
    asyncio.run(watch(lambda: (tmp_path / "broken").rename(path)))
    assert observed == ["refused"], "the present version stays"
    torch.testing.assert_close(file.current.model(*request_of(3))[0], scores)

    with caplog.at_level(logging.WARNING):
        asyncio.run(watch(lambda: (tmp_path / "new").write_bytes(package("fast").read_bytes()) and (tmp_path / "new").rename(path)))
    assert observed == ["loaded"]
    assert f"{weights} is not for {path}: export the weights again beside it" in caplog.text
    torch.testing.assert_close(file.current.model(*request_of(3))[0], first, rtol=0, atol=1e-5)
