"""Encoder blocks agree with torch's with the same weights (outputs, gradients, masks), and with the same blocks in TT form."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera_rec import (
    LinearCompression,
    TTEmbedding,
    TTShape,
    compress_,
    compression_report,
    export_dense,
)
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

SMALL = TransformerConfig(vocab_size=90, embed_dim=16, num_layers=2, num_heads=4, ff_dim=24, max_length=10)
tt_embedding = partial(TTEmbedding, shape=TTShape((6, 5, 4), (2, 2, 4), 5), std=0.02)


def tt(model: nn.Module) -> nn.Module:
    """Compress all linear layers of a model."""
    return compress_(model, linears=LinearCompression(tt_ranks=3, min_features=1, policy="always"))


def masks() -> dict[str, Tensor | None]:
    """Padding masks of a batch of 3 x 7."""
    return {"none": None, "padded": torch.arange(7) >= torch.tensor([[7], [4], [1]])}


def torch_block(block: EncoderBlock) -> nn.TransformerEncoderLayer:
    """Build torch's layer with a dense block's weights."""
    attention, ff = block.attention, block.feed_forward
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, F.gelu, batch_first=True, norm_first=block.norm_first, dtype=torch.float64)
    with torch.no_grad():
        projections = attention.query, attention.key, attention.value
        layer.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        layer.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
    layer.self_attn.out_proj.load_state_dict(attention.output.state_dict())
    layer.linear1.load_state_dict(ff.expand.state_dict())
    layer.linear2.load_state_dict(ff.contract.state_dict())
    layer.norm1.load_state_dict(block.attention_norm.state_dict())
    layer.norm2.load_state_dict(block.feed_forward_norm.state_dict())
    return layer


def dense_gradients(block: EncoderBlock) -> list[Tensor]:
    """A block's gradients, in the order of torch's parameters."""
    attention, ff = block.attention, block.feed_forward
    projections = attention.query, attention.key, attention.value
    rest = [*attention.output.parameters(), *ff.expand.parameters(), *ff.contract.parameters()]
    rest += [*block.attention_norm.parameters(), *block.feed_forward_norm.parameters()]
    return [torch.cat([p.weight.grad for p in projections]), torch.cat([p.bias.grad for p in projections]), *(p.grad for p in rest)]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", ["none", "padded"])
def test_a_dense_block_equals_torchs(norm_first: bool, causal: bool, padding: str) -> None:
    block = EncoderBlock(16, 4, 24, norm_first=norm_first).double()
    for norm in (block.attention_norm, block.feed_forward_norm):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    torch_layer = torch_block(block)
    mask = masks()[padding]
    x_BLD = torch.randn(3, 7, 16, dtype=torch.float64, requires_grad=True)
    twin_BLD = x_BLD.detach().clone().requires_grad_()
    later = nn.Transformer.generate_square_subsequent_mask(7).isinf() if causal else None
    expected = torch_layer(twin_BLD, src_mask=later, src_key_padding_mask=mask)
    actual = block(x_BLD, key_padding_mask=mask, causal=causal)
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(actual)
    actual.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(x_BLD.grad, twin_BLD.grad)
    torch.testing.assert_close(dense_gradients(block), [p.grad for p in torch_layer.parameters()])


def test_padding_does_not_affect_other_positions_and_all_padding_is_finite() -> None:
    attention = tt(MultiheadAttention(16, 4))
    x_BLD = torch.randn(3, 7, 16, requires_grad=True)
    mask = torch.arange(7) >= torch.tensor([[7], [4], [0]])
    actual = attention(x_BLD, key_padding_mask=mask)
    torch.testing.assert_close(actual[1, :4], attention(x_BLD[1:2, :4])[0])
    torch.testing.assert_close(actual[2], attention.output.bias.expand(7, 16))
    actual.sum().backward()
    assert x_BLD.grad is not None
    assert x_BLD.grad.isfinite().all()


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_tt_encoder_equals_its_dense_copy(norm_first: bool) -> None:
    config = TransformerConfig(**{**vars(SMALL), "norm_first": norm_first, "dropout": 0.0})
    encoder = TransformerEncoder(config, embedding=tt_embedding)
    model = tt(nn.Sequential(encoder, ClassificationHead(16, 3))).double()
    ids = torch.randint(90, (3, 7))
    dense = export_dense(model)
    assert type(dense[0].tokens) is nn.Embedding
    torch.testing.assert_close(model(ids), dense(ids))
    mask = masks()["padded"]
    torch.testing.assert_close(encoder(ids, key_padding_mask=mask), dense[0](ids, key_padding_mask=mask))


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


@pytest.mark.parametrize("is_tt", [False, True])
def test_a_tied_projection_is_x_e_transposed_plus_bias(is_tt: bool) -> None:
    tokens = (tt_embedding(90, 16) if is_tt else dense_embedding(90, 16)).double()
    projection = TiedProjection(tokens)
    nn.init.normal_(projection.bias)
    matrix = tokens.dense_matrix() if is_tt else tokens.weight
    x_D = torch.randn(2, 16, dtype=torch.float64)
    torch.testing.assert_close(projection(x_D), x_D @ matrix.mT + projection.bias)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("is_tt", [False, True])
def test_a_language_model_stores_and_exports_a_tied_table_once(is_tt: bool, tied: bool) -> None:
    model = MaskedModel(tied=tied, is_tt=is_tt).eval()
    assert (getattr(model.head.projection, "embedding", None) is model.encoder.tokens) == tied
    ids = torch.randint(90, (2, 7))
    dense = export_dense(model)
    torch.testing.assert_close(dense(ids), model(ids), rtol=1e-4, atol=1e-4)
    assert (getattr(dense.head.projection, "embedding", None) is dense.encoder.tokens) == tied
    report = compression_report(model)
    assert report.total("params") == sum(p.numel() for p in model.parameters())
    assert report.total("dense_params") == sum(p.numel() for p in dense.parameters())
    kinds = {layer.name: (layer.kind, layer.format) for layer in report.layers}
    assert kinds["encoder.tokens"] == ("table", "tt" if is_tt else "dense")
    assert kinds["encoder.blocks.1.feed_forward.expand"] == ("linear", "tt" if is_tt else "dense")
