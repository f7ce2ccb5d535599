"""A model repository for NVIDIA's Triton Inference Server, whose PyTorch backend runs AOTInductor packages (`torch_aoti`)."""

from __future__ import annotations

from pathlib import Path

from comera_rec.serving.export import ExportOptions, build_package, work_folder
from comera_rec.serving.package import ModelMetadata

# Rows of a request share `values`, so the server must not join requests along a first dimension: max_batch_size 0.
_CONFIG = """name: "{name}"
backend: "pytorch"
platform: "torch_aoti"
max_batch_size: 0
input [
  {{ name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1, {integers} ] }},  # dense, rows x integer columns
  {{ name: "INPUT__1" data_type: TYPE_INT64 dims: [ -1 ] }},  # values, ids column by column, two or more
  {{ name: "INPUT__2" data_type: TYPE_INT64 dims: [ -1 ] }}  # lengths, {features} columns x rows
]
output [ {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ {scores} ] }} ]  # probabilities
instance_group [ {{ kind: KIND_CPU }} ]
"""


def export_repository(options: ExportOptions, repository: Path) -> tuple[Path, ModelMetadata]:
    """Add a run to a model repository, under the run's name and as its next version.

    The server must be of release 26.05 or later. For the form "fast", start it with LD_PRELOAD naming the libcomera_rec.so beside
    the model.

    Returns:
        The folder of the version, and the metadata of the package.

    Raises:
        ValueError: as `export_run`.
    """
    folder = repository / options.run.absolute().name
    with work_folder(repository) as work:  # outside the repository, which a server may be scanning
        version = work / "version"
        version.mkdir()
        metadata = build_package(options, version)
        folder.mkdir(parents=True, exist_ok=True)
        config = work / "config.pbtxt"
        scores = ", ".join(map(str, (-1, *metadata.score_shape)))
        sizes = {"integers": len(metadata.dense), "features": len(metadata.categorical)}
        config.write_text(_CONFIG.format(name=folder.name, scores=scores, **sizes))
        config.replace(folder / config.name)
        number = max((int(each.name) for each in folder.iterdir() if each.name.isdigit()), default=0) + 1
        return version.rename(folder / str(number)), metadata
