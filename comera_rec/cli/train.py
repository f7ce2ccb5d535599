"""The subcommand `comera train`."""

import json
from collections.abc import Sequence
from pathlib import Path

import click
import torch.distributed as dist

from comera_rec.cli.errors import tell
from comera_rec.distributed import WORLD, launcher_number, leave
from comera_rec.report import read_runs, write_report
from comera_rec.training.config import RunConfig, load_config
from comera_rec.training.from_runs import start_after
from comera_rec.training.model import Schema, keeps_all_dense, with_reachable_compression
from comera_rec.training.stopping import Interrupted
from comera_rec.training.trainer import Diverged, Trainer
from data_pipeline.manifest import read_manifest


def load_reachable_config(path: str | None, overrides: Sequence[str], output: str | None = None) -> RunConfig:
    """Read a run's config, with the file's `tables.compression` lowered if its tables can't reach that.

    A line says so, and if all tables stay dense.
    """
    folder = [] if output is None else [f"output={json.dumps(output, ensure_ascii=False)}"]  # a text, whatever it looks like
    config = load_config(path, [*overrides, *folder])
    schema, said = Schema.from_manifest(read_manifest(config.data.path)), ""
    if keeps_all_dense(config, schema):
        said = (
            f"all tables of {config.data.path} stay dense: those outside of tables.dense_tables have fewer rows than "
            f"tables.min_rows, {config.tables.min_rows}"
        )
    elif not any(override.startswith("tables.compression=") for override in overrides):
        before, config = config, with_reachable_compression(config, schema)
        if config != before:
            said = (
                f"the tables of {config.data.path} are too small for compression {before.tables.compression:g}; "
                f"they use {config.tables.compression:g}, the most that TT rank 1 reaches"
            )
    if said and launcher_number("RANK", 0) == 0:
        tell(f"comera: {said}")
    return config


@click.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False),
    help="The run's TOML file; keys that it lacks have their defaults.",
)
@click.option("--output", metavar="FOLDER", help="The run's folder; the same as output=FOLDER.")
@click.option("--after", type=click.Path(path_type=Path), metavar="RUN", help="Start a new run from this one, on later data.")
@click.argument("overrides", nargs=-1, metavar="[section.key=value ...]")
@click.pass_context
def train(
    context: click.Context, config_path: str | None, output: str | None, after: Path | None, overrides: tuple[str, ...]
) -> None:
    """Train a model, dense or compressed: DLRM, or another `model.architecture`.

    Everything is written to the config's `output` folder, with a report.html at the end. Running the command again resumes from the
    last checkpoint. SIGTERM, SIGHUP and Ctrl-C stop after the current step, with a checkpoint. Under torchrun tables are sharded
    over the processes, which share each batch; `--max-restarts` resumes from the last checkpoint.

    With --after, a new run starts from the weights, ranks and optimizer state of another one. Its data are the other run's, or come
    from them by `comera transform`; with --extend, new ids get rows.

    \b
    Example:
      comera train data.path=data/ output=runs/first tables.compression=100
      comera train --config examples/demo.toml data.path=data/ output=runs/compressed training.epochs=2
      torchrun --nproc-per-node 2 --max-restarts 3 -m comera_rec.train --config examples/demo.toml data.path=data/
    """
    config = load_reachable_config(config_path, overrides, output)
    trainer = Trainer(config, after=None if after is None else start_after(after, config))
    is_first = WORLD.is_first  # after leaving the group, every process is alone
    try:
        result = trainer.train()
        leave()
    except (Interrupted, Diverged) as stop:
        leave()
        if is_first:
            tell(f"comera: {stop}")
        context.exit(stop.exit_status)
    except (RuntimeError, dist.DistError) as error:
        if not (WORLD.several and (isinstance(error, dist.DistError) or "gloo" in str(error))):
            raise
        tell(
            f"comera: process {WORLD.process_rank} has lost another process ({str(error).splitlines()[0]}): "
            "run the same command again to resume from the last checkpoint"
        )
        context.exit(1)
    if not is_first:
        return
    write_report(read_runs([trainer.folder]), trainer.folder / "report.html")
    smaller = f" ({result['ratio']:.1f}x smaller than dense)" if result["params"] < result["dense_params"] else ""
    quality = "AUC and NE undefined" if result["auc"] is None else f"AUC {result['auc']:.4f}, NE {result['ne']:.4f}"
    click.echo(f"{config.output}: {result['steps']} steps, {result['split']} {quality}, {result['params']:,} parameters{smaller}")
