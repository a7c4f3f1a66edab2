"""``ln-zoo data``: what it prints and writes, and how it fails; data of others in training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cli_support import Capture, Patch, cli
from data_support import image_table, picture, ready
from handwriting_support import small_distribution, write_files, xml
from refusals import refuses

from ln_zoo.cli import main
from ln_zoo.data import IAMOnDB
from ln_zoo.data.pen import conversion


@pytest.fixture
def source(here: Path) -> Path:
    files = small_distribution()
    files["lineStrokes/z01/z01-000/z01-000-01.xml"] = xml([[(1, 2), (3, 4)]])
    del files["ascii/c03/c03-021/c03-021.txt"]
    files["trainset.txt"] += b" m02-001\n"
    return write_files(here / "official", files)


def test_it_converts_and_reports(source: Path, capsys: Capture) -> None:
    assert main(["data", "iam_ondb", str(source), "compact"]) == 0
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    for row in (["train", "3", "18"], ["valid1", "2", "12"], ["valid2", "2", "12"]):
        assert row in rows
    assert "lines without text: 2 (c03-021-01, c03-021-02)" in printed.out
    assert "listed forms without stroke files: 1 (m02-001)" in printed.out
    assert "stroke files of unlisted forms, skipped: 1\n" in printed.out
    assert printed.out.endswith("converted: compact (--data IAMOnDB --data.root compact)\n")
    assert "9/9" in printed.err
    assert ready(IAMOnDB("compact", require_text=False)).metadata["train_size"] == 7


def test_an_interruption(source: Path, monkeypatch: Patch) -> None:
    def interrupted(content: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "read_strokes", interrupted)
    assert main(["data", "iam_ondb", str(source), "compact"]) == 130


def test_damage_is_one_line(source: Path) -> None:
    damaged = "a01-000u-02.xml"
    (source / "lineStrokes/a01/a01-000" / damaged).write_bytes(b"<a>")
    refuses(["1 of 9", damaged], cli, "data", "iam_ondb", source, "compact", code=1)
    for x, next_x in (("1e39", 0), ("1e308", "-1e308")):
        file = source / "lineStrokes/a01/a01-000" / damaged
        file.write_bytes(xml([[(x, 2), (next_x, 4)]]))
        says = ["1 of 9", damaged, "float32"]
        refuses(says, cli, "data", "iam_ondb", source, "compact", code=1)
    refuses(["nowhere"], cli, "data", "iam_ondb", "nowhere", "other", code=1)
    assert not Path("other").exists()
    Path("file").touch()
    refuses(["file/compact", "another"], cli, "data", "iam_ondb", source, "file/compact", code=1)


def test_an_address_in_a_table_is_not_followed(here: Path) -> None:
    cells = [{"bytes": picture(np.zeros((28, 28), np.uint8)), "path": None}] * 9
    cells.append({"bytes": None, "path": "http://127.0.0.1:9/x.png"})
    for split in ("train", "test"):
        (here / f"{split}.parquet").write_bytes(image_table(cells, "parquet"))
    fit = ["fit", "--model=MLPClassifier", "--data=MNIST", "--data.root=.", "--data.train_size=5"]
    says = ["train.parquet", "row 9", "bytes"]
    refuses(says, cli, *fit, "--data.val_size=5", "--trainer.logger=false", code=1)
