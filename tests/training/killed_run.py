"""`comera train` of which process 0 is killed on the first attempt: python killed_run.py STEP train ARGUMENTS.

It is killed when the files of that step's checkpoint are written but not yet renamed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from comera_rec.cli.main import main
from comera_rec.training import checkpoint


def kill_at(step: int) -> None:
    checksum = checkpoint._checksum

    def written(path: Path) -> int:
        if f"step_{step:08d}" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        return checksum(path)

    checkpoint._checksum = written


if __name__ == "__main__":
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("0", "0"):
        kill_at(int(sys.argv[1]))
    main(sys.argv[2:])
