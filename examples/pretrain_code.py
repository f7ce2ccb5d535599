"""Pre-train a transformer on Python source by masked-language modeling, dense or in tensor-train form.

    python -m examples.pretrain_code output=runs/code
    python -m examples.pretrain_code output=runs/code-dense tokens.format=dense linears.format=dense ranks=none

The texts are the functions of the running Python's standard library. Training has two phases, as in CoMERA (section 5.3, arXiv
2405.14377): the compressed model trains first, then its ranks shrink as well. The output layer is tied to the token embedding.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator
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
from comera_rec.nn import LanguageModelHead, TiedProjection, TransformerConfig
from comera_rec.training.config import LinearsConfig, load_settings
from data_pipeline.errors import UserError
from examples.loop import EmbeddingSettings, TrainingSettings, build_encoder, compress_layers_, fit, new_folder, save, sizes
from examples.text import MASK, SPECIAL, TextBatch, batches_of, byte_pairs, endless

NAME = "examples.pretrain_code"
CONFIG = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which functions to read.

    Attributes:
        packages: files and folders of the standard library, e.g. ["json", "ast.py"]; None for all of it.
        validation: fraction of the functions that is kept for validation.
        masked: fraction of the tokens that the model has to guess.
    """

    packages: tuple[str, ...] | None = None
    validation: float = 0.05
    masked: float = 0.15

    def __post_init__(self) -> None:
        for name in ("validation", "masked"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(f"data.{name} is {getattr(self, name)}: give a fraction between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run; `ranks = none` skips the second phase."""

    output: str
    training: TrainingSettings
    seed: int = 0
    data: DataSettings = field(default_factory=DataSettings)
    model: TransformerConfig = field(default_factory=TransformerConfig)
    tokens: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    linears: LinearsConfig = field(default_factory=LinearsConfig)
    ranks: cr.RankConfig | None = None


class MaskedLanguageModel(nn.Module):
    """An encoder and a head that scores all tokens, tied to the token embedding."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.encoder = build_encoder(settings.model, settings.tokens)
        projection = TiedProjection(self.encoder.tokens)
        self.head = LanguageModelHead(settings.model.embed_dim, projection)
        compress_layers_(self, settings.linears)

    def forward(self, batch: TextBatch, chosen: Tensor) -> Tensor:
        """Score the chosen positions, a mask [B, L], as [number of chosen, V]; scoring all of them would dominate the step."""
        scores: Tensor = self.head(self.encoder(batch.ids, key_padding_mask=batch.padding)[chosen])
        return scores


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(exists=True, dir_okay=False), default=CONFIG, help=f"TOML file; default {CONFIG.name}.")
@click.argument("overrides", nargs=-1, metavar="section.key=value ...")
def pretrain(config: str, overrides: tuple[str, ...]) -> None:
    """Pre-train a transformer on the standard library's functions by masked-language modeling, dense or in tensor-train form.

    \b
    Example:
      python -m examples.pretrain_code output=runs/code
    """
    settings = load_settings(Settings, config, overrides)
    functions = read_functions(settings)
    folder = new_folder(settings.output)
    functions.tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(settings.seed)
    model = MaskedLanguageModel(settings)
    click.echo(
        f"{NAME}: {len(functions.train):,} functions, {functions.tokenizer.get_vocab_size():,} tokens, "
        f"{sizes(model)['ratio']:.1f}x smaller than dense"
    )
    metrics = train(model, functions, settings)
    save(folder, model, metrics, settings)
    click.echo(
        f"{settings.output}: validation loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.4f}, {metrics['params']:,} "
        f"parameters ({metrics['ratio']:.1f}x smaller than dense), {metrics['step_ms']['p50']:.0f} ms per step"
    )


@dataclass(frozen=True, kw_only=True)
class Functions:
    """Token ids of the training and validation functions, and the tokenizer, which was trained on the former."""

    tokenizer: Tokenizer
    train: list[list[int]]
    validation: list[list[int]]


def read_functions(settings: Settings) -> Functions:
    """Read the library, split its functions at random by the seed, and train the tokenizer.

    Raises:
        ValueError: for packages that don't exist, and for too few functions.
    """
    texts = sorted(set(standard_functions(settings.data.packages)))
    random.Random(settings.seed).shuffle(texts)
    kept = max(1, round(settings.data.validation * len(texts)))
    if kept >= len(texts):
        raise UserError(f"data.packages {settings.data.packages} has only {len(texts)} functions: name more packages")
    tokenizer = byte_pairs(texts[kept:], settings.model.vocab_size, settings.model.max_length)
    validation, train = ([tokenizer.encode(text).ids for text in part] for part in (texts[:kept], texts[kept:]))
    return Functions(tokenizer=tokenizer, train=train, validation=validation)


def train(
    model: nn.Module, functions: Functions, settings: Settings, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Train a model; return its loss and accuracy on the validation functions, its sizes, and what `fit` returns."""
    noise = torch.Generator().manual_seed(settings.seed)
    vocab_size = functions.tokenizer.get_vocab_size()

    def loss_of(batch: TextBatch) -> Tensor:
        masked, chosen = mask_tokens(batch, settings.data.masked, vocab_size, noise)
        return F.cross_entropy(model(masked, chosen), batch.ids[chosen])

    batches = endless(functions.train, None, settings.training.batch_size, settings.seed)
    record = fit(model, batches, loss_of, settings.training, settings.ranks, optimizer)
    return {**validate(model, functions.validation, settings, vocab_size), **sizes(model), **record}


def standard_functions(packages: tuple[str, ...] | None) -> Iterator[str]:
    """Source of every function of the standard library, methods and functions within functions included."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [library] if packages is None else [library / name for name in packages]
    for path in paths:
        if not path.exists():
            raise UserError(f"data.packages names {path.name}, which is not in {library}: choose files and folders there")
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if "site-packages" not in file.parts:
                yield from functions_of(file)


def functions_of(file: Path) -> Iterator[str]:
    """Source of every function in a file; none if it is not valid Python, as is the case with some test data."""
    try:
        source = file.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes, which only Python's own tests contain
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "".join(lines[node.lineno - 1 : node.end_lineno])


def mask_tokens(batch: TextBatch, fraction: float, vocab_size: int, generator: torch.Generator) -> tuple[TextBatch, Tensor]:
    """Mask tokens as BERT does (Devlin et al., section 3.1): of those chosen, 80 % become [MASK], 10 % a random token, 10 % stay.

    Args:
        batch: has token ids [B, L].
        fraction: of the tokens to choose; at least one is chosen.
        vocab_size: number of tokens.
        generator: source of randomness.

    Returns:
        The masked batch, and a mask of the chosen tokens, [B, L].
    """
    is_special = batch.ids < len(SPECIAL)
    draw = torch.rand(batch.ids.shape, generator=generator).masked_fill(is_special, 1.0)
    chosen = draw <= max(fraction, float(draw.min()))
    action = torch.rand(batch.ids.shape, generator=generator)
    random_ids = torch.randint(len(SPECIAL), vocab_size, batch.ids.shape, generator=generator)
    ids = torch.where(chosen & (action < 0.8), MASK, batch.ids)
    ids = torch.where(chosen & (action >= 0.9), random_ids, ids)
    return TextBatch(ids, batch.padding, None), chosen


@torch.no_grad()
def validate(model: nn.Module, sequences: list[list[int]], settings: Settings, vocab_size: int) -> dict[str, float]:
    """Mean loss and accuracy over masked tokens, which are the same in every run with the same seed."""
    noise = torch.Generator().manual_seed(settings.seed + 1)
    loss, hits, count = 0.0, 0, 0
    for batch in batches_of(sequences, None, settings.training.batch_size):
        masked, chosen = mask_tokens(batch, settings.data.masked, vocab_size, noise)
        scores, targets = model(masked, chosen), batch.ids[chosen]
        loss += float(F.cross_entropy(scores, targets, reduction="sum"))
        hits += int((scores.argmax(1) == targets).sum())
        count += len(targets)
    return {"loss": loss / count, "accuracy": hits / count}


if __name__ == "__main__":
    run_command(pretrain, f"python -m {NAME}")
