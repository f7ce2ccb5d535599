"""Recommend the next item: SASRec over histories, its item table dense or as a TT table with hot rows.

    python -m examples.next_item data.path=interactions.txt output=runs/next
    python -m examples.next_item data.path=interactions.txt output=runs/next-dense items.format=dense

Histories are encoded by a causal transformer; the score of an item is the inner product of what it makes of the history with the
item's row, of the same table (Kang and McAuley, Self-Attentive Sequential Recommendation, arXiv 1808.09781). Of each user the last
item tests, the one before validates. Metrics rank all items that the user has not had yet: samples of them mislead (Krichene and
Rendle, On Sampled Metrics for Item Recommendation, KDD 2020).

Shapes: B users, L positions, D features, V items and the padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import click
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingConfig

import comera_rec as cr
from comera_rec.cli.errors import run_command
from comera_rec.nn import EMBEDDING_STD, dense_embedding
from comera_rec.training.config import load_settings
from examples.loop import TrainingSettings, fit, new_folder, save, sizes

NAME = "examples.next_item"
CONFIG = Path(__file__).with_suffix(".toml")
SHORTEST = 3  # interactions of a user: one to train on, one to validate, one to test
TOP = 10


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What to read: a line `user item` an interaction, each user's in the order of time."""

    path: str


@dataclass(frozen=True, kw_only=True)
class ItemSettings:
    """How the item table is held.

    Attributes:
        format: "tt" or "dense".
        compression: how many times smaller than dense.
        hot_rows: as in `TTEmbeddingConfig`; items are numbered by frequency.
    """

    format: Literal["tt", "dense"] = "tt"
    compression: float = 10.0
    hot_rows: float | Literal["auto"] = "auto"

    def embedding(self, num_embeddings: int, embedding_dim: int) -> nn.Module:
        """The table."""
        if self.format == "dense":
            return dense_embedding(num_embeddings, embedding_dim)
        config = cr.TTEmbeddingConfig(compression=self.compression, min_rows=1, hot_rows=self.hot_rows)
        (table,) = config.table_configs([EmbeddingConfig(name="items", num_embeddings=num_embeddings, embedding_dim=embedding_dim)])
        return cr.TTEmbedding(num_embeddings, embedding_dim, shape=table.shape, hot_rows=table.hot_rows, std=EMBEDDING_STD)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Sizes of the encoder; its vocabulary is the data's."""

    embed_dim: int = 64
    num_layers: int = 2
    num_heads: int = 2
    ff_dim: int = 256
    max_length: int = 50
    dropout: float = 0.2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run."""

    output: str
    data: DataSettings
    training: TrainingSettings
    seed: int = 0
    model: ModelSettings = field(default_factory=ModelSettings)
    items: ItemSettings = field(default_factory=ItemSettings)


@dataclass(frozen=True)
class Histories:
    """Items of each user in the order of time, numbered from 1 by frequency; those with fewer than three are left out."""

    of_users: list[np.ndarray]
    num_items: int

    @classmethod
    def read(cls, path: str | Path) -> Histories:
        """Of a file of interactions.

        Raises:
            ValueError: if it is not there or holds something else.
        """
        try:
            pairs = pd.read_csv(path, sep=r"\s+", header=None, names=["user", "item"], dtype={"user": str, "item": str})
        except (OSError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
            raise ValueError(f"data.path {path} can't be read ({str(error).strip()}): give lines `user item`") from error
        if pairs.isna().any().any():
            raise ValueError(f"data.path {path} has a line of fewer than two values: give lines `user item`")
        order = pairs["item"].value_counts().index
        items = pd.Series(np.arange(1, len(order) + 1), index=order)[pairs["item"]].to_numpy()
        of_users = [items[rows] for rows in pairs.groupby("user", sort=False).indices.values() if len(rows) >= SHORTEST]
        if not of_users:
            raise ValueError(f"data.path {path} has no user of {SHORTEST} interactions or more")
        return cls(of_users, len(order))

    def batches(self, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Items [B, L], those that followed [B, L], and others drawn at random [B, L]; zeros behind a history's end."""
        generator = np.random.default_rng(seed)
        while True:
            order = generator.permutation(len(self.of_users))
            for start in range(0, len(order) - batch + 1 or 1, batch):
                known = [self.of_users[user][:-2] for user in order[start : start + batch]]
                seen, followed = _padded([h[:-1] for h in known], length), _padded([h[1:] for h in known], length)
                others = torch.from_numpy(generator.integers(1, self.num_items + 1, followed.shape))
                yield seen, followed, others


