"""Daily retraining: each day's model is evaluated on the next day's rows of one synthetic log.

continued      `comera transform --extend`, then `comera train --after` the day before's run, on the day's rows alone
anew           a new data set and a new run on the rows of all days so far
first day's    the model of the first day, never trained again

Each is `comera train --config examples/kaggle.toml` with fixed ranks. `counted` has AUC and the steps of the run.
"""

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.dlrm import CONFIG
from benchmarks.harness.environment import comera
from benchmarks.harness.measure import Settings, each_case
from benchmarks.harness.rows import Row
from benchmarks.harness.workload import Given
from data_pipeline.errors import UserError
from data_pipeline.synth import SynthOptions, synth

CONTINUED, ANEW, FIRST = "continued", "anew", "first day's"


def run(settings: Settings) -> Iterator[list[Row]]:
    """Train and evaluate day after day."""
    size = {"rows": 400, "scale": 0.001, "batch": 64} if settings.quick else {"rows": 400_000, "scale": 0.2, "batch": 1024}
    cases = [Given(values={"day": day, **size}) for day in range(1, 3 if settings.quick else 6)]
    if settings.only:
        raise UserError("--only leaves out days, on which later ones depend: leave it out")
    with tempfile.TemporaryDirectory(dir=settings.data) as name:
        folder = Path(name)
        logs = list(_logs(folder, size, len(cases) + 1))
        for case, rows in each_case("days", cases, settings):
            found = dict(_day(folder, logs, case.shapes(), settings.seed))
            yield rows("test", "NE", {method: [of.pop("ne")] for method, of in found.items()}, found)


def _logs(folder: Path, size: Mapping[str, Any], days: int) -> Iterator[Path]:
    """Write a log of all days, and return a part of it for each."""
    whole = folder / "log.txt"
    synth(SynthOptions(rows=size["rows"] * days, output=whole, seed=1, scale=size["scale"]))
    with whole.open() as lines:
        for day in range(1, days + 1):
            (folder / f"{day}.txt").write_text("".join(itertools.islice(lines, size["rows"])))
            yield folder / f"{day}.txt"


def _day(folder: Path, logs: list[Path], case: Mapping[str, Any], seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each method's scores after a day, the last to train on."""
    day, preprocess = case["day"], ("preprocess", "--val-fraction", 0.01, "--test-fraction", 0.01)
    train = ("train", "--config", CONFIG, "ranks=none", f"data.batch_size={case['batch']}", f"seed={seed}")

    def trained(prepare: tuple[Any, ...], data: Path, output: Path, *more: object) -> dict[str, float]:
        comera(*prepare, "--output", data)
        comera(*train, f"data.path={data}", f"output={output}", *more)
        return _score(folder, data, output, logs[day])

    inputs = [word for log in logs[:day] for word in ("--input", log)]
    yield ANEW, trained((*preprocess, *inputs), folder / f"anew-{day}", folder / f"anew-{day}-run")
    if day == 1:
        return
    before, data = (folder / (f"continued-{k}" if k > 1 else "anew-1") for k in (day - 1, day))
    extend = ("transform", "--data", before, "--input", logs[day - 1], "--split", "train", "--extend")
    yield CONTINUED, trained(extend, data, Path(f"{data}-run"), "--after", f"{before}-run")
    yield FIRST, _score(folder, folder / "anew-1", folder / "anew-1-run", logs[day])


def _score(folder: Path, data: Path, run: Path, log: Path) -> dict[str, float]:
    """Evaluate a run on a log, encoded with the vocabularies of its data set."""
    with tempfile.TemporaryDirectory(dir=folder) as encoded:
        comera("transform", "--data", data, "--input", log, "--split", "test", "--output", f"{encoded}/data")
        scores = json.loads(comera("evaluate", "--checkpoint", run, "--data", f"{encoded}/data"))
    steps = json.loads((run / "result.json").read_text())["steps"]
    return {"ne": scores["ne"], "auc": scores["auc"], "steps": float(steps)}
