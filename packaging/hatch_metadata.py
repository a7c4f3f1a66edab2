"""Metadata hook: the README of an index page, whose links and pictures need full addresses.

``LN_ZOO_REPOSITORY``, such as ``https://github.com/OWNER/ln_zoo``, is the repository's address; the
release workflow sets it. Without it, links stay relative.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "LN_ZOO_REPOSITORY"


def with_addresses(readme: str, repository: str) -> str:
    """A README with full addresses in place of paths in the repository.

    Links lead to files of the main branch; pictures to their content.
    """

    def whole(found: re.Match[str]) -> str:
        kind = "raw" if found[1].endswith((".png", ".svg", ".gif")) else "blob"
        return f"]({repository}/{kind}/main/{found[1]})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", whole, readme)


class ReadmeHook(MetadataHookInterface):
    """Sets the readme and the project URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Change the metadata of the project in place."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {"Paper": "https://arxiv.org/abs/1607.06450"}
        if repository := os.environ.get(VARIABLE, "").rstrip("/"):
            text = with_addresses(text, repository)
            metadata["urls"] |= {
                "Source": repository,
                "Issues": f"{repository}/issues",
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
                "Documentation": f"{repository}/tree/main/docs",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
