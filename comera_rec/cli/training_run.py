"""What `comera train` does once its arguments are checked."""

from __future__ import annotations

from collections.abc import Sequence

import click
import torch.distributed as dist

from comera_rec.distributed import launcher_number, leave
from comera_rec.report import write_report
from comera_rec.training.config import RunConfig, load_config
from comera_rec.training.model import Schema, with_reachable_compression
from comera_rec.training.stopping import Interrupted
from comera_rec.training.trainer import Diverged, Trainer
from data_pipeline.manifest import read_manifest


def load_reachable_config(path: str | None, overrides: Sequence[str]) -> RunConfig:
    """Read a run's config, with the file's `tables.compression` lowered, and a line about it, if its tables can't reach that."""
    config = load_config(path, overrides)
    if any(override.startswith("tables.compression=") for override in overrides):
        return config
    reachable = with_reachable_compression(config, Schema.from_manifest(read_manifest(config.data.path)))
    if reachable != config and launcher_number("RANK", 0) == 0:
        click.echo(
            f"comera: the tables of {config.data.path} are too small for compression {config.tables.compression:g}; "
            f"they use {reachable.tables.compression:g}, the most that TT rank 1 reaches",
            err=True,
        )
    return reachable


def train(context: click.Context, config_path: str | None, overrides: Sequence[str]) -> None:
    """Train, write the report, and print the result on the first process; exit with a status if training stops early."""
    config = load_reachable_config(config_path, overrides)
    trainer = Trainer(config)
    is_first = trainer.processes.is_first  # after leaving the group, every process is alone
    try:
        result = trainer.train()
        leave()
    except (Interrupted, Diverged) as stop:
        leave()
        if is_first:
            click.echo(f"comera: {stop}", err=True)
        context.exit(stop.exit_status)
    except (RuntimeError, dist.DistError) as error:
        if not (trainer.processes.several and (isinstance(error, dist.DistError) or "gloo" in str(error))):
            raise
        click.echo(
            f"comera: process {trainer.processes.process_rank} has lost another process ({str(error).splitlines()[0]}): "
            "run the same command again to resume from the last checkpoint",
            err=True,
        )
        context.exit(1)
    if not is_first:
        return
    write_report([trainer.folder], trainer.folder / "report.html")
    smaller = f" ({result['ratio']:.1f}x smaller than dense)" if result["params"] < result["dense_params"] else ""
    click.echo(
        f"{config.output}: {result['steps']} steps, {result['split']} AUC {result['auc']:.4f}, NE {result['ne']:.4f}, "
        f"{result['params']:,} parameters{smaller}"
    )
