"""Puts a `comera` on PATH that runs commands in forks of a process that has already imported torch and TorchRec.

With little data, these imports would take most of a command's time.
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from processes import CONTEXT

from comera_rec.cli.main import main

CLIENT = """#!{python} -SE
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [json.dumps([sys.argv[1:], os.getcwd()]).encode()], [0, 1, 2])
process = int(server.recv(99))
signal.signal(signal.SIGTERM, lambda number, _: os.kill(process, number))
sys.exit(int(server.recv(99)))
"""


@contextmanager
def comera_on_path(folder: Path) -> Iterator[dict[str, str]]:
    """Yield this process's environment, but with a `comera` that starts in milliseconds."""
    address = str(folder / "socket")
    script = folder / "comera"
    script.write_text(CLIENT.format(python=sys.executable, address=address))
    script.chmod(0o755)
    with socketserver.ThreadingUnixStreamServer(address, _Command) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield os.environ | {"PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])}
        server.shutdown()


def run_commands(page: Path, folder: Path, bin_folder: Path, port: int = 8000, without: str = "") -> str:
    """Run the blocks of shell commands of a page in a folder, with its port replaced, and return what they print.

    `without` is a command of the page that has been run already.
    """
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert without + "\n" in ["\n", *blocks]
    script = "set -e\n" + "".join(block for block in blocks if block != without + "\n")
    with comera_on_path(bin_folder) as environment:
        done = subprocess.run(
            ["sh", "-c", script.replace("8000", str(port))],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Command(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        message, numbers, _, _ = socket.recv_fds(self.request, 1 << 16, 3)
        files = [Connection(number) for number in numbers]  # these pass an open file to another process
        process = CONTEXT.Process(target=_work, args=(*json.loads(message), files))
        process.start()
        for file in files:
            file.close()
        self.request.send(str(process.pid).encode())
        process.join()
        self.request.send(str(process.exitcode).encode())


def _work(arguments: list[str], folder: str, files: list[Connection]) -> None:
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
    gc.freeze()  # exempt what the server imported from garbage collection
    os.chdir(folder)
    main(arguments)
