"""Small handwriting: lines drawn at random, and the official distribution of IAM-OnDB in small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from data_support import ready
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from ln_zoo.data import HandwritingData, PenLines

LISTS = ("trainset.txt", "testset_v.txt", "testset_t.txt", "testset_f.txt")

#: A stroke is a list of positions.
Strokes = Sequence[Sequence[tuple[int, int]]]


def drawn(points: Sequence[int], seed: int = 0) -> PenLines:
    """Lines of so many points each, whose steps tell them apart."""
    rng = np.random.default_rng(seed)
    steps = []
    for count in points:
        moves = rng.integers(-40, 60, (count, 2))
        ends = rng.random(count) < 0.2
        ends[-1:] = True
        steps.append(np.column_stack([moves, ends]))
    names = [f"line-{i}" for i in range(len(points))]
    return PenLines.from_steps(steps, names, [f"text {i}" for i in range(len(points))])


class Drawn(HandwritingData):
    name = "drawn"

    def __init__(self, train: PenLines, val: PenLines | None = None, **options) -> None:
        super().__init__(**options)
        self.given = {"train": train, "val": train if val is None else val}

    def read(self) -> dict[str, PenLines]:
        return self.given | {"test": self.given["val"]}


class Waves(LightningDataModule):
    """Batches of three lines that go to the right in waves."""

    def __init__(self, batches: int = 1, mean: float = 8.0, std: float = 20.0) -> None:
        super().__init__()
        self.batches = batches
        self.offset_statistics = torch.tensor([mean, 0.0]), torch.full((2,), std)

    def train_dataloader(self) -> DataLoader:
        t = torch.arange(61.0)
        lifts = (t % 9 == 0).float()
        offsets = torch.stack([8 + 5 * t.sin(), 20 * (t / 2).cos(), lifts], -1).repeat(3, 1, 1)
        offsets[:, 0] = 0
        batch = offsets, torch.tensor([60, 60, 40]), ("abc", "a b", "no"), True
        return DataLoader([batch] * self.batches, batch_size=None)


def module(train: PenLines, val: PenLines | None = None, **options) -> Drawn:
    return ready(Drawn(train, val, **options))


def xml(strokes: Strokes) -> bytes:
    """A ``lineStrokes`` file."""
    body = "\n".join(
        f'<Stroke colour="black" start_time="1.5" end_time="2.5">\n{points}</Stroke>'
        for stroke in strokes
        for points in ["".join(f'<Point x="{x}" y="{y}" time="1.25"/>\n' for x, y in stroke)]
    )
    return (
        '<?xml version="1.0" encoding="ISO-8859-1"?>\n<WhiteboardCaptureSession>\n'
        '<WhiteboardDescription><SensorLocation corner="top_left"/>'
        '<DiagonallyOppositeCoords x="6512" y="1376"/></WhiteboardDescription>\n'
        f"<!-- caf\xe9 --><StrokeSet>\n{body}\n</StrokeSet>\n</WhiteboardCaptureSession>\n"
    ).encode("latin-1")


def steps_of(strokes: Strokes) -> list[tuple[int, int, int]]:
    """The steps of a line by hand: from the position before, 1 at the end of a stroke."""
    found, x, y = [], 0, 0
    for stroke in strokes:
        for number, (to_x, to_y) in enumerate(stroke, 1):
            found.append((to_x - x, to_y - y, int(number == len(stroke))))
            x, y = to_x, to_y
    return found


def distribution(
    lines: Mapping[str, Strokes | bytes],
    texts: Mapping[str, str],
    lists: Mapping[str, Sequence[str]],
) -> dict[str, bytes]:
    """The official files by path.

    Args:
        lines: strokes, or the content of the file, by the line's name.
        texts: content of the ``ascii`` file by form.
        lists: forms by list.
    """
    files = {}
    for name, strokes in lines.items():
        content = strokes if isinstance(strokes, bytes) else xml(strokes)
        files[f"lineStrokes/{name[:3]}/{name[:7]}/{name}.xml"] = content
    for form, text in texts.items():
        files[f"ascii/{form[:3]}/{form[:7]}/{form}.txt"] = text.encode("latin-1")
    for name, forms in lists.items():
        files[name] = "".join(f" {form}\n" for form in forms).encode()
    return files


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def small_distribution(lines_of_train: int = 3) -> dict[str, bytes]:
    """Four forms, one in each list, with two lines each; that of ``trainset`` with more."""
    rng = np.random.default_rng(7)
    forms = {"trainset.txt": "a01-000u", "testset_v.txt": "a02-004", "testset_t.txt": "b01-010z"}
    forms["testset_f.txt"] = "c03-021"
    lines, texts = {}, {}
    for name, form in forms.items():
        count = lines_of_train if name == "trainset.txt" else 2
        words = [f"{form} has {n}" for n in range(1, count + 1)]
        texts[form] = "OCR:\n\nOtherwise\n\nCSR:\n\n" + "\n".join(words) + "\n"
        for number in range(1, count + 1):
            path = rng.integers(100, 3000, (6, 2)).tolist()
            lines[f"{form}-{number:02}"] = [path[:3], path[3:4], path[4:]]
    return distribution(lines, texts, {name: [form] for name, form in forms.items()})
