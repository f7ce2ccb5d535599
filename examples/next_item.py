"""Recommend the next item: SASRec over histories, with a dense item table or a TT table with hot rows.

    python -m examples.next_item data.path=interactions.txt output=runs/next
    python -m examples.next_item data.path=interactions.txt output=runs/next-dense items.format=dense

A causal transformer encodes histories; an item's score is the inner product of the encoded history with the item's row in the same
table (Kang and McAuley, Self-Attentive Sequential Recommendation, arXiv 1808.09781). Each user's last item is for testing, the one
before it for validation. Metrics rank all items that are not in the user's history, because metrics on samples of them mislead
(Krichene and Rendle, On Sampled Metrics for Item Recommendation, KDD 2020).

Shapes: B users, L positions, D features, V items including the padding item, T positions that have an item.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingConfig

import comera_rec as cr
from comera_rec.cli.errors import run_command
from comera_rec.nn import EMBEDDING_STD, TiedProjection, TransformerConfig, TransformerEncoder, dense_embedding
from comera_rec.training.config import load_settings
from data_pipeline.errors import UserError
from examples.loop import TrainingSettings, fit, new_folder, save, sizes

NAME = "examples.next_item"
CONFIG = Path(__file__).with_suffix(".toml")
SHORTEST = 3  # interactions of a user: one each for training, validation and testing
TOP = 10


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """A file with one line `user item` per interaction, each user's in chronological order."""

    path: str


@dataclass(frozen=True, kw_only=True)
class ItemSettings:
    """How the item table is stored.

    Attributes:
        format: "tt" or "dense".
        compression: dense parameters divided by the TT table's.
        hot_rows: as in `TableCompression`; item ids are ordered by frequency.
    """

    format: Literal["tt", "dense"] = "tt"
    compression: float = 10.0
    hot_rows: float | Literal["auto"] = "auto"

    def embedding(self, num_embeddings: int, embedding_dim: int) -> nn.Embedding | cr.TTEmbedding:
        """Build the item table."""
        if self.format == "dense":
            return dense_embedding(num_embeddings, embedding_dim)
        config = cr.TableCompression(compression=self.compression, min_rows=1, hot_rows=self.hot_rows)
        (table,) = config.table_configs([EmbeddingConfig(name="items", num_embeddings=num_embeddings, embedding_dim=embedding_dim)])
        return cr.TTEmbedding(num_embeddings, embedding_dim, shape=table.shape, hot_rows=table.hot_rows, std=EMBEDDING_STD)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Sizes of the encoder; the data determine its vocabulary."""

    embed_dim: int = 64
    num_layers: int = 2
    num_heads: int = 2
    ff_dim: int = 256
    max_length: int = 50
    dropout: float = 0.2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run."""

    output: str
    data: DataSettings
    training: TrainingSettings
    seed: int = 0
    model: ModelSettings = field(default_factory=ModelSettings)
    items: ItemSettings = field(default_factory=ItemSettings)


