"""The commands of docs/guides/serving.md run unchanged; the container and the Kubernetes manifest start that server."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from warm_command import run_commands

from comera_rec.cli.serve import serve
from comera_rec.serving.server import ServeOptions, Server

ROOT = Path(__file__).parents[2]


def test_commands_run(trained: Path, model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    (tmp_path / "runs").mkdir()
    for name, target in {
        "runs/compressed": trained,
        "data": trained.parent / "data",
        "today.txt": trained.parent / "train.txt",
    }.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "model.pt2").write_bytes(model.read_bytes())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    export = "comera export --checkpoint runs/compressed --output model.pt2"  # as the fixture did
    page, programs = ROOT / "docs" / "guides" / "serving.md", tmp_path_factory.mktemp("bin")
    printed = run_commands(page, tmp_path, programs, port=port, without=export)
    assert len(pq.read_table(tmp_path / "scores.parquet")) == 4000
    answers = re.findall(r'\{"scores":.*?\}', printed)
    assert len(answers) == 1
    assert 0 < json.loads(answers[0])["scores"][0] < 1
    assert '"platform":"torch_aoti"' in printed
    assert "comera_requests_total" in printed
    assert (tmp_path / "today" / "manifest.json").exists()


def test_container_and_deployment_start_the_same_server_and_probe_its_routes(package: Callable[[str], Path]) -> None:
    folder = ROOT / "examples" / "container"
    recipe = (folder / "Dockerfile").read_text()
    entry, arguments = (json.loads(re.findall(rf"(?m)^{name} (.*)$", recipe)[0]) for name in ("ENTRYPOINT", "CMD"))
    deployment, service = yaml.safe_load_all((folder / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert entry == ["comera", "serve"]
    assert container["args"] == arguments
    given = serve.make_context("serve", arguments).params
    (volume,) = container["volumeMounts"]
    assert given["model"].is_relative_to(volume["mountPath"])
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"http": given["port"]}
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    server = Server(ServeOptions(**given | {"model": package("portable")}))
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["path"] for probe in probes} <= server._routes.keys()
