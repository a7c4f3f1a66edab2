"""Archives of files that are given by name."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path


def packed(files: Mapping[str, bytes], kind: str = "", form: int = tarfile.PAX_FORMAT) -> bytes:
    """A zip if ``kind`` is so, else a tar with this compression."""
    content = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        return content.getvalue()
    with tarfile.open(fileobj=content, mode=f"w:{kind}", format=form) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def write_archive(path: Path, files: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "zip" if path.suffix == ".zip" else path.name.rpartition(".tar")[2].lstrip(".")
    path.write_bytes(packed(files, kind))
    return path