@dataclass(frozen=True)
class Histories:
    """Each user's items in chronological order, numbered from 1 by frequency, without users of fewer than three interactions."""

    by_user: list[np.ndarray]
    num_items: int

    @classmethod
    def read(cls, path: str | Path) -> Histories:
        """Read a file of interactions.

        Raises:
            ValueError: if the file doesn't exist or isn't in this format.
        """
        try:
            texts: Any = {"dtype": str, "keep_default_na": False, "na_values": [""]}  # a user may be named NA
            pairs = pd.read_csv(path, sep=r"\s+", header=None, names=["user", "item", "more"], index_col=False, **texts)
        except (OSError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
            raise UserError(f"data.path {path} can't be read ({str(error).strip()}): give lines `user item`") from error
        if pairs["item"].isna().any() or pairs["more"].notna().any():
            raise UserError(f"data.path {path} has a line with fewer or more than two values: give lines `user item`")
        order = pairs["item"].value_counts().index
        items = pd.Series(np.arange(1, len(order) + 1), index=order)[pairs["item"]].to_numpy()
        by_user = [items[rows] for rows in pairs.groupby("user", sort=False).indices.values() if len(rows) >= SHORTEST]
        if max(map(len, by_user), default=0) <= SHORTEST:
            raise UserError(f"data.path {path} has no user with more than {SHORTEST} interactions: give longer histories")
        return cls(by_user, len(order))

    def batches(self, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield items [B, L], the items that followed [B, L], and randomly drawn ones [B, L]; zeros after a history's end."""
        generator = np.random.default_rng(seed)
        while True:
            order = generator.permutation(len(self.by_user))
            for start in range(0, max(1, len(order) - batch + 1), batch):
                histories = [self.by_user[user][:-2] for user in order[start : start + batch]]
                items, next_items = _padded([h[:-1] for h in histories], length), _padded([h[1:] for h in histories], length)
                random_items = torch.from_numpy(generator.integers(1, self.num_items + 1, next_items.shape))
                yield items, next_items, random_items


def _padded(histories: list[np.ndarray], length: int) -> Tensor:
    """The last items of each history, [B, length], zeros after them, which a causal encoder doesn't see."""
    rows = np.zeros((len(histories), length), np.int64)
    for row, history in zip(rows, histories, strict=True):
        row[: len(history)] = history[-length:]
    return torch.from_numpy(rows)


class NextItem(nn.Module):
    """SASRec: a causal encoder of histories whose item table also scores the next item."""

    def __init__(self, num_items: int, model: ModelSettings, items: ItemSettings) -> None:
        super().__init__()
        config = TransformerConfig(**vars(model), vocab_size=num_items + 1, norm_first=True, causal=True)
        self.encoder = TransformerEncoder(config, embedding=items.embedding)
        self.all_items = TiedProjection(self.encoder.tokens)

    def forward(self, items: Tensor) -> Tensor:
        """Encode histories of items: [B, L] -> [B, L, D]."""
        encoded: Tensor = self.encoder(items)
        return encoded

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Binary cross-entropy of telling next items from randomly drawn ones, averaged over the positions that have an item."""
        items, next_items, random_items = batch
        is_item = items > 0
        encoded_TD = self(items)[is_item]
        next_TD, random_TD = self.encoder.tokens(torch.stack([next_items[is_item], random_items[is_item]])).unbind(0)
        logits = torch.cat([(encoded_TD * next_TD).sum(1), -(encoded_TD * random_TD).sum(1)])
        return -F.logsigmoid(logits).mean()


@torch.no_grad()
def rank(model: NextItem, histories: Histories, num_later: int, length: int) -> dict[str, float]:
    """HR@10 and NDCG@10 of the item that each user has before the last `num_later`, ranked among all items not preceding it."""
    parts = []
    for users in torch.arange(len(histories.by_user)).split(256):
        known = [histories.by_user[int(user)][: -num_later or None] for user in users]
        past, targets = [history[:-1] for history in known], torch.tensor([history[-1] for history in known])
        items = _padded(past, length)
        scores_BV = model.all_items(model(items)[torch.arange(len(items)), (items > 0).sum(1) - 1])
        target_scores_B1 = scores_BV.gather(1, targets[:, None]).clone()
        for scores, past_items in zip(scores_BV, past, strict=True):
            scores[torch.from_numpy(past_items)] = -torch.inf
        scores_BV[:, 0] = -torch.inf
        parts.append((scores_BV > target_scores_B1).sum(1))
    positions = torch.cat(parts)
    return {
        f"hr@{TOP}": float((positions < TOP).float().mean()),
        f"ndcg@{TOP}": float(torch.where(positions < TOP, 1 / (positions + 2.0).log2(), 0).mean()),
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(exists=True, dir_okay=False), default=CONFIG, help=f"TOML file; default {CONFIG.name}.")
@click.argument("overrides", nargs=-1, metavar="section.key=value ...")
def recommend(config: str, overrides: tuple[str, ...]) -> None:
    """Train SASRec on histories, with a dense item table or a TT table, and rank each user's next items.

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
    click.echo(f"{NAME}: {len(histories.by_user):,} users, {histories.num_items:,} items, item table {table.ratio:.1f}x smaller")
    record = fit(model, histories.batches(settings.training.batch_size, length, settings.seed), model.loss, settings.training, None)
    metrics = {"validation": rank(model, histories, 1, length), "test": rank(model, histories, 0, length)}
    save(folder, model, {**metrics, "table_ratio": table.ratio, **sizes(model), **record}, settings)
    click.echo(f"{folder}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics["test"].items()))


if __name__ == "__main__":
    run_command(recommend, f"python -m {NAME}")
