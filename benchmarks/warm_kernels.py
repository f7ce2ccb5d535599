"""Loads the lookup's CPU kernels when imported: for the server that processes fork from, so that each need not load them."""

from __future__ import annotations

import torch

import comera_rec as cr

torch.set_num_threads(1)  # threads don't survive a fork
for _order in (2, 3):
    _bag = cr.TTEmbeddingBag(100, 8, shape=cr.TTShape.for_table(100, 8, tt_ranks=2, order=_order))
    _bag(torch.arange(4), torch.arange(4)).sum().backward()
