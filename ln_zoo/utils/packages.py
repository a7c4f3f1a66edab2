"""Readable errors for missing dependencies.

Layers, norms, kernels and conversion need torch only; the rest is missing after ``pip install
--no-deps``.
"""

from __future__ import annotations

#: Distributions of the modules that the zoo and the command line import.
_DISTRIBUTIONS = {
    "datasets": "datasets",
    "filelock": "filelock",
    "huggingface_hub": "huggingface_hub",
    "jinja2": "jinja2",
    "jsonargparse": "jsonargparse[signatures]",
    "lightning": "lightning",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "rich": "rich",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "shtab": "shtab",
    "sklearn": "scikit-learn",
    "tensorboard": "tensorboard",
    "torch": "torch",
    "torchmetrics": "torchmetrics",
    "yaml": "PyYAML",
}


class MissingPackageError(ModuleNotFoundError):
    """A dependency of the zoo is not installed."""


def missing_package(error: ModuleNotFoundError) -> MissingPackageError | None:
    """Readable error for a failed import of a dependency; None for other modules."""
    name = (error.name or "").partition(".")[0]
    if name not in _DISTRIBUTIONS:
        return None
    return MissingPackageError(
        f"this needs the package {_DISTRIBUTIONS[name]}, which is not installed: pip install "
        "ln-zoo brings all that models, data and the command line need; layers and norms need "
        "torch alone",
        name=error.name,
    )
