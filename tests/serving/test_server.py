"""The server with a real package: every route, every error, and load while models are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from soak import bad_requests, good_rows, soak
from starlette.testclient import TestClient

from comera_rec.serving.batching import merge
from comera_rec.serving.package import ServingModel
from comera_rec.serving.server import ServeOptions, Server, listen, serve
from comera_rec.serving.versions import ModelFile, Version
from data_pipeline.encoder import Flat, RequestEncoder
from data_pipeline.options import PreprocessOptions
from data_pipeline.preprocess import preprocess


@pytest.fixture(scope="session")
def data(trained: Path) -> Path:
    return trained.parent / "data"


@pytest.fixture(scope="session")
def model(package: Callable[[str], Path]) -> Path:
    return package("portable")


@pytest.fixture(scope="session")
def client(model: Path, data: Path) -> Iterator[TestClient]:
    with TestClient(Server(ServeOptions(model=model, data=data)).app) as client:
        yield client


def raw_rows(data: Path, count: int) -> list[dict[str, Any]]:
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    lines = (data.parent / "train.txt").read_text().splitlines()[:count]
    cells = [dict(zip(names, line.split("\t"), strict=True)) for line in lines]
    return [{name: int(cell) if cell and name[0] == "I" else cell or None for name, cell in row.items()} for row in cells]


def test_a_file_that_arrives_while_another_is_loaded_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, numbers = tmp_path / "model.pt2", iter("12")

    def load(file: ModelFile) -> Version:
        number = next(numbers)
        if number == "1":  # the new file arrives after the old one was read
            (tmp_path / "new").write_text("second")
            (tmp_path / "new").rename(path)
        return Version(number=number, model=None, encoder=None)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelFile, "_load", load)
    path.write_text("first")
    file = ModelFile(path, data=None, threads=1)

    async def watch() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(file.watch(0.01), timeout=0.3)

    asyncio.run(watch())
    assert file.current.number == "2"


def test_a_file_that_fails_in_any_way_does_not_end_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, observed = tmp_path / "model.pt2", list[str]()

    def load(file: ModelFile) -> Version:
        if file.path.read_text() == "odd":
            raise NotImplementedError
        return Version(number=file.path.read_text(), model=None, encoder=None)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelFile, "_load", load)
    path.write_text("first")
    file = ModelFile(path, data=None, threads=1, observe=observed.append)

    async def watch() -> None:
        watching = asyncio.create_task(file.watch(0.01))
        for text in ("odd", "second"):
            (tmp_path / "new").write_text(text)
            (tmp_path / "new").rename(path)
            for _ in range(500):
                if len(observed) == (1 if text == "odd" else 2):
                    break
                await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(watch())
    assert observed == ["refused", "loaded"]
    assert file.current.number == "second"


def test_open_inference_protocol(client: TestClient, model: Path, data: Path) -> None:
    good, tensors = good_rows(data)
    assert client.get("/v2").json()["name"] == "comera-rec"
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/models/model/ready").json() == {"name": "model", "ready": True}
    described = client.get("/v2/models/model").json()
    assert [(tensor["name"], tensor["datatype"]) for tensor in described["inputs"]] == [
        ("dense", "FP32"),
        ("values", "INT64"),
        ("lengths", "INT32"),
    ]
    answer = client.post("/v2/models/model/infer", json=good | {"id": "7"}).json()
    assert answer["id"] == "7"
    assert answer["model_version"] == described["versions"][0]
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("probabilities", "FP32", [5])
    np.testing.assert_allclose(output["data"], ServingModel(model)(*tensors).numpy(), atol=1e-6)


def test_raw_rows(client: TestClient, model: Path, data: Path) -> None:
    rows = raw_rows(data, 20)
    answer = client.post("/score", json={"rows": rows})
    assert answer.status_code == 200
    flat = RequestEncoder(data)(rows)
    np.testing.assert_allclose(answer.json()["scores"], ServingModel(model)(*map(torch.from_numpy, flat)).numpy(), atol=1e-6)


def test_every_mistake_is_one_line(client: TestClient, data: Path) -> None:
    good, _ = good_rows(data)
    for method, path, body in bad_requests("model", good):
        answer = client.request(method, path, content=body)
        assert 400 <= answer.status_code < 500, f"{method} {path} {(body or b'')[:60]!r}: {answer.status_code} {answer.text}"
        (error,) = answer.json().values()
        assert error
        assert "\n" not in error


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"C3": "xyz"}, 400, "row 0: C3 is 'xyz', which is not a string of 1 to 8 hex digits or null"),
        ({"I2": 1.5}, 400, "row 0: I2 is 1.5, which is not a 32-bit integer"),
        ({}, 200, ""),
    ],
)
def test_raw_values_refused(client: TestClient, data: Path, change: dict[str, Any], status: int, message: str) -> None:
    answer = client.post("/score", json={"rows": [raw_rows(data, 1)[0] | change]})
    assert answer.status_code == status
    assert message in answer.json().get("error", "")


def test_metrics(client: TestClient) -> None:
    client.get("/v2/models/other")
    text = client.get("/metrics").text
    assert 'comera_requests_total{route="/v2/models/{name}",status="404"}' in text
    assert "comera_batch_rows_count" in text


def test_limits(model: Path, data: Path) -> None:
    good, _ = good_rows(data)
    with TestClient(Server(ServeOptions(model=model, data=data, max_rows=4, max_body=100_000)).app) as client:
        answer = client.post("/v2/models/model/infer", json=good)
        assert (answer.status_code, answer.json()["error"]) == (413, "the request has 5 rows: send at most 4 at a time")
        answer = client.post("/score", content=iter([b" " * 60_000] * 3))
        assert (answer.status_code, answer.json()["error"]) == (
            413,
            "the body has more than 100000 bytes: send fewer rows at a time",
        )


def test_requests_beyond_the_queue_are_told_to_come_back(model: Path, data: Path) -> None:
    good, _ = good_rows(data)
    server = Server(ServeOptions(model=model, data=data, max_queue=7))
    with TestClient(server.app) as client:
        assert client.post("/v2/models/model/infer", json=good).status_code == 200
        server.batcher._waiting_rows += 3  # as if others waited
        answer = client.post("/v2/models/model/infer", json=good)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["error"] == "more than 7 rows wait: try again, or start more servers"
        server.batcher._waiting_rows -= 3
        assert client.post("/v2/models/model/infer", json=good).status_code == 200


def test_a_body_that_is_too_long_is_answered_after_it_was_sent(model: Path, data: Path) -> None:
    config = uvicorn.Config(Server(ServeOptions(model=model, data=data, max_body=5_000_000)).app, log_level="error")
    server, sock = uvicorn.Server(config), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        connection = HTTPConnection(*sock.getsockname(), timeout=60)
        connection.request("POST", "/score", body=b" " * 19_000_000, headers={"Connection": "close"})
        answer = connection.getresponse()
        assert answer.status == 413
        assert b"the body has more than 5000000 bytes" in answer.read()
        connection.close()
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


def test_without_vocabularies(package: Callable[[str], Path], trained: Path, tmp_path: Path) -> None:
    """Inference routes still work, and /score says what is missing; other vocabularies are refused."""
    model, data = package("portable"), trained.parent / "data"
    aside = data.rename(data.with_name("aside"))
    try:
        with TestClient(Server(ServeOptions(model=model)).app) as client:
            answer = client.post("/score", json={"rows": []})
            assert answer.status_code == 404
            assert "unavailable without vocabularies: " in answer.json()["error"]
            assert "name another with --data" in answer.json()["error"]
            assert client.post("/v2/models/model/infer", json=good_rows(aside)[0]).status_code == 200
    finally:
        aside.rename(data)
    log = tmp_path / "log"
    log.write_bytes(b"".join((data.parent / "train.txt").read_bytes().splitlines(keepends=True)[:100]))
    preprocess(PreprocessOptions(inputs=(log,), output=tmp_path / "other"))
    with pytest.raises(ValueError, match="other has other vocabularies than the model was trained with"):
        Server(ServeOptions(model=model, data=tmp_path / "other"))


def test_port_in_use(model: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"can't listen on 127.0.0.1:{port} \(Address already in use\): choose another --port"
        ):
            serve(ServeOptions(model=model, port=port))
    with pytest.raises(ValueError, match="--port is 70000; it must be 0 to 65535"):
        ServeOptions(model=model, port=70000)
    with pytest.raises(ValueError, match="--max-rows is 0; it must be at least 1"):
        ServeOptions(model=model, max_rows=0)


def test_merged_requests() -> None:
    """Rows of two columns keep their values, including lists of any length."""
    one = Flat(np.ones((2, 1), np.float32), np.array([1, 2, 3, 10]), np.array([2, 1, 0, 1], np.int32))
    two = Flat(np.zeros((1, 1), np.float32), np.array([4, 5]), np.array([0, 2], np.int32))
    dense, values, lengths = merge([one, two, one])
    assert dense.ravel().tolist() == [1, 1, 0, 1, 1]
    assert values.tolist() == [1, 2, 3, 1, 2, 3, 10, 4, 5, 10]
    assert lengths.tolist() == [2, 1, 0, 2, 1, 0, 1, 2, 0, 1]


def test_load_with_new_versions(package: Callable[[str], Path], data: Path) -> None:
    outcome = soak(package("portable"), package("fast"), data, seconds=4, swaps=3)
    assert outcome.wrong == []
    assert len(outcome.versions) == 2
    assert outcome.answered > 20
    assert outcome.refused > 20
    assert outcome.growth_mib < 60, json.dumps(outcome.versions)