def _padded(histories: list[np.ndarray], length: int) -> Tensor:
    """The last items of each, [B, length], zeros behind them: a causal encoder doesn't see these."""
    rows = np.zeros((len(histories), length), np.int64)
    for row, history in zip(rows, histories, strict=True):
        row[: len(history)] = history[-length:]
    return torch.from_numpy(rows)


class NextItem(nn.Module):
    """SASRec."""

    def __init__(self, num_items: int, model: ModelSettings, items: ItemSettings) -> None:
        super().__init__()
        config = cr.TransformerConfig(**vars(model), vocab_size=num_items + 1, norm_first=True, causal=True)
        self.encoder = cr.TransformerEncoder(config, embedding=items.embedding)
        self.all_items = cr.TiedProjection(self.encoder.tokens)

    def forward(self, seen: Tensor) -> Tensor:
        """[B, L] -> [B, L, D]."""
        encoded: Tensor = self.encoder(seen)
        return encoded

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Of telling what followed from what was drawn at random, over all positions that have a history."""
        seen, followed, others = batch
        at = seen > 0
        wanted_TD = self(seen)[at]
        of_followed, of_others = self.encoder.tokens(torch.stack([followed[at], others[at]])).unbind(0)
        differences = torch.cat([(wanted_TD * of_followed).sum(1), -(wanted_TD * of_others).sum(1)])
        return -F.logsigmoid(differences).mean()


@torch.no_grad()
def rank(model: NextItem, histories: Histories, left_out: int, length: int) -> dict[str, float]:
    """HR@10 and NDCG@10 of each user's item `left_out` places from the end, among all items that were not before it."""
    ranks = []
    for part in torch.arange(len(histories.of_users)).split(256):
        known = [histories.of_users[int(user)][: -left_out or None] for user in part]
        past, target = [history[:-1] for history in known], torch.tensor([history[-1] for history in known])
        seen = _padded(past, length)
        scores_BV = model.all_items(model(seen)[torch.arange(len(seen)), (seen > 0).sum(1) - 1])
        wanted = scores_BV.gather(1, target[:, None]).clone()
        for scores, before in zip(scores_BV, past, strict=True):
            scores[torch.from_numpy(before)] = -torch.inf
        scores_BV[:, 0] = -torch.inf
        ranks.append((scores_BV > wanted).sum(1))
    positions = torch.cat(ranks)
    return {
        f"hr@{TOP}": float((positions < TOP).float().mean()),
        f"ndcg@{TOP}": float(torch.where(positions < TOP, 1 / (positions + 2.0).log2(), 0).mean()),
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(exists=True, dir_okay=False), default=CONFIG, help=f"TOML file; default {CONFIG.name}.")
@click.argument("overrides", nargs=-1, metavar="section.key=value ...")
def recommend(config: str, overrides: tuple[str, ...]) -> None:
    """Train SASRec on histories, with a dense item table or a TT table, and rank what each user had next.

    \b
    Example:
      python -m examples.next_item data.path=interactions.txt output=runs/next items.compression=50
    """
    settings = load_settings(Settings, config, overrides)
    torch.manual_seed(settings.seed)
    histories, length = Histories.read(settings.data.path), settings.model.max_length
    folder = new_folder(settings.output)
    model = NextItem(histories.num_items, settings.model, settings.items)
    table = cr.compression_report(model.encoder.tokens)
    click.echo(f"{NAME}: {len(histories.of_users):,} users, {histories.num_items:,} items, item table {table.ratio:.1f}x smaller")
    record = fit(model, histories.batches(settings.training.batch_size, length, settings.seed), model.loss, settings.training, None)
    metrics = {"validation": rank(model, histories, 1, length), "test": rank(model, histories, 0, length)}
    save(folder, model, {**metrics, "table_ratio": table.ratio, **sizes(model), **record}, settings)
    click.echo(f"{folder}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics["test"].items()))


if __name__ == "__main__":
    run_command(recommend, f"python -m {NAME}", folder=Path(__file__).parent)
