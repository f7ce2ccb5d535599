"""`comera train` whose processes are killed: python killed_run.py [ATTEMPT:RANK:WHERE:STEP] ... train ARGUMENTS.

On that attempt, the process of that rank is killed at that step: after it if WHERE is `step`; if WHERE is `checkpoint`, when the
files of its checkpoint are written but not yet renamed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from comera_rec.cli.main import main
from comera_rec.training import checkpoint
from comera_rec.training.trainer import Trainer


def kill_at(step: int, where: str) -> None:
    train, checksum = Trainer._step, checkpoint._checksum
    taken = 0

    def train_step(self: Trainer, batches: Any) -> Any:
        nonlocal taken
        loss, taken = train(self, batches), self.steps
        if where == "step" and taken == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def written(path: Path) -> int:
        if where == "checkpoint" and taken >= step:
            os.kill(os.getpid(), signal.SIGKILL)
        return checksum(path)

    Trainer._step = train_step  # type: ignore[method-assign]
    checkpoint._checksum = written


if __name__ == "__main__":
    split = sys.argv.index("train")
    for plan in sys.argv[1:split]:
        attempt, rank, where, step = plan.split(":")
        if (attempt, rank) == (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]):
            kill_at(int(step), where)
    main(sys.argv[split:])
