"""Measure the prices by which `TTShape.for_table` chooses: `python -m benchmarks.lookup.calibrate`; about three minutes.

Steps of random shapes of several tables are timed. The prices are nonnegative and minimize the squared relative errors of
predictions; put them into `comera_rec/tt/cost.py`. `python -m benchmarks.run shapes` then shows how good the choices are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import click
import numpy as np
from tqdm import tqdm

from benchmarks.harness.cli import run_command
from benchmarks.harness.timing import Plan
from benchmarks.lookup.shapes import ShapedTables, ShapesCase, correlation
from comera_rec.tt import LinearWork, LookupCost, Work, table_candidates

# Different from the tables in `shapes.py`.
TABLES = (
    ShapesCase(rows=286_181, dim=64, compression=100),
    ShapesCase(rows=500_000, dim=32, compression=150),
    ShapesCase(rows=1_500_000, dim=64, compression=60),
    ShapesCase(rows=3_000_000, dim=128, compression=250),
    ShapesCase(rows=5_461_306, dim=128, compression=800),
    ShapesCase(rows=7_046_547, dim=64, compression=200),
    ShapesCase(rows=8_351_593, dim=64, compression=600),
    ShapesCase(rows=30_000_000, dim=16, compression=200),
    ShapesCase(rows=50_000_000, dim=32, compression=1500),
)


@click.command()
@click.option("--shapes", default=14, show_default=True, help="Number of shapes for each order and table.")
@click.option(
    "--seconds",
    default=8.0,
    show_default=True,
    help="Time for each table, at least three rounds of the shapes that aren't far slower than others.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of shapes, weights and inputs.")
def calibrate(shapes: int, seconds: float, seed: int) -> None:
    """Measure and print the prices of this machine."""
    random.seed(seed)
    work: list[Work] = []
    milliseconds: list[float] = []
    for case in tqdm(TABLES, desc="calibrate", unit="table", disable=None):
        by_order = [table_candidates(case.rows, case.dim, case.budget, (order,)) for order in (2, 3, 4)]
        picked = [shape for of_order in by_order for shape in random.sample(of_order, min(shapes, len(of_order)))]
        times = ShapedTables(case, "cpu", seed).time(picked, Plan(warmup=0, min_rounds=3, seconds=seconds))
        cost = LookupCost(lookups=case.batch, exponent=case.zipf)
        work += [cost.work(shape.row_shape, shape.col_shape, shape.ranks) for shape in times]
        milliseconds += times.values()
    print_prices(work, milliseconds)


def print_prices(work: Sequence[Work] | Sequence[LinearWork], milliseconds: Sequence[float]) -> None:
    """Print the prices that fit measured steps best, and how well they fit."""
    amounts, measured = np.array(work), np.array(milliseconds)
    prices = nonnegative_least_squares(amounts / measured[:, None], np.full(len(measured), 1e6))
    fitted = amounts @ prices / 1e6
    click.echo(f"NANOSECONDS = {type(work[0])(*(float(f'{price:.3g}') for price in prices))}")
    click.echo(
        f"errors of {np.sqrt(np.mean((fitted / measured - 1) ** 2)):.0%} (root mean square) over {len(measured)} steps; "
        f"correlation {correlation(fitted, measured):.3f}"
    )


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray, rounds: int = 20_000) -> np.ndarray:
    """Minimize |matrix @ x - target| over x >= 0, one coordinate at a time; coordinates of zero columns stay 0."""
    scale = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(scale > 0, scale, 1)
    gram, goal, solution = scaled.T @ scaled, scaled.T @ target, np.zeros(matrix.shape[1])
    for _ in range(rounds):
        for k in np.flatnonzero(scale):
            solution[k] = max(0.0, solution[k] + goal[k] - gram[k] @ solution)
    return solution / np.where(scale > 0, scale, 1)


if __name__ == "__main__":
    run_command(calibrate, "benchmarks.lookup.calibrate")
