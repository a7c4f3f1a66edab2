"""The folder of a run: ``<root>/version_<n>``, which no other run has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from ln_zoo.checkpoints import sweep

#: Where runs lie unless ``--trainer.default_root_dir`` or a logger's ``save_dir`` says otherwise.
DEFAULT = "runs"


def claim(root: str | Path) -> Path:
    """Makes the next version's folder, which belongs to this process alone.

    Runs that start at the same time get folders of their own: the one that cannot make a folder
    takes the next number. What kills left half-written in the folders before is removed.

    Args:
        root: the folder of the runs of one name.

    Raises:
        OSError: if no folder can be made there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     [claim(f"{runs}/MLPClassifier-LayerNorm").name for _ in range(2)]
        ['version_0', 'version_1']
    """
    root = Path(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for checkpoints in root.glob("*/checkpoints"):
            sweep(checkpoints)
        taken = (path.name.removeprefix("version_") for path in root.glob("version_*"))
        number = max((int(n) + 1 for n in taken if n.isdecimal()), default=0)
        while True:
            folder = root / f"version_{number}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
            number += 1
    except OSError as error:
        raise unwritable(root, error) from error


def claim_for(loggers: Iterable[Logger]) -> list[Path]:
    """Claims the folders of loggers that were given no version; those with one root share one.

    Of several processes the first decides: the others write nothing, and ask it for the folder.

    Returns:
        The folders made.

    Raises:
        OSError: if one cannot be made.
    """
    claimed: dict[str, Path] = {}
    if not is_first_process():
        return []
    for logger in loggers:
        if not isinstance(logger, CSVLogger | TensorBoardLogger):
            continue
        # A version that was given is the user's choice. Only a folder can be claimed.
        if logger._version is None and "://" not in str(logger.root_dir):
            folder = claimed.get(logger.root_dir) or claim(logger.root_dir)
            claimed[logger.root_dir] = folder
            logger._version = int(folder.name.removeprefix("version_"))
    return list(claimed.values())


def spare_training(logger: Namespace, command: str) -> None:
    """Moves the log of a test out of a training's folder, into a folder within it.

    A test with the ``config.yaml`` of a sweep's run would otherwise log to the run's own folder,
    replacing its settings and deleting its curves.

    Args:
        logger: arguments of a logger; its version may change.
        command: ``"test"``, ``"validate"`` or ``"predict"``: the name of the folder within.
    """
    if not all(isinstance(logger.get(part), str) for part in ("save_dir", "name")):
        return
    version = logger.get("version")
    if version is None:
        return
    # As Lightning's loggers spell it.
    version = version if isinstance(version, str) else f"version_{version}"
    if _holds_training(Path(logger.save_dir) / logger.name / version):
        logger.version = f"{version}/{command}"


def _holds_training(folder: Path) -> bool:
    if (folder / "checkpoints").is_dir():
        return True
    try:
        config = (folder / "config.yaml").read_text(encoding="utf-8")
    except OSError:
        return False
    # The configurations of the other commands hold an argument that fit does not have.
    return re.search(r"^(verbose|return_predictions):", config, re.MULTILINE) is None


def is_first_process() -> bool:
    """Whether this process is the one that writes, of those that the environment tells of."""
    return not getattr(rank_zero_only, "rank", 0)


def release(folders: Iterable[Path]) -> None:
    """Removes claimed folders that a run which failed left empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
            folder.parent.rmdir()


def unwritable(folder: Path, error: OSError) -> OSError:
    """The error that says that a folder cannot take what a run writes."""
    return OSError(
        f"the output folder {folder} cannot be written to ({error.strerror}): choose another with "
        "--trainer.logger.save_dir or --trainer.default_root_dir"
    )
