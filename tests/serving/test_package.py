"""Packages give the same scores as the trainer's models, take new weights, and refuse bad requests."""

import asyncio
import gc
import json
import logging
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from refusals import refuse
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import comera_rec as cr
from comera_rec.serving.forms import serving_copy
from comera_rec.serving.package import FORMAT_VERSION, METADATA, ServingModel, read_metadata
from comera_rec.serving.runs import export_run
from comera_rec.serving.score import ScoreOptions, flat_rows, score
from comera_rec.serving.versions import ModelFile
from comera_rec.serving.vocabularies import check_vocabularies
from comera_rec.training.config import load_config
from comera_rec.training.runs import load_run
from comera_rec.training.trainer import Trainer
from data_pipeline.manifest import file_sha256, read_manifest

Request = tuple[Tensor, Tensor, Tensor]
FORMS = ["portable", "fast"]
ROWS = {"user": 300, "item": 200, "day": 7}
LENGTHS = torch.tensor([2, 1, 0, 3, 1, 1, 1, 1, 1])
FEATURES = KeyedJaggedTensor(list(ROWS), torch.arange(int(LENGTHS.sum())) % 7, lengths=LENGTHS)
SAMPLE = (torch.rand(3, 2), FEATURES)
TENSORS = (SAMPLE[0], FEATURES.values(), FEATURES.lengths())


def trained_scores(run: Path, request: Request) -> Tensor:
    model, _, schema = load_run(run)
    dense, values, lengths = request
    with torch.no_grad():
        return model(dense, KeyedJaggedTensor(list(schema.sparse), values, lengths=lengths)).squeeze(1).sigmoid()


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_the_trainers(form: str, trained: Path, package: Callable, request_of: Callable[[int], Request]) -> None:
    """Also those of ragged and empty bags, of no rows, and of tensors with other strides and types."""
    model, dense, features = ServingModel(package(form)), request_of(3)[0], 26
    requests = [request_of(rows) for rows in (1, 2, 3, 200)]
    for lengths in (torch.zeros(features * 3), torch.arange(features * 3) % 4, torch.arange(features * 3) == 5):
        requests.append((dense, torch.arange(int(lengths.sum())) % 3, lengths.long()))
    for request in requests:
        torch.testing.assert_close(model(*request)[0], trained_scores(trained, request), rtol=0, atol=1e-5)
    assert model(dense[:0], torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long))[0].shape == (0,)
    dense, values, lengths = requests[1]
    for other in ((dense.mT.contiguous().mT, values, lengths), (dense, values, lengths.int())):
        assert torch.equal(model(*other)[0], model(*requests[1])[0])


@pytest.mark.parametrize("form", FORMS)
def test_few_bits_lose_little(form: str, trained: Path, request_of: Callable) -> None:
    """In the module that a package is compiled from."""
    model, _, schema = load_run(trained)
    dense, values, lengths = request_of(400)
    arguments = {"dense_features": dense, "sparse_features": KeyedJaggedTensor(list(schema.sparse), values, lengths=lengths)}
    with torch.no_grad():
        served, _ = serving_copy(model, arguments, form, "int8")
        scores, expected = (each(**arguments).sigmoid() for each in (served, model))
    difference = (scores - expected).abs()
    assert 0 < difference.mean() < 4e-4, "rounding down would double it"
    assert difference.max() < 1e-3


def flipped(path: Path, folder: Path, positions: Sequence[int], bits: int = 0xFF) -> Path:
    """Copy a file with flipped bits in some of its bytes."""
    content = bytearray(path.read_bytes())
    for position in positions:
        content[position] ^= bits
    damaged = folder / "damaged.pt2"
    damaged.write_bytes(content)
    return damaged


def rewritten(package: Path, output: Path, ending: str, change: Callable[[bytes], bytes]) -> Path:
    """Copy a package, and change the file whose name has an ending."""
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(output, "w") as new:
        new.comment = old.comment
        for name in old.namelist():
            new.writestr(name, change(old.read(name)) if name.endswith(ending) else old.read(name))
    return output


def test_damaged_bytes_of_an_archive_are_refused_in_one_line(tmp_path: Path) -> None:
    good = tmp_path / "good.pt2"
    with zipfile.ZipFile(good, "w") as archive:
        archive.writestr(f"model/{METADATA}", json.dumps({"format_version": 1}))
    for at in range(good.stat().st_size):
        for bits in (0x01, 0xFF):
            refuse("is not a package|is a package of another|has format", read_metadata, flipped(good, tmp_path, [at], bits))


