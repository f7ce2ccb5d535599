"""Turns texts into batches of token ids.

Shapes: B sequences in a batch, L positions in its longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, _, CLS, SEP, MASK = range(len(SPECIAL))
_POOL = 50  # batches whose sequences are sorted by length together


def word_pieces(texts: Sequence[str], vocab_size: int, max_length: int) -> Tokenizer:
    """Train a lower-casing WordPiece tokenizer, such as BERT's, on texts."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL), show_progress=False)
    return _trained(tokenizer, trainer, texts, max_length)


def byte_pairs(texts: Sequence[str], vocab_size: int, max_length: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which keeps case and white space, on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    return _trained(tokenizer, trainer, texts, max_length)


def _trained(tokenizer: Tokenizer, trainer: trainers.Trainer, texts: Sequence[str], max_length: int) -> Tokenizer:
    tokenizer.train_from_iterator(texts, trainer)
    specials = [("[CLS]", CLS), ("[SEP]", SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=specials
    )
    tokenizer.enable_truncation(max_length)
    return tokenizer


@dataclass(frozen=True)
class TextBatch:
    """ids [B, L]; padding [B, L], True after a sequence's end, None if all have the same length; labels [B] or None."""

    ids: Tensor
    padding: Tensor | None
    labels: Tensor | None

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], labels: Sequence[int] | None = None) -> TextBatch:
        """Pad sequences to the length of the longest."""
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True, padding_value=PAD)
        padding = ids == PAD
        return cls(ids, padding if padding.any() else None, None if labels is None else torch.tensor(labels))


def batches_of(
    sequences: Sequence[Sequence[int]], labels: Sequence[int] | None, batch_size: int, seed: int | None = None
) -> Iterator[TextBatch]:
    """Yield one epoch of batches of sequences of similar length, so that there is little padding; shuffled if there is a seed."""
    count = len(sequences)
    order = list(range(count)) if seed is None else torch.randperm(count, generator=_generator(seed)).tolist()
    pool = count if seed is None else _POOL * batch_size
    batches: list[list[int]] = []
    for start in range(0, count, pool):
        similar = sorted(order[start : start + pool], key=lambda i: len(sequences[i]))
        batches += [similar[k : k + batch_size] for k in range(0, len(similar), batch_size)]
    batch_order = range(len(batches)) if seed is None else torch.randperm(len(batches), generator=_generator(seed)).tolist()
    for k in batch_order:
        chosen = batches[k]
        yield TextBatch.of([sequences[i] for i in chosen], None if labels is None else [labels[i] for i in chosen])


def endless(sequences: Sequence[Sequence[int]], labels: Sequence[int] | None, batch_size: int, seed: int) -> Iterator[TextBatch]:
    """Yield shuffled batches, epoch after epoch."""
    epoch = 0
    while True:
        yield from batches_of(sequences, labels, batch_size, hash((seed, epoch)) % 2**31)  # a new order in every epoch
        epoch += 1


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
