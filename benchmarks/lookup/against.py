"""The lookup of this checkout against that of another one: training steps in turns, on the same batches.

`python -m benchmarks.lookup.against FOLDER` starts one process for each checkout, which imports comera_rec from its own folder; the
two take steps in turns, so that changes of the machine's speed affect both alike. Tables, ids and Adagrad are those of
`python -m benchmarks.run lookup`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).parents[2]
ROWS = (10131227, 2202608, 8351593, 5461306, 7046547, 286181, 142572)  # Criteo-Kaggle's tables above 100,000 rows
DIM, ZIPF, BATCHES, LR, EPS = 64, 1.05, 8, 0.01, 1e-8


class Engine:
    """A process that takes steps with the package in one folder."""

    def __init__(self, folder: Path, case: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--engine", json.dumps(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
        )
        ready = self._answer()
        if Path(ready["package"]).parents[1] != folder.resolve():
            raise click.ClickException(f"{folder} has no comera_rec ({ready['package']} was imported): name a checkout")

    def step(self) -> float:
        """Take the next step; return its milliseconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._answer()["ms"])

    def stop(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException("a measuring process ended early; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(case: dict[str, Any]) -> None:
    """Take a step of the case for every line on standard input, and print its time."""
    import torch  # imported here, because only this process needs it
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec import KeyedJaggedTensor

    import comera_rec as cr

    torch.manual_seed(0)
    collection = cr.TTEmbeddingBagCollection(
        [
            cr.TTEmbeddingBagConfig(
                name=f"t{t}",
                feature_names=[f"f{t}"],
                num_embeddings=count,
                embedding_dim=DIM,
                shape=cr.TTShape.for_table(count, DIM, tt_ranks=case["rank"], order=case["order"]),
            )
            for t, count in enumerate(ROWS)
        ]
    )
    if case["in_backward"]:
        _apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": LR, "eps": EPS})
        optimizer = None
    else:
        optimizer = torch.optim.Adagrad(collection.parameters(), lr=LR, eps=EPS, fused=True)
    batches = []
    for _ in range(BATCHES):
        ids = []
        for count in ROWS:
            # Zipf's law, by inverting its integral.
            u, power = torch.rand(case["batch"], dtype=torch.float64), 1 - ZIPF
            ids.append(((u * ((count + 0.5) ** power - 0.5**power) + 0.5**power) ** (1 / power) - 0.5).long().clamp(0, count - 1))
        lengths = torch.ones(len(ROWS) * case["batch"], dtype=torch.int32)
        batches.append(KeyedJaggedTensor([f"f{t}" for t in range(len(ROWS))], torch.cat(ids), lengths=lengths))
    upstream = torch.randn(case["batch"], len(ROWS) * DIM)
    print(json.dumps({"package": cr.__file__}), flush=True)
    for number, _ in enumerate(sys.stdin):
        begin = time.perf_counter()
        collection(batches[number % BATCHES]).values().backward(upstream)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        print(json.dumps({"ms": 1e3 * (time.perf_counter() - begin)}), flush=True)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rank", "ranks", multiple=True, type=int, default=(8, 16, 32), show_default=True)
@click.option("--order", default=2, show_default=True)
@click.option("--batch", default=16_384, show_default=True)
@click.option("--rounds", default=60, show_default=True, help="Steps of each checkout; the first five are not counted.")
def main(folder: Path, ranks: tuple[int, ...], order: int, batch: int, rounds: int) -> None:
    """Compare training steps with the lookup of the checkout in FOLDER."""
    for rank in ranks:
        case = {"rank": rank, "order": order, "batch": batch}
        engines = [Engine(HERE, {**case, "in_backward": True}), Engine(folder.resolve(), {**case, "in_backward": False})]
        times: list[list[float]] = [[], []]
        for turn in range(rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                time.sleep(0.01)  # the other process's threads spin for a while after its step
                times[which].append(engines[which].step())
        for engine in engines:
            engine.stop()
        here, there = (sorted(each[5:]) for each in times)
        ratio = statistics.median(new / old for new, old in zip(times[0][5:], times[1][5:], strict=True))
        click.echo(
            f"order {order}, rank {rank}, batch {batch}: {statistics.median(here):.1f} ms here, {statistics.median(there):.1f} ms "
            f"there, {ratio:.2f}x (first step {times[0][0]:.0f} and {times[1][0]:.0f} ms)"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
