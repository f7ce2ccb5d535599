"""Subcommands that take a trained model: evaluate, compress, export."""

import json
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource

from comera_rec.cli.train import load_reachable_config
from comera_rec.convert import compression_report, export_dense
from comera_rec.data import ParquetBatches
from comera_rec.ops.served_bags import DTYPES
from comera_rec.serving.export import SUFFIXES
from comera_rec.serving.forms import FORMS
from comera_rec.serving.runs import export_run
from comera_rec.training.evaluation import evaluate as evaluate_model
from comera_rec.training.from_runs import compress_run
from comera_rec.training.model import Schema
from comera_rec.training.runs import load_run, require_data
from data_pipeline.atomic import folder_beside
from data_pipeline.errors import UserError


@click.command()
@click.option("--checkpoint", "run", required=True, type=click.Path(), metavar="RUN", help="Folder of a run.")
@click.option("--data", required=True, type=click.Path(), metavar="DATA", help="Folder of a preprocessed data set.")
@click.option("--split", default="test", help="Split to evaluate: train, val or test.")
@click.option("--batch-size", default=2048, help="Rows in a batch.")
@click.option("--last", is_flag=True, help="Use the last checkpoint even if the run keeps its best one.")
def evaluate(run: str, data: str, split: str, batch_size: int, last: bool) -> None:
    """Print AUC, NE and logloss of a run's last checkpoint, or its best one if training.keep_best kept it, as one JSON line.

    \b
    Example:
      comera evaluate --checkpoint runs/compressed --data data/ --split test
    """
    batches = ParquetBatches(data, split, batch_size=batch_size)
    model, _, schema = load_run(run, last=last)
    require_data(run, schema, data, Schema.from_manifest(batches.manifest))
    click.echo(json.dumps(evaluate_model(model, batches, torch.device("cpu"))))


@click.command()
@click.option("--checkpoint", "run", required=True, type=click.Path(), metavar="DENSE", help="Folder of a trained dense run.")
@click.option("--config", "config_path", required=True, type=click.Path(exists=True, dir_okay=False), help="The new run's TOML.")
@click.option("--output", required=True, metavar="RUN", help="Folder of the compressed run.")
@click.argument("overrides", nargs=-1, metavar="[section.key=value ...]")
def compress(run: str, config_path: str, output: str, overrides: tuple[str, ...]) -> None:
    """Start a compressed run from a trained dense one, by TT-SVD; `comera train` with the same config and output fine-tunes it.

    Large tables share the size that tables.compression allows: ranks and hot rows go where they reduce the error most. A row's
    error is weighted by the sum of its squared gradients.

    \b
    Example:
      comera compress --checkpoint runs/dense --config examples/demo.toml --output runs/small tables.compression=50
      comera train --config examples/demo.toml output=runs/small tables.compression=50
    """
    trainer = compress_run(run, load_reachable_config(config_path, overrides, output))
    sizes = compression_report(trainer.model)
    click.echo(f"wrote {output}: {sizes.total('params'):,} parameters ({sizes.ratio:.1f}x smaller than dense)")


@click.command()
@click.option("--checkpoint", "run", required=True, type=click.Path(path_type=Path), metavar="RUN", help="Folder of a run.")
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="MODEL.pt2|MODEL.weights|MODEL.onnx|DIR/",
    help="The file, or a dense model's folder.",
)
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the data set; default the one the run was trained on.")
@click.option(
    "--form", type=click.Choice(list(FORMS)), default="portable", help="fast: needs libcomera_rec.so, which is copied beside it."
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", help="How tables are stored.")
@click.option("--last", is_flag=True, help="Use the last checkpoint even if the run keeps its best one.")
@click.pass_context
def export(context: click.Context, run: Path, output: Path, **options: Any) -> None:
    """Export a run's model as one file for serving, or as a dense model.

    MODEL.pt2 is compiled by AOTInductor: it runs in Python and C++, takes dense [B, I] float32, values [V]
    int64 column by column and lengths [F * B] int64, and returns probabilities [B], or [B, L] of L labels.
    The form `portable` needs only torch.
    MODEL.weights has the weights alone, for the code of MODEL.pt2 beside it, to which the server applies them.
    MODEL.onnx takes and returns the same, in onnxruntime.
    DIR/model.pt is the state dict of the dense model, such as TorchRec's DLRM over an EmbeddingBagCollection; DIR/model.json has
    its tables, labels and the sizes of hidden layers. Keys of model.pt have tables' names percent-encoded where torch
    refuses them: `a.b` is `a%2Eb`.

    \b
    Example:
      comera export --checkpoint runs/compressed --output model.pt2 --form fast --dtype int8
      comera export --checkpoint runs/compressed --output exported/
    """
    if output.suffix not in SUFFIXES:
        of_files = [name for name in ("data", "form", "dtype") if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if of_files:
            raise UserError(f"{output} is to be a dense model's folder, which takes no --{', --'.join(of_files)}: name a MODEL.pt2")
        _export_dense(run, output, last=options["last"])
        return
    metadata = export_run(run, output, **options)
    record = metadata.run
    quality = "AUC and NE are undefined, because all labels are equal" if record else "equal to the model on a sample"
    if record is not None and record.ne is not None and record.trained_ne is not None:
        change = round(100 * (record.ne / record.trained_ne - 1), 3) + 0.0  # without a minus before 0
        quality = f"AUC {record.auc:.4f}, NE {record.ne:.4f} ({change:+.3f} % from the run's)"
    click.echo(f"wrote {output}: {output.stat().st_size:,} bytes, {quality}")


def _export_dense(run: Path, output: Path, *, last: bool) -> None:
    if output.exists():
        raise UserError(f"{output} exists: give a new folder, or the name of a package, which ends in .pt2")
    model, config, schema = load_run(run, last=last)
    dense = export_dense(model)
    features = {"tables": schema.sparse, "dense_features": list(schema.dense), "labels": list(schema.labels)}
    description = {"model": config.to_dict()["model"], **features}
    try:
        with folder_beside(output) as folder:
            torch.save(dense.state_dict(), folder / "model.pt")
            (folder / "model.json").write_text(json.dumps(description, indent=2) + "\n")
            folder.rename(output)
    except (OSError, RuntimeError) as error:  # torch's is a RuntimeError
        reason = str(error).splitlines()[0]
        raise UserError(f"{output} can't be written: {reason}; name a writable place with enough space") from error
    click.echo(f"wrote {output}/model.pt: {compression_report(dense).total('bytes'):,} bytes of dense parameters")
