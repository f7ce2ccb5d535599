"""The subcommand `comera serve`, which needs the extra `serve`."""

import math
from pathlib import Path
from typing import Any

import click

from comera_rec.serving.server import ServeOptions
from comera_rec.serving.server import serve as answer_requests

_PATH, _COUNT = click.Path(path_type=Path), click.IntRange(1)


def _not_nan(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("nan is not a number of seconds")
    return value


@click.command()
@click.option("--model", type=_PATH, required=True, metavar="MODEL.pt2", help="A file that `comera export` wrote.")
@click.option("--data", type=_PATH, help="Data set whose vocabularies encode raw rows; default the one the model was trained on.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0 for a free one.")
@click.option("--threads", type=_COUNT, default=1, help="Threads that the model may use.")
@click.option("--max-batch", type=_COUNT, default=256, help="Maximum rows of a model call that answers several requests.")
@click.option("--max-queue", type=_COUNT, default=16_384, help="Maximum rows that wait; further requests are answered 503.")
@click.option("--max-rows", type=_COUNT, default=4096, help="Maximum rows of a request; a longer one is refused.")
@click.option("--max-body", type=_COUNT, default=8 << 20, metavar="BYTES", help="Maximum bytes of a request.")
@click.option(
    "--reload-seconds",
    type=click.FloatRange(0.01),
    callback=_not_nan,
    default=1.0,
    help="Seconds between checks for a new version of the file.",
)
def serve(**chosen: Any) -> None:
    """Answer requests over HTTP: encoded rows by the Open Inference Protocol, raw ones as plain JSON.

    To update the model, rename a new version to MODEL.pt2, or new weights to MODEL.weights: they are loaded and take over between
    two requests. What can't be loaded is reported, and the old version stays. /metrics is for Prometheus.

    \b
    Example:
      comera serve --model model.pt2 --port 8000
      curl localhost:8000/score -d '{"rows": [{"I1": 3, "I2": null, ..., "C26": "2dbcbc4c"}]}'
    """
    answer_requests(ServeOptions(**chosen), tell=click.echo)
