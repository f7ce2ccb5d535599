"""Encoder blocks agree with torch's with the same weights, and with the same blocks in TT form; mistakes with modules are named."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from refusals import refuse
from torch import Tensor, nn

import comera_rec as cr
from comera_rec.nn import (
    ClassificationHead,
    EncoderBlock,
    LanguageModelHead,
    MultiheadAttention,
    TiedProjection,
    TransformerConfig,
    TransformerEncoder,
    dense_embedding,
)
from comera_rec.serving.forms import serving_copy

SMALL = TransformerConfig(vocab_size=90, embed_dim=16, num_layers=2, num_heads=4, ff_dim=24, max_length=10)
tt_embedding = partial(cr.TTEmbedding, shape=cr.TTShape((6, 5, 4), (2, 2, 4), 5), std=0.02)
PADDED = torch.arange(7) >= torch.tensor([[7], [4], [1]])  # of a batch of 3 x 7


def tt(model: nn.Module) -> nn.Module:
    """Compress all linear layers of a model."""
    return cr.compress_(model, linears=cr.LinearCompression(tt_ranks=3, min_features=1, policy="always"))


def weights_for_torch(block: EncoderBlock) -> dict[str, Tensor]:
    """A dense block's parameters, by the names of those of torch's layer."""
    attention, ff = block.attention, block.feed_forward
    projections = attention.query, attention.key, attention.value
    parts = {"self_attn.out_proj": attention.output, "linear1": ff.expand, "linear2": ff.contract}
    parts |= {"norm1": block.attention_norm, "norm2": block.feed_forward_norm}
    return {
        "self_attn.in_proj_weight": torch.cat([p.weight for p in projections]),
        "self_attn.in_proj_bias": torch.cat([p.bias for p in projections]),
        **{f"{part}.{name}": value for part, module in parts.items() for name, value in module.named_parameters()},
    }


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, PADDED], ids=["unpadded", "padded"])
def test_a_dense_block_equals_torchs(norm_first: bool, causal: bool, mask: Tensor | None) -> None:
    block = EncoderBlock(16, 4, 24, norm_first=norm_first).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, F.gelu, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    x_BLD = torch.randn(3, 7, 16, dtype=torch.float64, requires_grad=True)
    later = nn.Transformer.generate_square_subsequent_mask(7).isinf() if causal else None
    masks = {"src_mask": later, "src_key_padding_mask": mask}
    expected = torch.func.functional_call(layer, weights_for_torch(block), (x_BLD,), masks)
    actual = block(x_BLD, key_padding_mask=mask, causal=causal)
    torch.testing.assert_close(actual, expected)
    inputs, upstream = [x_BLD, *block.parameters()], torch.randn_like(actual)
    torch.testing.assert_close(*(torch.autograd.grad(out, inputs, upstream) for out in (actual, expected)))


def test_padding_does_not_affect_other_positions_and_all_padding_is_finite() -> None:
    attention = tt(MultiheadAttention(16, 4))
    x_BLD = torch.randn(3, 7, 16, requires_grad=True)
    mask = torch.arange(7) >= torch.tensor([[7], [4], [0]])
    actual = attention(x_BLD, key_padding_mask=mask)
    torch.testing.assert_close(actual[1, :4], attention(x_BLD[1:2, :4])[0])
    torch.testing.assert_close(actual[2], attention.output.bias.expand(7, 16))
    actual.sum().backward()
    assert x_BLD.grad.isfinite().all()


def test_a_causal_encoder_does_not_look_ahead_and_positions_matter() -> None:
    config = TransformerConfig(**{**vars(SMALL), "causal": True})
    encoder = TransformerEncoder(config).eval()
    ids = torch.randint(90, (2, 7))
    changed = torch.cat([ids[:, :4], (ids[:, 4:] + 1) % 90], dim=1)
    assert torch.equal(encoder(ids)[:, :4], encoder(changed)[:, :4])
    assert not torch.allclose(encoder(ids)[:, 4:], encoder(changed)[:, 4:])
    same = encoder(torch.zeros(1, 2, dtype=torch.long))[0]
    assert not torch.allclose(same[0], same[1])
    classify = ClassificationHead(16, 3)
    assert torch.equal(classify(encoder(ids)), classify(encoder(changed))), "scores are those of the first position"


class MaskedModel(nn.Module):
    """An encoder and a language-model head."""

    def __init__(self, *, tied: bool, is_tt: bool) -> None:
        super().__init__()
        self.encoder = TransformerEncoder(SMALL, embedding=tt_embedding if is_tt else dense_embedding)
        projection = TiedProjection(self.encoder.tokens) if tied else nn.Linear(16, 90)
        self.head = LanguageModelHead(16, projection)
        if is_tt:
            tt(self)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(ids))


def test_a_tied_projection_is_x_e_transposed_plus_bias() -> None:
    x_D = torch.randn(2, 16, dtype=torch.float64)
    for tokens in (tt_embedding(90, 16).double(), dense_embedding(90, 16).double()):
        projection = TiedProjection(tokens)
        nn.init.normal_(projection.bias)
        matrix = tokens.dense_matrix() if isinstance(tokens, cr.TTEmbedding) else tokens.weight
        torch.testing.assert_close(projection(x_D), x_D @ matrix.mT + projection.bias)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("is_tt", [False, True])
def test_a_language_model_stores_and_exports_a_tied_table_once(is_tt: bool, tied: bool) -> None:
    model = MaskedModel(tied=tied, is_tt=is_tt).eval()
    assert (getattr(model.head.projection, "embedding", None) is model.encoder.tokens) == tied
    ids = torch.randint(90, (2, 7))
    dense = cr.export_dense(model)
    assert type(dense.encoder.tokens) is nn.Embedding
    torch.testing.assert_close(dense(ids), model(ids), rtol=1e-4, atol=1e-4)
    assert (getattr(dense.head.projection, "embedding", None) is dense.encoder.tokens) == tied
    with torch.no_grad():
        served, _ = serving_copy(model, {"ids": ids}, "portable", "float32")
        torch.testing.assert_close(served(ids), model(ids), rtol=1e-4, atol=1e-4)
    report = cr.compression_report(model)
    assert report.total("params") == sum(p.numel() for p in model.parameters())
    assert report.total("dense_params") == sum(p.numel() for p in dense.parameters())
    kinds = {layer.name: (layer.kind, layer.format) for layer in report.layers}
    assert kinds["encoder.tokens"] == ("table", "tt" if is_tt else "dense")
    assert kinds["encoder.blocks.1.feed_forward.expand"] == ("linear", "tt" if is_tt else "dense")


def look_up(*ids: int, bag: cr.TTEmbeddingBag | None = None, weights: Tensor | None = None) -> Tensor:
    """Look up one bag, by default in a table whose last rows are padding."""
    bag = bag or cr.TTEmbeddingBag(101, 11, shape=cr.TTShape((7, 5, 3), (3, 2, 2), (4, 5)), name="table 'C3'", dtype=torch.float64)
    return bag(torch.tensor(ids), torch.tensor([0]), weights)


def partly_on_meta() -> cr.TTEmbedding:
    table = cr.TTEmbedding(100, 16, hot_rows=[(10, 4)])
    table.hot_rows.to("meta")
    return table


def ordered(order: Tensor) -> cr.TTEmbeddingBag:
    return cr.TTEmbeddingBag(60, 12, row_order=order, name="table 'x'")


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: cr.TTEmbeddingBag(100, 16, mode="median"), "mode is 'median': choose one of 'sum', 'mean', 'max'"),
    (lambda: cr.TTEmbeddingBag(100, 16, impl="fast"), "impl is 'fast': choose 'auto'"),
    (lambda: cr.TTEmbeddingBag(100, 16, shape=cr.TTShape((9, 10), (4, 4), 2)), "shape spans 90 x 16, less than 100 x 16"),
    (lambda: cr.TTEmbeddingBag(100, 16, shape=cr.TTShape((10, 10), (4, 4), 2), tt_ranks=2), "are both given: give one of them"),
    (lambda: cr.TTEmbeddingBag(32, 1, shape=cr.TTShape((2,) * 5, (1,) * 5, 2)), "has 5 cores: embedding tables take at most 4"),
    (lambda: cr.TTEmbeddingBag.from_dense(nn.EmbeddingBag(10, 4, padding_idx=0)), "can't leave padding_idx out of bags"),
    (lambda: cr.TTEmbeddingBag.from_dense(nn.EmbeddingBag(10, 4, scale_grad_by_freq=True)), "scale_grad_by_freq have no"),
    (lambda: cr.TTEmbeddingBag(100, 16, std=math.inf), "std is inf: give a finite number of at least 0"),
    (lambda: cr.TTLinear(16, 8, std=-1.0), "std is -1.0: give a finite number"),
    (lambda: cr.TTEmbedding(100, 16)([1, 2]), "ids of the table are a list: give a tensor"),
    (lambda: cr.TTEmbeddingBag(100, 16)(torch.arange(3), [0, 2]), "offsets are a list: give a tensor"),
    (lambda: cr.TTEmbedding(100, 16).logits(torch.ones(2, 8)), r"input has shape \(2, 8\): give \[..., 16\]"),
    (lambda: setattr(cr.TTEmbedding(9, 4), "weight", nn.Parameter(torch.ones(9, 4))), "has cores and no weight to set or to tie"),
    (lambda: partly_on_meta()(torch.arange(3)), "parameters of a table are on several devices"),
    (lambda: look_up(0, 101), "id 101 is out of range for table 'C3': its ids run from 0 to 100"),
    (lambda: look_up(1, 60, bag=ordered(torch.randperm(60))), "id 60 is out of range for table 'x'"),
    (lambda: look_up(0, 1, 2, weights=torch.ones(3, 1)), r"per_sample_weights has shape \(3, 1\) for ids of shape \(3,\): give"),
    (lambda: ordered(torch.arange(60) + 1), "give each of the numbers 0 to 59 once"),
    (lambda: cr.TTLinear(0, 8), "in_features is 0: give a positive integer"),
    (lambda: cr.TTLinear(16, 8, shape=cr.TTShape((4, 4), (4, 4), 2)), "is not that of a TT linear layer: give input modes"),
    (lambda: cr.TTLinear(16, 8, shape=cr.TTShape((15, 1), (1, 8), 2)), "shape spans 15 x 8, less than 16 x 8: enlarge its modes"),
    (lambda: cr.TTLinear(15, 21)(torch.randn(2, 14)), "input has 14 features and the layer takes 15"),
    (lambda: cr.LinearCompression(compression=1.0), "compression is 1.0: give a number above 1"),
    (lambda: cr.LinearCompression(batch=0), "batch is 0: give a positive integer"),
    (lambda: cr.LinearCompression(policy="never"), "policy is 'never': choose 'auto' or 'always'"),
    (lambda: MultiheadAttention(16, 3), "num_heads is 3, which does not divide embed_dim 16: choose one of its divisors"),
    (lambda: MultiheadAttention(16, 0), "num_heads is 0: give a positive integer"),
    (lambda: TransformerConfig(num_layers=0), "num_layers is 0: give a positive integer"),
    (lambda: TransformerConfig(dropout=1.0), "dropout is 1.0: give a probability from 0 to below 1"),
    (lambda: TransformerEncoder(SMALL)(torch.zeros(1, 11).long()), "ids have 11 positions but max_length is 10: truncate the ids"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES, ids=[str(k) for k in range(len(MISTAKES))])
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    refuse(message, make)
