"""The served model, which is replaced when its file is replaced, and its weights when theirs are."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from comera_rec.serving.package import ServingModel
from comera_rec.serving.vocabularies import open_vocabularies
from data_pipeline.encoder import RequestEncoder
from data_pipeline.manifest import file_sha256

log = logging.getLogger("comera_rec.serving")


@dataclass(kw_only=True)
class Version:
    """A loaded model and its vocabularies; a request keeps the version that it started with.

    Args:
        number: first digits of the SHA-256 of the file that the weights are from.
        model: the model.
        encoder: encoder of raw rows; None if the vocabularies are missing.
        reason: why there is no encoder.
    """

    number: str
    model: ServingModel
    encoder: RequestEncoder | None
    reason: str = ""


class ModelFile:
    """A package on disk and the version loaded from it, which `watch` keeps up to date.

    Args:
        path: path of MODEL.pt2; put new versions there, and new weights at MODEL.weights, by renaming.
        data: folder of the vocabularies; None takes the one that the model names, if it exists.
        threads: number of threads that torch may use.
        observe: called with "loaded" or "refused" for every version.

    Raises:
        ValueError: if the file can't be loaded, or `data` doesn't fit it.
    """

    def __init__(
        self, path: Path, *, data: Path | None, threads: int, observe: Callable[[str], object] = lambda result: None
    ) -> None:
        self.path, self.weights = path, path.with_suffix(".weights")
        self.data, self._threads, self._observe = data, threads, observe
        self.name = path.stem
        self._signature = _stat(path)  # before loading: a file that arrives meanwhile is a new version
        self._weights_signature = _stat(self.weights)
        self.current = self._load()

    def _load(self) -> Version:
        model = ServingModel(self.path, threads=self._threads)
        encoder, reason = None, ""
        try:
            encoder = open_vocabularies(model.metadata, self.data)
        except ValueError as error:
            if self.data:
                raise
            reason = str(error)
        version = Version(number=_number(self.path), model=model, encoder=encoder, reason=reason)
        number = _number(self.weights) if self.weights.exists() else ""
        if number and model.update_from_beside():
            version.number = number
        return version

    async def watch(self, seconds: float) -> None:
        """Check the files every `seconds` until canceled; load a new one, then switch to it.

        A file that can't be loaded is reported once, and the present version stays. Where memory or descriptors lack, the file is
        tried again; not where the temporary folder is full, in which every try would leave what it could unpack.
        """
        reported = ""
        while True:
            await asyncio.sleep(seconds)
            signature, weights = _stat(self.path) or self._signature, _stat(self.weights)
            is_package = signature != self._signature
            if not is_package and weights in (None, self._weights_signature):
                continue
            before = self._signature, self._weights_signature
            self._signature, self._weights_signature = signature, weights
            try:
                if is_package:
                    self.current = await asyncio.to_thread(self._load)
                else:
                    number = await asyncio.to_thread(_number, self.weights)
                    weights_read = await asyncio.to_thread(self.current.model.read_weights, self.weights)
                    self.current.model.take(*weights_read)  # in this thread, so that no call sees one without the other
                    self.current.number = number
            except Exception as error:  # whatever a broken file causes: the next one may be good
                is_passing = isinstance(error, OSError | MemoryError)
                if is_passing:
                    self._signature, self._weights_signature = before
                if not is_passing or str(error) != reported:
                    log.error("%s stays at version %s: %s", self.name, self.current.number, " ".join(str(error).split()))
                    self._observe("refused")
                reported = str(error)
                continue
            reported = ""
            reason = f"; /score is unavailable without vocabularies: {self.current.reason}" if self.current.encoder is None else ""
            log.warning("%s is at version %s%s", self.name, self.current.number, reason)
            self._observe("loaded")


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _number(path: Path) -> str:
    return file_sha256(path)[:12]
