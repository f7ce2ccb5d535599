"""The model that is served, and its replacement by what is put in its file's place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from comera_rec.serving.package import ModelMetadata, ServingModel
from comera_rec.serving.vocabularies import open_vocabularies
from data_pipeline.encoder import RequestEncoder
from data_pipeline.manifest import file_sha256

log = logging.getLogger("comera_rec.serving")


@dataclass(frozen=True, kw_only=True)
class Version:
    """A loaded model and the vocabularies that fit it; requests keep the one they began with.

    Args:
        number: the first digits of the file's SHA-256.
        model: the model.
        encoder: of raw rows; None where the vocabularies are not at hand, for `reason`.
        reason: why not.
    """

    number: str
    model: ServingModel
    encoder: RequestEncoder | None
    reason: str = ""

    @property
    def metadata(self) -> ModelMetadata:
        return self.model.metadata


class ModelFile:
    """A package on disk, the version that was loaded from it, and the watch for the next.

    Args:
        path: of MODEL.pt2; put new versions there by renaming.
        data: folder of the vocabularies; None takes the one that the model names, if it is there.
        threads: that torch may use.
        observe: called with "loaded" or "refused" for every version.

    Raises:
        ValueError: the file can't be loaded, or `data` doesn't fit it.
    """

    def __init__(
        self, path: Path, *, data: Path | None, threads: int, observe: Callable[[str], object] = lambda result: None
    ) -> None:
        self.path, self.data, self._threads, self._observe = path, data, threads, observe
        self.name = path.stem
        self.current, self._signature = self._load(), self._stat()

    def _load(self) -> Version:
        model = ServingModel.load(self.path, threads=self._threads)
        encoder, reason = None, ""
        try:
            encoder = open_vocabularies(model.metadata, self.data)
        except ValueError as error:
            if self.data:
                raise
            reason = str(error)
        return Version(number=file_sha256(self.path)[:12], model=model, encoder=encoder, reason=reason)

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    async def watch(self, seconds: float) -> None:
        """Look for another file every so many seconds until cancelled, load it beside the present version and put it in its place.

        A file that can't be loaded is reported once, and the present version stays.
        """
        while True:
            await asyncio.sleep(seconds)
            signature = self._stat()
            if signature in (None, self._signature):
                continue
            self._signature = signature
            try:
                version = await asyncio.to_thread(self._load)
            except (ValueError, OSError) as error:
                log.error("%s stays at version %s: %s", self.name, self.current.number, " ".join(str(error).split()))
                self._observe("refused")
                continue
            self.current = version
            del version  # or the one after the next would find it here
            log.warning("%s is at version %s", self.name, self.current.number)
            self._observe("loaded")
