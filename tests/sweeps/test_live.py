"""The page of a sweep that runs: what it shows, and that a browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ln_zoo.sweeps.grid import Grid
from ln_zoo.sweeps.live import LivePage
from ln_zoo.sweeps.progress import Progress
from ln_zoo.sweeps.state import FAILED, FINISHED, WAITING, State

GRID = Grid(["c.yaml"], ["a.yaml", "b.yaml"], [0, 1], {"model.lr": ["<1>"]}, data_seed=False)


def page_of(out: Path) -> tuple[LivePage, Progress]:
    """One run has finished, one failed, one is half done, one waits."""
    names = [run.name for run in GRID.runs()]
    for number, name in enumerate(names[:3]):
        (out / name).mkdir(parents=True)
        rows = [f"{i},{10 * i + 9},{1 / (i + 1 + number)}" for i in range(5)]
        (out / name / "metrics.csv").write_text("\n".join(["epoch,step,val_nll", *rows]) + "\n")
    states = {
        names[0]: State(FINISHED, {"metrics": {"error": 0.25}}),
        names[1]: State(FAILED, error="<no> data"),
        names[3]: State(WAITING),
    }
    progress = Progress(GRID.runs(), states, {names[2]: 0.5}, share=0.625, left=75.0)
    return LivePage(out, out / "report"), progress


def test_a_page_shows_states_scores_and_curves(tmp_path: Path) -> None:
    page, progress = page_of(tmp_path)
    page.checked(progress)
    text = (tmp_path / "report/index.html").read_text()
    assert "1 of 4 runs finished, 1 min 15 s left" in text
    assert 'content="10"' in text
    assert "&lt;no&gt; data" in text
    assert "<no>" not in text
    rows = re.findall(r"<tr><td>.*?</tr>", text)
    cells = [re.sub("<[^>]*>", "|", row).strip("|") for row in rows]
    assert cells[0].startswith("a, model.lr=&lt;1&gt;||1||seed 1: 50%||||||error 25 %")
    assert [row.count("class=") for row in rows[2:]] == [1, 1, 1, 1]
    (picture,) = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    lines = ET.fromstring(picture).findall("g/polyline")
    assert len(lines) == 3
    assert lines[0].get("points", "").split()[0] == "10,1.0"
    # Not again at once.
    page.path.unlink()
    page.checked(progress)
    assert not page.path.exists()
    for run in progress.runs:
        progress.states[run.name] = State(FINISHED, {"metrics": {"error": 0.25}})
    page.closed(progress)
    text = page.path.read_text()
    assert "http-equiv" not in text
    assert '<p id="head">4 of 4 runs finished</p>' in text


def test_a_full_disk_stops_the_page_only(tmp_path: Path) -> None:
    page, progress = page_of(tmp_path)
    page.path = Path("/dev/full/index.html")
    page.checked(progress)


def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    """Also what it writes: the document, parsed and styled, after its scripts (it has none)."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    page, progress = page_of(tmp_path)
    page.closed(progress)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'u'}"]
    shot = f"--screenshot={tmp_path / 'page.png'}"
    argv = [browser, *options, "--window-size=1100,900", shot, page.path.as_uri()]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    from PIL import Image

    with Image.open(tmp_path / "page.png") as picture:
        colors = {color for _, color in picture.convert("RGB").getcolors(maxcolors=2**24)}
    # The bar, and the curves of both labels.
    assert {(0x2A, 0x7F, 0x62), (0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)} <= colors
    argv = [browser, *options, "--dump-dom", page.path.as_uri()]
    dom = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout
    assert dom.count("<polyline") == 3
