"""Packages that the zoo needs beside torch, and what is said where one is missing.

Layers, norms, kernels and conversion need torch alone, so that ln_zoo can be installed without
its dependencies (``pip install --no-deps``) where those are all that is wanted.
"""

from __future__ import annotations

#: What the zoo and the command line need, by the name to import: the name to install.
_DISTRIBUTIONS = {
    "datasets": "datasets",
    "filelock": "filelock",
    "huggingface_hub": "huggingface_hub",
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
    """A package that the zoo needs is not installed; the message says which, and what to do."""


def missing(error: ModuleNotFoundError) -> MissingPackageError | None:
    """What to say of a failed import, if it is of one of the zoo's packages.

    Args:
        error: of the import.

    Returns:
        The error to raise in its place; ``None`` for any other module.

    Example:
        >>> print(missing(ModuleNotFoundError("No module named 'yaml'", name="yaml")))
        this needs the package PyYAML, which is not installed: pip install ln-zoo brings ...
    """
    name = (error.name or "").partition(".")[0]
    if name not in _DISTRIBUTIONS:
        return None
    return MissingPackageError(
        f"this needs the package {_DISTRIBUTIONS[name]}, which is not installed: pip install "
        "ln-zoo brings all that models, data and the command line need; layers and norms need "
        "torch alone",
        name=error.name,
    )
