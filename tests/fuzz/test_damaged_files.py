"""Damaged datasets are read as far as they are right, or refused with the name of the file."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="needs hypothesis: pip install 'ln-zoo[test]'")

import torch
from campaign import campaign, fast, limited
from cli_support import same
from data_cases import FORMATS, Damage, DataCase, data_cases, files_of
from handwriting_support import write_files
from hypothesis import example, given
from torch import Tensor

#: Characters of a message.
LONGEST = 600


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def everything(name: str, root: Path) -> list[Any]:
    """All batches of a dataset, and thumbnails."""
    torch.manual_seed(0)
    made, found = FORMATS[name], []
    data = made.data(root)
    data.prepare_data()
    for stage in made.stages:
        data.setup(stage)
        loaders = ["train", "val"] if stage == "fit" else [stage]
        found += [list(getattr(data, f"{part}_dataloader")()) for part in loaders]
    if name == "thumbnails":
        pictures = [data.thumbnail(image) for image in data.captioned("train").names]
        found += [torch.tensor(pixels) for pixels in pictures if pixels is not None]
    return found


def written(case: DataCase, root: Path) -> Path:
    """The folder of the damaged dataset; returns the path of the damaged file."""
    files = files_of(case.format)
    path = list(files)[case.file]
    content = files[path]
    for damage in case.damages:
        content = damage(content)
    write_files(root, files | {path: content})
    if case.removed:
        (root / path).unlink()
    return root / path


_INTACT: dict[str, list[Any]] = {}


def intact(name: str) -> list[Any]:
    if name not in _INTACT:
        with tempfile.TemporaryDirectory() as folder:
            written(DataCase(name, 0, ()), Path(folder))
            _INTACT[name] = everything(name, Path(folder))
    return _INTACT[name]


@pytest.mark.parametrize("name", FORMATS)
def test_intact_files_are_read(name: str) -> None:
    assert any(a.numel() for a in tensors(intact(name))) or name == "sentences"


def check(case: DataCase) -> None:
    root, refusal, found = Path(tempfile.mkdtemp(prefix="damaged-")), None, []
    try:
        path = written(case, root)
        content = path.read_bytes() if path.is_file() else b""
        with warnings.catch_warnings(), limited():
            warnings.simplefilter("ignore")
            found = everything(case.format, root)
    except (ValueError, OSError) as error:
        refusal = error
    finally:
        shutil.rmtree(root)
    if refusal is not None:
        text = str(refusal)
        # Some sets are short as a whole.
        named = (root.name, path.name, "books: ", "iam_ondb: ", "examples in batches of")
        assert len(text) < LONGEST + 3 * len(str(root)), f"a message of {len(text):,} characters"
        assert any(name in text for name in named), f"no file named: {type(refusal)}: {text}"
        assert not isinstance(refusal, UnicodeError), f"raw error of a codec: {text}"
        return
    for tensor in tensors(found):
        assert tensor.isfinite().all(), "a batch that is not finite"
    # Compressed files may be continued, and plain text may have their suffix.
    valid = content[: len(content) // 2] * 2 == content
    valid |= path.suffix == ".gz" and not content.startswith(b"\x1f\x8b")
    if FORMATS[case.format].checked and len(case.damages) == 1 and not (case.removed or valid):
        assert same(found, intact(case.format)), "other content was taken despite its checksum"


@given(case=data_cases())
@example(DataCase("strokes xml", 4, (Damage("insert", 0.8878, 1, b"[" * 3000),), False))
@example(DataCase("questions.tar", 0, (Damage("swap", 0.0, 48),)))
@example(DataCase("books.zip", 0, (Damage("write", 0.5548, 1, b"@entity" + b"9" * 30),)))
@example(DataCase("books.tar", 0, (Damage("flip", 0.5, 3),)))
@example(DataCase("books.gz", 0, (Damage("repeat", 0.0, 105),)))
@example(DataCase("books.gz", 1, (Damage("cut", 0.0, 1),)))
@example(DataCase("karpathy", 0, (Damage("write", 0.0, 1, b"[" + b"9" * 5000 + b","),)))
@example(DataCase("karpathy", 1, (Damage("repeat", 0.5, 1),)))
@example(DataCase("json lines", 0, (Damage("write", 0.0, 1, b"[" * 3000),)))
@fast(150)
def test_damaged_files(case: DataCase) -> None:
    check(case)


@pytest.mark.slow
def test_damaged_files_for_long() -> None:
    campaign(data_cases(), check)
