"""Swaps a table, trains, truncates, loads, exports and serves, with no packages but those that comera-rec requires.

`tests/test_layers.py` runs this with the others hidden, and `make dist` in an environment without them.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import comera_rec as cr
from comera_rec.rank import truncate_ranks_
from comera_rec.serving.package import ServingModel


def compressed() -> nn.Module:
    config = EmbeddingBagConfig(name="products", num_embeddings=1000, embedding_dim=8, feature_names=["product"])
    return cr.compress_(nn.Sequential(EmbeddingBagCollection(tables=[config])), tables=cr.TableCompression(tt_ranks=4, min_rows=0))


torch.set_num_threads(1)
model, loaded = compressed(), compressed()
batch = KeyedJaggedTensor.from_lengths_sync(["product"], torch.tensor([0, 7, 999, 7]), torch.tensor([2, 0, 2]))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(2):
    model(batch).values().square().sum().backward()
    optimizer.step()
    ranks = truncate_ranks_(model, optimizer, threshold=float(model[0].tt_bag("products").rank_1.detach().abs().median()))
assert ranks["0.tt_bags.products"] < (4,)
loaded.load_state_dict(model.state_dict())
torch.testing.assert_close(cr.export_dense(loaded)(batch).values(), model(batch).values())
with tempfile.TemporaryDirectory() as folder:
    cr.export(loaded, batch, Path(folder, "model.pt2"))
    (pooled,) = ServingModel(Path(folder, "model.pt2"))(batch.values(), batch.lengths())
torch.testing.assert_close(pooled, model(batch).values())
print(cr.__file__, tuple(pooled.shape))
