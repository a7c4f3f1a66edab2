"""Run folders ``<root>/version_<n>``, each claimed by one process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from ln_zoo.utils.checkpoints import sweep
from ln_zoo.utils.files import unwritable

#: Default of ``--trainer.default_root_dir`` and of the loggers' ``save_dir``.
DEFAULT = "runs"
#: What to do if output folders cannot be written to.
REMEDY = "choose another with --trainer.logger.save_dir or --trainer.default_root_dir"

_RUN_OF_SWEEP: ContextVar[tuple[Path, str, str] | None] = ContextVar("run of sweep", default=None)


@contextlib.contextmanager
def of_sweep(out: Path, name: str, version: str) -> Iterator[None]:
    """Make `place` set the loggers of the run ``name/version`` of a sweep in the folder ``out``."""
    token = _RUN_OF_SWEEP.set((out, name, version))
    try:
        yield
    finally:
        _RUN_OF_SWEEP.reset(token)


def place(loggers: list[Namespace]) -> bool:
    """Set where the loggers of a sweep's run write; False outside `of_sweep`.

    CSV and TensorBoard write to the run's folder, and come first, since checkpoints go to the
    folder of the first logger. Others get the run's name; MLflow an experiment for the sweep. W&B
    reads its group from the environment.
    """
    if (run := _RUN_OF_SWEEP.get()) is None:
        return False
    out, name, version = run
    loggers.sort(key=lambda logger: not _writes_folder(logger))
    for logger in loggers:
        own = logger.get("init_args", Namespace())
        if _writes_folder(logger):
            own.save_dir, own.name, own.version = str(out), name, version
            continue
        for option in ("name", "run_name"):
            if option in own and own[option] is None:
                own[option] = f"{name}/{version}"
        if own.get("experiment_name") == "lightning_logs":  # MLflow's default
            own.experiment_name = out.absolute().name
    return True


def _writes_folder(logger: Namespace) -> bool:
    return logger.class_path.rpartition(".")[2] in ("CSVLogger", "TensorBoardLogger")


def claim(root: str | Path) -> Path:
    """Makes the next version's folder in ``root``, for this process alone.

    Runs that start at the same time get different folders: if a folder exists, the next number is
    tried. Partial checkpoints of killed runs are removed from earlier folders.

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
        raise unwritable(root, error, REMEDY) from error


def claim_for(loggers: Iterable[Logger]) -> list[Path]:
    """Claims a folder for each root of loggers without a version, and returns them.

    No-op except in the first process: the others write nothing. OSError if a folder cannot be made.
    """
    claimed: dict[str, Path] = {}
    if not is_first_process():
        return []
    for logger in loggers:
        if not isinstance(logger, CSVLogger | TensorBoardLogger):
            continue
        # A given version is the user's choice; a URL cannot be claimed.
        if logger._version is None and "://" not in str(logger.root_dir):
            folder = claimed.get(logger.root_dir) or claim(logger.root_dir)
            claimed[logger.root_dir] = folder
            logger._version = int(folder.name.removeprefix("version_"))
    return list(claimed.values())


def spare_training(logger: Namespace, command: str) -> None:
    """Moves the log of a test into a subfolder if its folder has the log of a training.

    A test with the ``config.yaml`` of a sweep's run would otherwise replace the run's settings and
    delete its curves. ``command`` names the subfolder.
    """
    if not all(isinstance(logger.get(part), str) for part in ("save_dir", "name")):
        return
    version = logger.get("version")
    if version is None:
        return
    # The folder's name in Lightning.
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
    # Configurations of the other commands contain an argument that fit lacks.
    return re.search(r"^(verbose|return_predictions):", config, re.MULTILINE) is None


def is_first_process() -> bool:
    """Whether this is the process that writes files."""
    return not getattr(rank_zero_only, "rank", 0)


def release(folders: Iterable[Path]) -> None:
    """Removes claimed folders that are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
            folder.parent.rmdir()
