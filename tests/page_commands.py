"""Runs the commands of a page of the documentation as its reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path


def run_commands(page: Path, folder: Path, port: int = 8000, without: str = "") -> str:
    """Run the blocks of shell commands of a page in a folder, with its port replaced, and return what they print.

    `without` is a command of the page that has been run already.
    """
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert without + "\n" in ["\n", *blocks]
    script = "set -e\n" + "".join(block for block in blocks if block != without + "\n").replace("8000", str(port))
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(["sh", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout
