"""``ln-zoo data``: what it prints and writes, and how it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from handwriting_support import small_distribution, write_files, xml

from ln_zoo.cli import main
from ln_zoo.data import IAMOnDB, iam_ondb_files


@pytest.fixture
def source(here: Path) -> Path:
    files = small_distribution()
    files["lineStrokes/z01/z01-000/z01-000-01.xml"] = xml([[(1, 2), (3, 4)]])
    del files["ascii/c03/c03-021/c03-021.txt"]
    files["trainset.txt"] += b" m02-001\n"
    return write_files(here / "official", files)


def test_it_converts_and_says_what_it_found(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "iam_ondb", str(source), "compact"]) == 0
    told = capsys.readouterr()
    rows = [line.split() for line in told.out.splitlines()]
    for row in (["train", "3", "18"], ["valid1", "2", "12"], ["valid2", "2", "12"]):
        assert row in rows
    assert "lines without text: 2 (c03-021-01, c03-021-02)" in told.out
    assert "listed forms without stroke files: 1 (m02-001)" in told.out
    assert "stroke files of unlisted forms, skipped: 1\n" in told.out
    assert told.out.endswith("converted: compact (--data IAMOnDB --data.root compact)\n")
    assert "9/9" in told.err
    data = IAMOnDB("compact", require_text=False)
    data.setup()
    assert data.metadata["train_size"] == 7

    before = Path("compact/lines.tsv").stat().st_mtime_ns
    assert main(["data", "iam_ondb", str(source), "compact"]) == 0
    again = capsys.readouterr()
    assert again.out == told.out
    assert Path("compact/lines.tsv").stat().st_mtime_ns == before


def test_an_interruption_says_how_to_go_on(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(content: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iam_ondb_files, "read_strokes", interrupted)
        assert main(["data", "iam_ondb", str(source), "compact"]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert main(["data", "iam_ondb", str(source), "compact"]) == 0


def test_damage_is_one_line(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / "lineStrokes/a01/a01-000/a01-000u-02.xml").write_bytes(b"<a>")
    assert main(["data", "iam_ondb", str(source), "compact"]) == 1
    *_, told = capsys.readouterr().err.splitlines()
    assert told.startswith("ln-zoo data iam_ondb: error: 1 of 9 stroke files are damaged")
    assert "a01-000u-02.xml (malformed XML: " in told

    assert main(["data", "iam_ondb", "nowhere", "compact"]) == 1
    assert "error: no nowhere: give the folder" in capsys.readouterr().err
