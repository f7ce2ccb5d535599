"""Measure the prices for contracting and compressing linear layers: `python -m benchmarks.linear.calibrate`; two minutes.

Steps of random layers, dense and in random contractions, are timed, and their 20th percentiles taken. The prices are nonnegative
and minimize the squared relative errors of predictions; put them into `comera_rec/tt/linear_cost.py`. `python -m benchmarks.run
linear` then shows how good the decisions are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import click
import torch
from torch import Tensor, nn
from tqdm import tqdm

import comera_rec as cr
from benchmarks.harness.cli import run_command
from benchmarks.harness.timing import Plan, alternate, percentiles
from benchmarks.lookup.calibrate import print_prices
from comera_rec.ops import tt_linear
from comera_rec.tt import Contraction, LinearWork, candidate_contractions, contraction_work, dense_work

FEATURES = (192, 384, 640, 896, 1536, 2560)  # different from those in `layers.py`
RANKS = (4, 8, 16, 24, 48, 96)
BATCHES = (1, 4, 16, 64, 256, 1024, 4096)
MOST = 1e9  # multiply-adds of a dense forward pass


@click.command()
@click.option("--layers", default=60, show_default=True, help="How many layers, each dense and in four contractions.")
@click.option("--seconds", default=0.5, show_default=True, help="Time for each layer, at least five rounds.")
@click.option("--seed", default=0, show_default=True, help="Seed of layers, weights and inputs.")
def calibrate(layers: int, seconds: float, seed: int) -> None:
    """Measure and print the prices of this machine."""
    random.seed(seed)
    torch.manual_seed(seed)
    work: list[LinearWork] = []
    milliseconds: list[float] = []
    for _ in tqdm(range(layers), desc="calibrate", unit="layer", disable=None):
        steps = dict(_steps(*_layer()))
        plan = Plan(warmup=1, min_rounds=5, max_rounds=200, seconds=seconds)
        times = alternate({str(each): step for each, step in steps.items()}, plan)
        work += steps
        milliseconds += [percentiles(times[str(each)])[0] for each in steps]
    print_prices(work, milliseconds)


def _layer() -> tuple[cr.TTLinear, int]:
    while True:
        batch, rows, cols = random.choice(BATCHES), random.choice(FEATURES), random.choice(FEATURES)
        if batch * rows * cols <= MOST:
            shape = cr.TTShape.for_linear(rows, cols, tt_ranks=random.choice(RANKS), order=random.choice((2, 4, 4, 6)))
            return cr.TTLinear(rows, cols, shape=shape), batch


def _steps(layer: cr.TTLinear, batch: int) -> Iterator[tuple[LinearWork, Callable[[int], None]]]:
    """Yield (work, call) of the dense layer, the chosen contraction, and random ones that aren't much more work."""
    x_BI = torch.randn(batch, layer.in_features, requires_grad=True)
    upstream_BO = torch.randn(batch, layer.out_features)

    def step(forward: Callable[[Tensor], Tensor], module: nn.Module) -> Callable[[int], None]:
        def call(turn: int) -> None:
            for tensor in (x_BI, *module.parameters()):
                tensor.grad = None
            forward(x_BI).backward(upstream_BO)

        return call

    dense = layer.to_dense()
    of_dense = dense_work(layer.in_features, layer.out_features, batch)
    yield of_dense, step(dense, dense)
    candidates = list(candidate_contractions(layer.shape))
    contractions = [layer.contraction(batch), *random.sample(candidates, min(len(candidates), 6))]
    for contraction in dict.fromkeys(contractions):
        work = contraction_work(layer.shape, contraction, batch)
        if work.multiplies <= 4 * of_dense.multiplies:
            yield work, step(partial(_contracted, layer, contraction), layer)


def _contracted(layer: cr.TTLinear, contraction: Contraction, x: Tensor) -> Tensor:
    return tt_linear(x, layer.cores(), layer.rank_parameters(), layer.out_features, layer.bias, contraction)


if __name__ == "__main__":
    run_command(calibrate, "benchmarks.linear.calibrate")
