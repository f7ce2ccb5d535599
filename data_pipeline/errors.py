"""The error of all packages for what a user got wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

# Modules of the extras of pyproject.toml; `train` includes what preprocessing needs.
EXTRAS = {
    "train": (
        "click", "filelock", "fsspec", "jinja2", "matplotlib", "pyarrow", "pydantic", "scipy", "tensorboard", "threadpoolctl",
        "tqdm",
    ),
    "serve": ("httptools", "orjson", "prometheus_client", "uvicorn", "uvloop"),
    "onnx": ("onnxruntime", "onnxscript"),
    "dask": ("distributed",),
}  # fmt: skip


class UserError(ValueError):
    """A mistake of the user: one line that names what is wrong, its value, and what to do.

    Commands print it and exit with status 2; any other error is a bug, which ends with a traceback.
    """


@contextmanager
def naming_extras() -> Iterator[None]:
    """Raise UserError, with the extra to install, where an import fails because an optional package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = next((extra for extra, modules in EXTRAS.items() if error.name in modules), None)
        if extra is None:
            raise
        raise UserError(
            f"{error.name} is not installed: install the extra {extra!r}, as docs/start/install.md says under Extras"
        ) from error
