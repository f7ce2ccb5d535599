"""The container and the Kubernetes manifest start `comera serve` with arguments that it takes, and probe routes that it has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import yaml

from comera_rec.cli.serve import serve
from comera_rec.serving.server import ServeOptions, Server

FOLDER = Path(__file__).parents[2] / "examples" / "container"


def test_both_start_the_same_server_and_probe_its_routes(package: Callable[[str], Path]) -> None:
    recipe = (FOLDER / "Dockerfile").read_text()
    entry, arguments = (json.loads(re.findall(rf"(?m)^{name} (.*)$", recipe)[0]) for name in ("ENTRYPOINT", "CMD"))
    deployment, service = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
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
