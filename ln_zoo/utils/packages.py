"""Readable errors for missing dependencies, as after ``pip install --no-deps``."""

from __future__ import annotations

from importlib.util import find_spec

#: Modules of the dependencies. Layers, norms, kernels and conversion need torch alone.
MODULES = (
    "datasets", "filelock", "huggingface_hub", "jinja2", "jsonargparse", "lightning", "numpy",
    "PIL", "pyarrow", "rich", "safetensors", "scipy", "torch", "torchmetrics", "yaml",
)  # fmt: skip
#: Extras of ln-zoo by the modules that they bring.
EXTRAS = {
    "joblib": "sentences",
    "matplotlib": "plots",
    "nltk": "text",
    "shtab": "completion",
    "sklearn": "sentences",
    "tensorboard": "tensorboard",
}


def require(module: str) -> None:
    """Raise `MissingPackageError` if a module is not installed, before work that ends with it."""
    if find_spec(module) is None:
        raise missing_package(ModuleNotFoundError(name=module)) or AssertionError(module)


class MissingPackageError(ModuleNotFoundError):
    """A dependency of the zoo is not installed."""


def missing_package(error: ModuleNotFoundError) -> MissingPackageError | None:
    """Readable error for a failed import of a dependency; None for other modules."""
    module = (error.name or "").partition(".")[0]
    if extra := EXTRAS.get(module):
        return MissingPackageError(
            f"this needs the package {module}, which is not installed: pip install "
            f"'ln-zoo[{extra}]'",
            name=error.name,
        )
    if module not in MODULES:
        return None
    return MissingPackageError(
        f"this needs the package {module}, which is not installed: pip install ln-zoo brings all "
        "that models, data and the command line need; layers and norms need torch alone",
        name=error.name,
    )
