"""The server with a real package: every route, every error, and load while models are replaced."""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import uvloop
from refusals import refuse

from comera_rec.serving.batching import Batcher, merge
from comera_rec.serving.package import FeatureInput, ModelMetadata, ServingModel, TensorInput
from comera_rec.serving.protocol import read_inputs
from comera_rec.serving.score import flat_rows
from comera_rec.serving.server import ServeOptions, Server, listen, serve
from data_pipeline.encoder import RequestEncoder
from data_pipeline.manifest import file_sha256, read_manifest

ROWS = 5
INFER = "/v2/models/model/infer"


def good_rows(data: Path) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """Build an inference request of some test rows; also return the rows as tensors."""
    manifest = read_manifest(data)
    flat = flat_rows(pq.read_table(data / manifest.splits["test"].shards[0].path).slice(0, ROWS), manifest)
    inputs = [
        {"name": name, "datatype": datatype, "shape": list(part.shape), "data": part.tolist()}
        for name, datatype, part in zip(("dense", "values", "lengths"), ("FP32", "INT64", "INT32"), flat, strict=True)
    ]
    return {"inputs": inputs}, tuple(map(torch.from_numpy, flat))


def bad_requests(good: dict[str, Any]) -> list[tuple[str, str, bytes | None]]:
    """Requests with one mistake each: method, path and body."""
    dense, values, lengths = (tensor["data"] for tensor in good["inputs"])
    wrapped = [lengths[0] + (1 << 32), *lengths[1:]]  # as 32-bit integers these are the lengths
    changes: list[tuple[int, dict[str, Any]]] = [
        (0, {"data": [row[:-1] for row in dense]}),
        *((0, {"data": [[odd, *row[1:]] for row in dense]}) for odd in (None, "1", 1e39)),
        *((1, {"data": [odd, *values[1:]]}) for odd in (1 << 40, 0.5)),
        (1, {"data": [1 << 63, -1, *values[2:]]}),
        (1, {"datatype": "FP32"}),
        *((1, {"shape": shape, "data": data}) for shape, data in (([0, 1 << 63], []), ([1] * 99, [1]))),
        *((2, {"shape": shape}) for shape in ([1], "all")),
        *((2, {"data": wrapped, "datatype": datatype}) for datatype in ("INT32", "INT64")),
        (0, {"name": [1]}),
        *((0, {key: "DEEP"}) for key in ("name", "datatype", "shape", "data", "parameters")),
    ]
    mistakes: list[Any] = [[], {"inputs": []}, {"inputs": ["DEEP"]}]
    mistakes += [
        {"inputs": [tensor | change if number == place else tensor for number, tensor in enumerate(good["inputs"])]}
        for place, change in changes
    ]
    mistakes += [good | {"id": odd} for odd in ("DEEP", 7, [])]
    mistakes += [good | {"outputs": odd} for odd in (5, ["DEEP"], [{"name": "DEEP"}], [{"name": "logits"}])]
    mistakes += [good | {"parameters": odd} for odd in ("DEEP", {"binary_data_output": "DEEP"})]
    mistakes_in_rows: list[Any] = [[{}], [5], [], 1, ["DEEP"], "DEEP", [{"I1": "DEEP"}], [{"I1": 1 << 400}], [{}] * 5000]

    def with_deep(content: Any) -> bytes:
        return json.dumps(content).encode().replace(b'"DEEP"', b"[" * 1000 + b"]" * 1000)

    return [
        *(("POST", INFER, with_deep(mistake)) for mistake in mistakes),
        *(("POST", INFER, body) for body in (b"{", b"[" * 100_000, json.dumps(good).encode().replace(b"[[", b"[[NaN, "))),
        ("POST", f"{INFER}?", b"\xff"),
        ("POST", "/v2/models/other/infer", json.dumps(good).encode()),
        *(("POST", "/score", with_deep({"rows": rows})) for rows in mistakes_in_rows),
        ("POST", "/score", b'{"rows": [{"C1": "\\ud800"}]}'),
        ("GET", "/score", None),
        ("GET", "/nowhere", None),
    ]


def error_of(answer: httpx.Response) -> str:
    (error,) = answer.json().values()
    return error


def refuse_mistakes(client: httpx.Client, good: dict[str, Any], step: int = 1) -> None:
    """Check that every bad request, or one in `step`, is answered in one line."""
    for method, path, body in bad_requests(good)[::step]:
        answer = client.request(method, path, content=body)
        assert 400 <= answer.status_code < 500, f"{method} {path} {(body or b'')[:60]!r}: {answer} {answer.content}"
        assert error_of(answer)
        assert "\n" not in error_of(answer)


