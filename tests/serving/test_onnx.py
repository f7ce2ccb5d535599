"""Models as ONNX: onnxruntime gives the model's numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from foreign_programs import PROGRAMS, batch
from hypothesis import given
from hypothesis import strategies as st

import comera_rec as cr
from comera_rec.nn import TTTable
from comera_rec.serving.arguments import flattened, named_arguments, named_outputs
from comera_rec.serving.onnx import DECOMPOSITIONS

onnxruntime = pytest.importorskip("onnxruntime")
aten = torch.ops.aten


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=9), is_last=st.booleans(), seed=st.integers(0, 99))
def test_decompositions_are_the_operators(sizes: list[int], is_last: bool, seed: int) -> None:
    torch.manual_seed(seed)
    lengths = torch.tensor(sizes)
    ends, count = lengths.cumsum(0), sum(sizes)
    offsets = torch.cat([ends.new_zeros(1), ends])[: None if is_last else -1]
    weight, ids, weights, values = torch.randn(7, 3), torch.randint(7, (count,)), torch.rand(count), torch.randint(-2, 40, (11,))
    for right in (False, True):
        found = DECOMPOSITIONS[aten.searchsorted.Tensor](ends, values, right=right)
        assert found.equal(torch.searchsorted(ends, values, right=right))
    repeated = DECOMPOSITIONS[aten.repeat_interleave.self_Tensor](torch.arange(len(sizes)), lengths, output_size=count)
    assert repeated.equal(torch.arange(len(sizes)).repeat_interleave(lengths))
    for each in (None, weights):
        bags = DECOMPOSITIONS[aten._embedding_bag.default](weight, ids, offsets, False, 0, False, each, is_last)[0]
        expected = F.embedding_bag(ids, weight, offsets, mode="sum", per_sample_weights=each, include_last_offset=is_last)
        torch.testing.assert_close(bags, expected)


@pytest.mark.parametrize(("name", "dtype", "atol"), [("managed", "float32", 1e-5), ("bert4rec", "int8", 0.05)])
def test_onnxruntime_gives_the_models_numbers(name: str, dtype: str, atol: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = PROGRAMS[name].model("cpu").eval()
    table = next(module for module in whole.modules() if isinstance(module, TTTable))
    table.set_row_order_(torch.randperm(table.num_embeddings))
    model, sample = PROGRAMS[name].served(whole, batch(0, range(2)))
    metadata = cr.export(model, sample, tmp_path / "model.onnx", dtype=dtype)
    model, other = PROGRAMS[name].served(whole, batch(7, range(5)))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    tensors = dict(zip(metadata.names, flattened(named_arguments(model, other)), strict=True))
    outputs = session.run(None, {given.name: tensors[given.name].numpy() for given in session.get_inputs()})
    with torch.no_grad():
        expected = named_outputs(model(*other) if isinstance(other, tuple) else model(other))
    for actual, (_, wanted) in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(actual, wanted.numpy(), atol=atol, rtol=1e-4)


def test_losses_of_large_logits_are_exact(tmp_path: Path) -> None:
    class Losses(torch.nn.Module):
        def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return F.logsigmoid(logits), F.binary_cross_entropy_with_logits(logits, labels, pos_weight=torch.tensor(3.0))

    cr.export(Losses(), (torch.tensor([-90.0, -16, 0, 16, 90]), torch.tensor([1.0, 0, 1, 0, 1])), tmp_path / "model.onnx")


def test_what_onnx_lacks_is_refused(tmp_path: Path) -> None:
    class Sorts(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvalsh(x @ x.mT)

    with pytest.raises(ValueError, match=r"can't be written as ONNX: .*_linalg_eigh"):
        cr.export(Sorts(), torch.randn(3, 3), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="drop form='fast'"):
        cr.export(Sorts(), torch.randn(3, 3), tmp_path / "model.onnx", form="fast")
    assert not list(tmp_path.iterdir())
