"""Card folders from the Hugging Face hub."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError

from ln_zoo.zoo import catalog
from ln_zoo.zoo.errors import CardError, first_line

#: Environment variable: the account with the weights that the wheel leaves out.
ACCOUNT_VARIABLE = "LN_ZOO_HUB"


@dataclass(frozen=True)
class HubOptions:
    """Options of `huggingface_hub.snapshot_download`; see `ln_zoo.load`."""

    cache_dir: str | Path | None = None
    token: str | bool | None = None
    local_files_only: bool = False
    force_download: bool = False


DEFAULTS = HubOptions()


def download(repo_id: str, *, revision: str | None = None, options: HubOptions = DEFAULTS) -> Path:
    """Download a card folder from the hub, or find it in the cache, unchecked.

    With ``HF_HUB_OFFLINE=1`` only the cache is used.
    """
    fetch = functools.partial(snapshot_download, repo_id, **asdict(options))
    try:
        folder = Path(fetch(revision=revision, allow_patterns=[catalog.CONFIG]))
        if not (folder / catalog.CONFIG).is_file():
            raise CardError(f"{repo_id} on the hub is not an ln_zoo model: no {catalog.CONFIG}")
        # The folder is named after its commit: both steps then refer to the same files.
        names = [*catalog.CARD_FILES, *catalog.read_config(folder).files]
        return Path(fetch(revision=folder.name, allow_patterns=names))
    except (OSError, HFValidationError) as error:
        # The client's own errors, of the network and of its cache, are all OSErrors.
        why = first_line(error)
        if constants.HF_HUB_OFFLINE or options.local_files_only:
            given = "local_files_only" if options.local_files_only else "HF_HUB_OFFLINE"
            why = f"{given} is set and the cache holds no copy"
        at = f" at revision {revision!r}" if revision else ""
        raise CardError(
            f"{repo_id!r} is not a folder here, and cannot be downloaded from the hub{at}: {why}. "
            "Download it once with a network connection, or give the path of its folder"
        ) from error
