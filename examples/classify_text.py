"""Train a transformer on sentence classification, dense or with TT modules.

    python -m examples.classify_text data.train=train.tsv data.dev=dev.tsv [tokens.format=dense linears.format=dense]

classify_text.toml has the settings of CoMERA's six-encoder model (section 5.1, arXiv 2405.14377).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

import comera_rec as cr
from comera_rec.cli.errors import run_command
from comera_rec.nn import ClassificationHead, TransformerConfig
from comera_rec.training.config import LinearsConfig, load_settings
from data_pipeline.errors import UserError
from examples.loop import EmbeddingSettings, TrainingSettings, build_encoder, compress_layers_, fit, new_folder, save, sizes
from examples.text import TextBatch, batches_of, endless, word_pieces

NAME = "examples.classify_text"
CONFIG = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Tab-separated files whose header names a column `label` and one or two columns that start with `sentence`."""

    train: str
    dev: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run; `ranks = none` keeps the initial ranks."""

    output: str
    data: DataSettings
    training: TrainingSettings
    seed: int = 0
    model: TransformerConfig = field(default_factory=TransformerConfig)
    tokens: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    linears: LinearsConfig = field(default_factory=LinearsConfig)
    ranks: cr.RankConfig | None = None


class Classifier(nn.Module):
    """An encoder and a head that scores the classes from the first position."""

    def __init__(self, settings: Settings, num_classes: int) -> None:
        super().__init__()
        self.encoder = build_encoder(settings.model, settings.tokens)
        self.head = ClassificationHead(settings.model.embed_dim, num_classes, dropout=settings.model.dropout)
        compress_layers_(self, settings.linears)

    def forward(self, batch: TextBatch) -> Tensor:
        scores: Tensor = self.head(self.encoder(batch.ids, key_padding_mask=batch.padding))
        return scores


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(exists=True, dir_okay=False), default=CONFIG, help=f"TOML file; default {CONFIG.name}.")
@click.argument("overrides", nargs=-1, metavar="section.key=value ...")
def classify(config: str, overrides: tuple[str, ...]) -> None:
    """Train a transformer on sentence classification, dense or with TT modules.

    \b
    Example:
      python -m examples.classify_text data.train=train.tsv data.dev=dev.tsv output=runs/classify
    """
    settings = load_settings(Settings, config, overrides)
    sentences = read_sentences(settings)
    folder = new_folder(settings.output)
    sentences.tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(settings.seed)
    model = Classifier(settings, len(sentences.classes))
    click.echo(
        f"{NAME}: {len(sentences.train_ids):,} sentences, {sentences.tokenizer.get_vocab_size():,} tokens, "
        f"{sizes(model)['ratio']:.1f}x smaller than dense"
    )
    metrics = train(model, sentences, settings)
    save(folder, model, metrics, settings)
    click.echo(
        f"{settings.output}: accuracy {metrics['accuracy']:.4f}, {metrics['params']:,} parameters ({metrics['ratio']:.1f}x smaller "
        f"than dense), {metrics['step_ms']['p50']:.0f} ms per step"
    )


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Token ids and classes of the two files, and the tokenizer that was trained on the first."""

    tokenizer: Tokenizer
    classes: list[str]
    train_ids: list[list[int]]
    train_targets: list[int]
    dev_ids: list[list[int]]
    dev_targets: list[int]


def read_sentences(settings: Settings) -> Sentences:
    """Read both files and train the tokenizer.

    Raises:
        ValueError: for malformed files, and for labels in `data.dev` that `data.train` lacks.
    """
    texts, labels = read_tsv(settings.data.train)
    dev_texts, dev_labels = read_tsv(settings.data.dev)
    classes = sorted(set(labels))
    if unknown := sorted(set(dev_labels) - set(classes)):
        raise UserError(f"{settings.data.dev} has labels {unknown} that {settings.data.train} lacks")
    tokenizer = word_pieces(
        [part for text in texts for part in text if part is not None], settings.model.vocab_size, settings.model.max_length
    )
    train_ids, dev_ids = ([tokenizer.encode(*text).ids for text in split] for split in (texts, dev_texts))
    train_targets, dev_targets = ([classes.index(label) for label in split] for split in (labels, dev_labels))
    return Sentences(
        tokenizer=tokenizer,
        classes=classes,
        train_ids=train_ids,
        train_targets=train_targets,
        dev_ids=dev_ids,
        dev_targets=dev_targets,
    )


def train(
    model: nn.Module, sentences: Sentences, settings: Settings, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Train a model that maps batches to scores; return its accuracy on `data.dev`, its sizes, and what `fit` returns."""
    batches = endless(sentences.train_ids, sentences.train_targets, settings.training.batch_size, settings.seed)

    def loss(batch: TextBatch) -> Tensor:
        assert batch.labels is not None
        return F.cross_entropy(model(batch), batch.labels)

    record = fit(model, batches, loss, settings.training, settings.ranks, optimizer)
    with torch.no_grad():
        hits = [(model(batch).argmax(1) == batch.labels) for batch in batches_of(sentences.dev_ids, sentences.dev_targets, 64)]
    return {"accuracy": float(torch.cat(hits).double().mean()), "classes": sentences.classes, **sizes(model), **record}


def read_tsv(path: str) -> tuple[list[tuple[str, str | None]], list[str]]:
    """The sentences of each example, the second one None if there is only one, and the labels."""
    with open(path, newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        columns = [name for name in rows.fieldnames or () if name.startswith("sentence")]
        if "label" not in (rows.fieldnames or ()) or len(columns) not in (1, 2):
            raise UserError(f"{path} has columns {rows.fieldnames}: the first line must name `label` and one or two `sentence...`")
        examples = list(rows)
    if not examples:
        raise UserError(f"{path} has no line below the names of its columns: give some")
    for number, example in enumerate(examples, start=2):
        if None in example or None in example.values():
            raise UserError(f"{path}:{number} and the first line have different numbers of columns")
    first, second = columns[0], columns[-1] if len(columns) == 2 else None
    texts = [(example[first], second and example[second]) for example in examples]
    return texts, [example["label"] for example in examples]


if __name__ == "__main__":
    run_command(classify, f"python -m {NAME}")