def test_a_damaged_package_is_not_loaded(package: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are changed weights, although each file of the archive fits its own checksum."""
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", None)  # loading could end this process
    good, changed = package("portable"), tmp_path / "changed.pt2"
    for seed in range(5):
        damaged = flipped(good, tmp_path, Random(seed).sample(range(good.stat().st_size), 20))
        refuse("is not a package, or a damaged one", ServingModel, damaged)
    rewritten(good, changed, ".so", lambda content: content[:-1] + bytes([content[-1] ^ 0x40]))
    refuse("its contents differ from its checksum", ServingModel, changed)
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    refuse(r"can't be unpacked \(.*temporary directory.*\): set TMPDIR to a folder that has", ServingModel, good)


def test_metadata_is_the_data_sets(trained: Path, package: Callable) -> None:
    metadata, manifest = read_metadata(package("fast")), read_manifest(trained.parent / "data")
    run, (_, features) = metadata.run, metadata.inputs
    assert sorted(path.name for path in package("fast").parent.iterdir()) == ["libcomera_rec.so", "model.pt2"]
    assert (metadata.form, metadata.dtype, run.data) == ("fast", "float32", str(trained.parent / "data"))
    assert features.keys == {column.name: column.num_embeddings for column in manifest.categorical_columns}
    assert run.checksums["C1"] == manifest.categorical_columns[0].vocabulary.sha256
    assert run.ne == pytest.approx(run.trained_ne, rel=1e-6)
    assert metadata.is_by_row
    check_vocabularies(metadata, manifest, trained.parent / "data")
    other = replace(metadata, run=replace(run, offsets=(9, *run.offsets[1:])))
    refuse("data has other offsets of integer columns than the model has", check_vocabularies, other, manifest, Path("data"))
    no_run = replace(metadata, run=None)
    refuse("the model is not a run of `comera train`: encode rows yourself", check_vocabularies, no_run, manifest, Path("data"))


def setting(index: object, value: object) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[index] = value
        return tensor

    return change


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (0, lambda dense: dense[:, :5], r"dense is float32 \[3, 5\]: give float32 \[B, 13\]"),
        (0, lambda dense: dense.double(), r"dense is float64 \[3, 13\]"),
        (0, setting((1, 2), float("nan")), r"dense is nan at \[1, 2\]: give a number"),
        (0, setting(2, 3e38), "scores are not numbers: a dense value is too large, or the model has diverged"),
        (1, lambda values: values.int(), r"values is int32 \[78\]: give int64 \[V\]"),
        (1, lambda values: values[:-1], "lengths add up to 78 for 77 values"),
        (1, setting(0, -1), "id -1 is out of range in column C1: its ids run from 0 to"),
        (1, setting(4, 10**12), "id 1000000000000 is out of range in column C2: its ids run from 0 to"),
        (2, lambda lengths: lengths[1:], r"lengths is int64 \[77\]: give int64 \[26 \* B\], key by key"),
        (2, setting(slice(4), 2**62), "lengths add up to 18446744073709551616 for 78 values"),
        (2, setting(slice(2), torch.tensor([-1, 3])), "lengths hold -1: give numbers of values, at least 0"),
    ],
)
def test_bad_requests(form: str, number: int, change: Callable, message: str, package: Callable, request_of: Callable) -> None:
    model = ServingModel(package(form))
    refuse(message, model, *(change(part.clone()) if k == number else part for k, part in enumerate(request_of(3))))


def test_bad_ids_are_found_though_outputs_are_numbers(model: Path, request_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    best, (dense, values, lengths) = ServingModel(model), request_of(3)
    monkeypatch.setattr(best, "loader", SimpleNamespace(run=lambda tensors: [torch.zeros(3)]))
    assert best(dense, values, lengths)[0].tolist() == [0, 0, 0]
    refuse("id -1 is out of range in column C1", best, dense, setting(0, -1)(values), lengths)


def test_a_number_of_no_row_fails_alone(tmp_path: Path) -> None:
    """In a loop of several threads, whose errors end the process."""

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(9))

        def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
            return self.bias[numbers[:, 0]] + x.gather(1, numbers[:, 1:]).squeeze(1)

    model, x, numbers = Picks(), torch.rand(4096, 4), torch.randint(4, (4096, 2))
    with torch._inductor.config.patch({"cpp.threads": 2}):
        cr.export(model, (x, numbers), tmp_path / "model.pt2")
    package = ServingModel(tmp_path / "model.pt2")
    for column in range(2):
        with pytest.raises(RuntimeError):
            package(x, setting((2000, column), 1000)(numbers.clone()))
    torch.testing.assert_close(package(x, numbers)[0], model(x, numbers))


def test_files_that_are_not_our_packages(package: Callable, tmp_path: Path) -> None:
    changed, other = tmp_path / "changed.pt2", tmp_path / "other.pt2"

    def with_metadata(**changes: object) -> Path:
        return rewritten(package("portable"), changed, METADATA, lambda text: json.dumps(json.loads(text) | changes).encode())

    refuse(r"nowhere\.pt2 doesn't exist: give a MODEL\.pt2 that `comera export` wrote", ServingModel, tmp_path / "nowhere.pt2")
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("model/model_metadata.json", "{}")
    refuse("is a package of another program", ServingModel, other)
    newer = with_metadata(format_version=FORMAT_VERSION + 1)
    refuse(f"has format version {FORMAT_VERSION + 1} and this library reads {FORMAT_VERSION}", ServingModel, newer)
    refuse(r"has metadata that can't be read \(.*\): export the model again", read_metadata, with_metadata(inputs=[{}]))


def test_the_program_without_python(trained: Path, package: Callable, request_of: Callable, tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "examples" / "serve_cpp"
    cmake = str(Path(sys.executable).with_name("cmake"))  # from the extra `dev`
    build = [cmake, "-S", str(source), "-B", str(tmp_path / "build"), f"-DTORCH_ROOT={Path(torch.__file__).parent}"]
    subprocess.run(build, check=True, capture_output=True)
    subprocess.run([cmake, "--build", str(tmp_path / "build")], check=True, capture_output=True)
    program, batch = str(tmp_path / "build" / "score"), tmp_path / "batch.bin"

    def answer(model: Path, request: Request) -> subprocess.CompletedProcess[str]:
        sizes = torch.tensor([*request[0].shape, 26, len(request[1])])
        batch.write_bytes(b"".join(part.contiguous().numpy().tobytes() for part in (sizes, *request)))
        return subprocess.run([program, str(model), str(batch)], capture_output=True, text=True, check=False)

    request = request_of(7)
    ids = request[1]
    mistakes = {
        "id -1 of row 4 is out of range in column 2": (request[0], ids.where(torch.arange(len(ids)) != 18, -1), request[2]),
        "row 0 has no score": (request[0] * torch.nan, *request[1:]),
        "lengths are below 0": (request[0], ids, -request[2]),
        "lengths add up to fewer": (request[0], ids, 0 * request[2]),
        "the batch has other numbers of columns": (request[0][:, 1:], ids, request[2]),
        "the batch has another number of bytes": (request[0], ids, request[2][1:]),
    }
    for form in FORMS:
        model = package(form)
        scores = torch.tensor([float(line) for line in answer(model, request).stdout.split()])
        torch.testing.assert_close(scores, trained_scores(trained, request), rtol=0, atol=1e-5)
        one, empty = request_of(1), torch.zeros(26).long()
        assert answer(model, (one[0], ids[:0], empty)).stdout.count("\n") == 1
        assert answer(model, (one[0][:0], ids[:0], empty[:0])).returncode == 0
        for message, mistake in mistakes.items():
            failed = answer(model, mistake)
            assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (2, "", 1)
            assert failed.stderr.startswith(f"score: {message}")
    failed = subprocess.run([program, str(batch), str(batch)], capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("score: ")


class Scores(nn.Module):
    """Pooled bags into a linear layer, whose bias has one number; weights may be uniform, and there is a constant."""

    def __init__(self, tt_ranks: int = 2) -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(name=n, num_embeddings=m, embedding_dim=8, feature_names=[n]) for n, m in ROWS.items()]
        self.tables = EmbeddingBagCollection(configs)
        cr.compress_(self, tables=cr.TableCompression(tt_ranks=tt_ranks, min_rows=100, hot_rows=0.3))
        self.over = nn.Linear(8 * len(ROWS) + 2, 1)
        self.slope = nn.Parameter(torch.ones(()))
        with torch.no_grad():
            for parameter in self.over.parameters():
                parameter.zero_()

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        inputs = [self.tables(features).values(), dense * torch.tensor([2.0, 3.0])]
        return self.slope * self.over(torch.cat(inputs, dim=1))


def test_a_package_takes_new_weights(tmp_path: Path) -> None:
    model = Scores()
    cr.export(model, SAMPLE, tmp_path / "model.pt2", form="fast", dtype="int8")
    package = ServingModel(tmp_path / "model.pt2")
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.rand_like(parameter) / 2)
            expected = model.eval()(*SAMPLE)
        metadata = cr.export(model, SAMPLE, tmp_path / "model.weights")
        assert metadata == read_metadata(tmp_path / "model.weights")
        assert (metadata.form, metadata.dtype) == ("fast", "int8")
        package.update(tmp_path / "model.weights")
        torch.testing.assert_close(package(*TENSORS)[0], expected, rtol=1e-4, atol=0.2)
    assert float(ServingModel(tmp_path / "model.pt2")(*TENSORS)[0].abs().max()) == 0
    counts = []
    for _ in range(3):
        package.update(tmp_path / "model.weights")
        gc.collect()
        counts.append(sum(type(each) is Tensor for each in gc.get_objects()))
    assert counts[2] == counts[0], "former weights are freed"

    refuse(r"model\.weights has weights alone: give the MODEL\.pt2 that they are for", ServingModel, tmp_path / "model.weights")
    before = package(*TENSORS)[0]
    (tmp_path / "model.weights").rename(tmp_path / "damaged.weights")
    with (tmp_path / "damaged.weights").open("r+b") as file:
        file.seek(1000)
        file.write(b"damaged")
    refuse("is not a package, or a damaged one", package.update, tmp_path / "damaged.weights")
    other = r"fit .*model\.pt2 \(they differ in code\): .*ranks or sizes.* export it to model\.pt2"
    refuse(other, cr.export, Scores(tt_ranks=3), SAMPLE, tmp_path / "model.weights")
    assert not (tmp_path / "model.weights").exists()
    refuse(r"other\.pt2 doesn't exist", cr.export, model, SAMPLE, tmp_path / "other.weights")
    assert torch.equal(package(*TENSORS)[0], before)


def test_the_server_takes_the_weights_of_its_package(
    trained: Path, package: Callable[[str], Path], request_of: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(trained.parent / "run.toml", ("seed=4", f"output={tmp_path / 'further'}"))
    Trainer(config).train()
    path, weights = tmp_path / "model.pt2", tmp_path / "model.weights"
    path.write_bytes(package("portable").read_bytes())
    observed = list[str]()
    file = ModelFile(path, data=None, threads=1, observe=observed.append)
    first, started = file.current.model(*request_of(3))[0], file.current
    metadata = export_run(tmp_path / "further", weights)
    assert metadata.run.ne == pytest.approx(metadata.run.trained_ne, rel=1e-5)
    assert metadata.run.ne != read_metadata(path).run.ne

    async def watch(change: Callable[[], object]) -> None:
        observed.clear()
        watching = asyncio.create_task(file.watch(0.01))
        change()
        for _ in range(1000):
            if observed:
                break
            await asyncio.sleep(0.01)
        watching.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServingModel, "read_weights", lambda *_: (_ for _ in ()).throw(OSError("too many open files")))
        asyncio.run(watch(lambda: None))
        assert observed == ["refused"]
    asyncio.run(watch(lambda: None))
    assert observed == ["loaded"], "as soon as there is room"
    assert started is file.current, "requests that wait get the new weights and their version"
    assert file.current.number == file_sha256(weights)[:12]
    scores = file.current.model(*request_of(3))[0]
    assert not torch.allclose(scores, first, atol=1e-4)
    again = ModelFile(path, data=None, threads=1).current
    assert (again.number, again.model(*request_of(3))[0].tolist()) == (file.current.number, scores.tolist())
    data, written = trained.parent / "data", tmp_path / "scores.parquet"
    score(ScoreOptions(model=path, inputs=(data,), output=written))
    rows = pq.read_table(data / read_manifest(data).splits["test"].shards[0].path)
    of_rows = again.model(*map(torch.from_numpy, flat_rows(rows, read_manifest(data))))[0].numpy()
    np.testing.assert_allclose(pq.read_table(written)["score"].to_numpy()[: len(rows)], of_rows, atol=1e-6)

    (tmp_path / "broken").write_bytes(b"odd")
    asyncio.run(watch(lambda: (tmp_path / "broken").rename(path)))
    assert observed == ["refused"], "the present version stays"
    torch.testing.assert_close(file.current.model(*request_of(3))[0], scores)

    with caplog.at_level(logging.WARNING):
        asyncio.run(watch(lambda: (tmp_path / "new").write_bytes(package("fast").read_bytes()) and (tmp_path / "new").rename(path)))
    assert observed == ["loaded"]
    assert f"{weights} is not for {path}: export the weights again beside it" in caplog.text
    torch.testing.assert_close(file.current.model(*request_of(3))[0], first, rtol=0, atol=1e-5)