@contextlib.contextmanager
def serving_process(*options: object, signal_number: int = signal.SIGTERM) -> Iterator[tuple[httpx.Client, int]]:
    """Run `comera serve`; yield a client and the process id once it is ready. A signal ends it; what it said is printed."""
    command = [sys.executable, "-m", "comera_rec", "serve", "--port", 0, *options]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            ready = next(filter(None, (re.search(r"serving .* on (http://.*:\d+)", line) for line in process.stdout)), None)
            assert ready, "the process has ended"
            with httpx.Client(base_url=ready[1], timeout=60) as client:
                yield client, process.pid
        finally:
            process.send_signal(signal_number)
            process.communicate(timeout=30)
            errors.seek(0)
            shown = errors.read()
            print(shown)
    assert (process.returncode, "Traceback" in shown) == (0, False)


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


@contextlib.contextmanager
def listening(server: Server) -> Iterator[tuple[str, int]]:
    """Run a server in a thread; yield its address."""
    with listen("127.0.0.1", 0) as sock:
        address = sock.getsockname()
        thread = threading.Thread(target=uvloop.run, args=(server.run(sock),))
        thread.start()
        try:
            yield address
        finally:
            server.http.should_exit = True
            thread.join()


@contextlib.contextmanager
def served(options: ServeOptions) -> Iterator[httpx.Client]:
    with listening(Server(options)) as (host, port), httpx.Client(base_url=f"http://{host}:{port}", timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(model: Path, data: Path) -> Iterator[httpx.Client]:
    with served(ServeOptions(model=model, data=data)) as client:
        yield client


def raw_rows(data: Path, count: int) -> list[dict[str, Any]]:
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    lines = (data.parent / "train.txt").read_text().splitlines()[:count]
    cells = [dict(zip(names, line.split("\t"), strict=True)) for line in lines]
    return [{name: int(cell) if cell and name[0] == "I" else cell or None for name, cell in row.items()} for row in cells]


def test_open_inference_protocol(client: httpx.Client, model: Path, data: Path) -> None:
    good, tensors = good_rows(data)
    assert client.get("/v2").json()["name"] == "comera-rec"
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/models/model/ready").json() == {"name": "model", "ready": True}
    described = client.get("/v2/models/model").json()
    inputs = [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in described["inputs"]]
    assert inputs == [("dense", "FP32", [-1, 13]), ("values", "INT64", [-1]), ("lengths", "INT64", [-1])]
    answer = client.post(INFER, json=good | {"id": "7"}).json()
    assert answer["id"] == "7"
    assert answer["model_version"] == described["versions"][0]
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("probabilities", "FP32", [5])
    np.testing.assert_allclose(output["data"], ServingModel(model)(*tensors)[0].numpy(), atol=1e-6)


def binary_request(good: dict[str, Any], **changes: Any) -> tuple[bytes, dict[str, str]]:
    """A request whose tensors follow the JSON, as clients of Triton send it: body and headers."""
    dtypes = {"FP32": "<f4", "INT64": "<i8", "INT32": "<i4"}
    parts = [np.array(tensor["data"], dtypes[tensor["datatype"]]).tobytes() for tensor in good["inputs"]]
    inputs = [
        {name: tensor[name] for name in ("name", "shape", "datatype")} | {"parameters": {"binary_data_size": len(part)}}
        for tensor, part in zip(good["inputs"], parts, strict=True)
    ]
    text = json.dumps({"inputs": inputs} | changes).encode()
    return b"".join([text, *parts]), {"Inference-Header-Content-Length": str(len(text))}


@pytest.mark.parametrize(
    "wanted",
    [
        {"parameters": {"binary_data_output": True}},
        {"outputs": [{"name": "probabilities", "parameters": {"binary_data": True}}]},
        {"outputs": [{"name": "probabilities", "parameters": {"binary_data": False}}], "parameters": {"binary_data_output": True}},
        {},
    ],
)
def test_binary_tensors(client: httpx.Client, model: Path, data: Path, wanted: dict[str, Any]) -> None:
    good, tensors = good_rows(data)
    body, headers = binary_request(good, **wanted)
    answer = client.post(INFER, content=body, headers=headers)
    assert answer.status_code == 200
    length = int(answer.headers.get("Inference-Header-Content-Length", len(answer.content)))
    (output,) = json.loads(answer.content[:length])["outputs"]
    if "data" in output:
        scores = np.array(output["data"])
        assert not wanted or len(wanted) == 2
    else:
        assert output["parameters"]["binary_data_size"] == len(answer.content) - length
        scores = np.frombuffer(answer.content[length:], "<f4")
    np.testing.assert_allclose(scores, ServingModel(model)(*tensors)[0].numpy(), atol=1e-6)


def test_mistakes_in_binary_requests(client: httpx.Client, data: Path) -> None:
    body, headers = binary_request(good_rows(data)[0])
    length = headers["Inference-Header-Content-Length"]
    mistakes = [
        (400, body, {"Inference-Header-Content-Length": "all"}),
        (400, body, {"Inference-Header-Content-Length": "-1"}),
        (400, body, {"Inference-Header-Content-Length": str(len(body) + 1)}),
        (400, body[:-4], headers),
        (400, body + b"more", headers),
        (400, body.replace(b'"binary_data_size": ', b'"binary_data_size":-'), headers),
        (400, body.replace(b'"shape": [5, 13]', b'"shape": [5, 12]'), headers),
        (400, body[: int(length)], {}),
        (400, body, {"Inference-Header-Content-Length": "9" * 5000}),
        (415, body, headers | {"Content-Encoding": "gzip"}),
    ]
    for status, content, sent in mistakes:
        answer = client.post(INFER, content=content, headers=sent)
        assert answer.status_code == status, f"{sent}: {answer} {answer.content}"
        assert "\n" not in error_of(answer)
        assert "integer string" not in error_of(answer), "Python's own words"
    upgrade = {"Connection": "Upgrade", "Upgrade": "h2c"}
    answer = client.post(INFER, content=body, headers=headers | upgrade)
    assert (answer.status_code, error_of(answer)) == (400, "the request asks for an upgrade to 'h2c': send it by HTTP/1.1 alone")
    assert client.get("/v2", headers=upgrade).status_code == 200


def test_any_byte_but_0_is_true(model: Path) -> None:
    metadata = replace(ServingModel(model).metadata, inputs=(TensorInput(name="mask", datatype="BOOL", shape=(-1,)),))
    tensor = {"name": "mask", "datatype": "BOOL", "shape": [3], "parameters": {"binary_data_size": 3}}
    (mask,) = read_inputs({"inputs": [tensor]}, b"\x02\x00\x01", metadata)
    assert mask.view(np.uint8).tolist() == [1, 0, 1]


def test_raw_rows(client: httpx.Client, model: Path, data: Path) -> None:
    rows = raw_rows(data, 20)
    answer = client.post("/score", json={"rows": rows})
    assert answer.status_code == 200
    flat = RequestEncoder(data)(rows)
    np.testing.assert_allclose(answer.json()["scores"], ServingModel(model)(*map(torch.from_numpy, flat))[0].numpy(), atol=1e-6)


def test_limits(model: Path, data: Path) -> None:
    good, _ = good_rows(data)
    with served(ServeOptions(model=model, data=data, max_rows=4)) as client:
        answer = client.post(INFER, json=good)
        assert (answer.status_code, error_of(answer)) == (413, "the request has 5 rows: send at most 4 at a time")
    server = Server(ServeOptions(model=model, data=data, max_queue=7))
    with listening(server) as (host, port), httpx.Client(base_url=f"http://{host}:{port}", timeout=60) as client:
        server.batcher.waiting_rows += 3  # as if others waited
        answer = client.post(INFER, json=good)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert error_of(answer) == "more than 7 rows wait: try again, or start more servers"
        server.batcher.waiting_rows -= 3
        assert client.post(INFER, json=good).status_code == 200


def test_chunked_and_plain_bodies(client: httpx.Client, data: Path) -> None:
    body = json.dumps(good_rows(data)[0]).encode()
    assert client.post(INFER, content=(body[k : k + 100] for k in range(0, len(body), 100))).status_code == 200
    assert client.post(INFER, content=body, headers={"Content-Encoding": "Identity"}).status_code == 200
    answer = client.post("/score", content=(b" " * (1 << 20) for _ in range(9)))
    assert (answer.status_code, error_of(answer)) == (413, f"the body has more than {8 << 20} bytes: send fewer rows at a time")


def test_other_methods_and_metrics(client: httpx.Client) -> None:
    assert error_of(client.put("/score")) == "/score is read by PUT: use POST"
    for path, status in (("/v2/health/live", 200), ("/score", 405)):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (status, b"")
    assert client.get("/v2/health/live").status_code == 200  # over the same connection
    client.get("/v2/models/other")
    text = client.get("/metrics").text
    assert 'comera_requests_total{route="other",status="404"}' in text
    assert "comera_batch_rows_count" in text


def test_bodies_that_are_too_long_are_answered_after_they_were_sent_or_without_an_end(model: Path, data: Path) -> None:
    with listening(Server(ServeOptions(model=model, data=data, max_body=5_000_000))) as address:
        connection = HTTPConnection(*address, timeout=60)
        connection.request("POST", "/score", body=b" " * 19_000_000, headers={"Connection": "close"})
        answer = connection.getresponse()
        assert answer.status == 413
        assert b"the body has more than 5000000 bytes" in answer.read()
        connection.close()
        with socket.create_connection(address, timeout=60) as client, contextlib.suppress(OSError):
            client.sendall(b"POST /score HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(2000):
                client.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            pytest.fail("the server reads on")


def test_a_server_that_stops_answers_what_it_reads(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests that wait for the model are answered, and so is one whose body hasn't arrived by the end."""
    body, run, waiting = json.dumps(good_rows(data)[0]), ServingModel.run, list[int]()
    connected = threading.Barrier(10)
    server = Server(ServeOptions(model=model, data=data, max_batch=ROWS))
    server.http.config.timeout_graceful_shutdown = 1

    def slow(*arguments: Any) -> Any:
        time.sleep(0.05)
        waiting.append(server.batcher.waiting_rows)
        server.http.should_exit |= waiting[-1] + ROWS * len(waiting) == ROWS * 10  # all requests have been read
        return run(*arguments)

    def status_of(address: tuple[str, int]) -> int:
        connection = HTTPConnection(*address, timeout=60)
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
        connected.wait()
        connection.request("POST", INFER, body)
        with contextlib.closing(connection):
            return connection.getresponse().status

    monkeypatch.setattr(ServingModel, "run", slow)
    with listening(server) as address, socket.create_connection(address) as half, socket.create_connection(address) as idle:
        half.sendall(b"POST /score HTTP/1.1\r\nContent-Length: 99\r\n\r\n{")
        with ThreadPoolExecutor(10) as pool:
            assert [*pool.map(status_of, [address] * 10)] == [200] * 10
        with half.makefile("rb") as answer, idle.makefile("rb") as nothing:
            content = answer.read()
            assert content.startswith(b"HTTP/1.1 503 ")
            assert content.endswith(b'{"error":"the server stops: send the request to another one"}')
            assert nothing.read() == b""
    assert max(waiting) > 5 * ROWS
    assert "Traceback" not in capsys.readouterr().err


def test_a_client_that_leaves_is_not_answered(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with served(ServeOptions(model=model, data=data)) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as half:
            half.sendall(b"POST /score HTTP/1.1\r\nContent-Length: 99\r\n\r\n{")
        time.sleep(0.2)  # in which the server sees it leave
        assert 'route="/score"' not in client.get("/metrics").text
    assert not caplog.records
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_interrupted(model: Path, host: str, address: str) -> None:
    try:
        listen(host, 0).close()
    except ValueError:
        pytest.skip(f"this machine has no {host}")
    with serving_process("--model", model, "--host", host, signal_number=signal.SIGINT) as (client, _):
        assert client.base_url.host == address.strip("[]")
        assert client.get("/v2/health/live").json() == {"live": True}


def test_serving_imports_neither_compiler_nor_torchrec(
    package: Callable[[str], Path], data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with serving_process("--model", package("fast"), "--data", data) as (client, _):
        for path, body in ((INFER, good_rows(data)[0]), ("/score", {"rows": raw_rows(data, 1)})):
            assert client.post(path, json=body).status_code == 200
    imported = {line.rpartition("|")[2].strip() for line in capsys.readouterr().out.splitlines()}
    assert "comera_rec.serving.server" in imported
    assert imported & {"torch._inductor", "torch._dynamo", "torchrec", "fbgemm_gpu", "sympy", "pandas", "triton"} == set()


def test_without_vocabularies(package: Callable[[str], Path], trained: Path, tmp_path: Path) -> None:
    """Inference routes still work, and /score says what is missing; given ones must exist."""
    model, data = package("portable"), trained.parent / "data"
    aside = data.rename(data.with_name("aside"))
    try:
        with served(ServeOptions(model=model)) as client:
            answer = client.post("/score", json={"rows": []})
            assert answer.status_code == 404
            assert re.search("unavailable without vocabularies: .*name another with --data", error_of(answer))
            assert client.post(INFER, json=good_rows(aside)[0]).status_code == 200
    finally:
        aside.rename(data)
    refuse("other is not a preprocessed data set", Server, ServeOptions(model=model, data=tmp_path / "other"))


def test_port_in_use(model: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        message = rf"can't listen on 127.0.0.1:{port} \(Address already in use\): choose another --port"
        refuse(message, serve, ServeOptions(model=model, port=port))
    nowhere = ServeOptions(model=model, host="nowhere.invalid")
    refuse(r"--host nowhere.invalid is unknown \(.*\): give a name or address of this machine", serve, nowhere)


def test_merged_requests() -> None:
    """Rows of two keys keep their values and weights, including lists of any length; bad ones leave the others their answers."""
    features = FeatureInput(prefix="", keys={"a": None, "b": None}, is_weighted=True)
    inputs = (TensorInput(name="dense", datatype="FP32", shape=(-1, 1)), features)
    metadata = ModelMetadata(
        format_version=0, inputs=inputs, outputs=(), library_version="", torch_version="", form="fast", dtype="float32"
    )
    one = [np.ones((2, 1), np.float32), np.array([1, 2, 3, 10]), np.array([2, 1, 0, 1]), np.array([0.1, 0.2, 0.3, 1.0])]
    two = [np.zeros((1, 1), np.float32), np.array([4, 5]), np.array([0, 2]), np.array([0.4, 0.5])]
    dense, values, lengths, weights = merge([one, two, one], metadata)
    assert dense.ravel().tolist() == [1, 1, 0, 1, 1]
    assert values.tolist() == [1, 2, 3, 1, 2, 3, 10, 4, 5, 10]
    assert lengths.tolist() == [2, 1, 0, 2, 1, 0, 1, 2, 0, 1]
    assert weights.tolist() == [value / 10 for value in values.tolist()]

    calls = []

    def run(rows: torch.Tensor) -> list[torch.Tensor]:
        calls.append(len(rows))
        if 37 in rows:
            raise ValueError("bad")
        return [rows.repeat(2, 1) if 38 in rows else rows]

    async def ask() -> list[Any]:
        batcher, by_row = Batcher(max_rows=64, max_queue=64), replace(metadata, inputs=inputs[:1], is_by_row=True)
        version: Any = SimpleNamespace(model=SimpleNamespace(metadata=by_row, run=run), number="")
        answers = [batcher.add(version, [np.full((1, 1), number)], 1) for number in range(64)]
        return await asyncio.gather(*answers, return_exceptions=True)

    answers = asyncio.run(ask())
    assert str(answers.pop(37)) == "bad"
    assert [int(outputs[0][0, 0]) for outputs, _ in answers] == [*range(37), *range(38, 64)]
    assert len(calls) == 15, "halves find those at fault"


def test_load_with_new_versions(package: Callable[[str], Path], data: Path, tmp_path: Path) -> None:
    """Three clients get the scores of the version that answers, while the model is replaced and bad requests arrive."""
    (good, tensors), models, path = good_rows(data), [package("portable"), package("fast")], tmp_path / "model.pt2"
    expected = {file_sha256(model)[:12]: ServingModel(model)(*tensors)[0].numpy() for model in models}
    shutil.copy(models[0], path)
    stop, versions, growth = threading.Event(), list[str](), list[float]()

    def ask(client: httpx.Client) -> None:
        while not stop.is_set():
            answer = client.post(INFER, json=good).json()
            np.testing.assert_allclose(answer["outputs"][0]["data"], expected[answer["model_version"]], atol=1e-6)
            versions.append(answer["model_version"])

    with (
        serving_process("--model", path, "--data", data, "--reload-seconds", 0.1) as (client, pid),
        ThreadPoolExecutor(3) as pool,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(stop.set)
        refuse_mistakes(client, good)
        asking = [pool.submit(ask, client) for _ in range(3)]
        for model in (*models[::-1], models[1]):
            refuse_mistakes(client, good, step=5)
            growth.append(resident_mib(pid))
            shutil.copy(model, tmp_path / "new")
            (tmp_path / "new").replace(path)
            time.sleep(1)
        growth.append(resident_mib(pid))
    for asked in asking:
        asked.result()
    assert set(versions) == expected.keys()
    assert len(versions) > 20
    assert growth[-1] - growth[1] < 60, growth
