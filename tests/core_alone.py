"""Swaps a table, trains a step, truncates, exports and serves, with no packages but those that comera-rec requires.

`tests/test_extras.py` runs this with the others hidden, and `make dist` in an environment without them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import comera_rec as cr
from comera_rec.rank import truncate_ranks_
from comera_rec.serving.package import ServingModel

torch.set_num_threads(1)
config = EmbeddingBagConfig(name="products", num_embeddings=1000, embedding_dim=8, feature_names=["item"])
model = torch.nn.Sequential(EmbeddingBagCollection(tables=[config]))
cr.compress_(model, tables=cr.TableCompression(tt_ranks=4, min_rows=0))
batch = KeyedJaggedTensor.from_lengths_sync(["item"], torch.tensor([0, 7, 999, 7]), torch.tensor([2, 0, 2]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(batch).values().square().sum().backward()
optimizer.step()
truncate_ranks_(model, optimizer, threshold=0.5)
with tempfile.TemporaryDirectory() as folder:
    cr.export(model, batch, Path(folder, "model.pt2"))
    (pooled,) = ServingModel(Path(folder, "model.pt2"))(batch.values(), batch.lengths())
torch.testing.assert_close(pooled, model(batch).values())
print(sys.modules["comera_rec"].__file__, tuple(pooled.shape))
