"""A text file with one sentence per line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from ln_zoo.data.text_files import TextFile, read_texts
from ln_zoo.utils.checks import check_at_least


class SentenceFile(LightningDataModule):
    """The lines of a text file, for `ln-zoo predict` with a sentence model.

    Each line is a sentence, tokenised as the model's training text. Batches, lists of sentences and
    ``eos``, have similar lengths; predictions are in the order of the lines.

    Args:
        path: text in UTF-8, also compressed (``.gz``).
        batch_size: sentences per batch; changes vectors by rounding only.
        eos: append the end of a sentence as in training; see `SkipThought.encode`.
    """

    #: The kind of batch, which models check.
    batch_kind: ClassVar[str] = "sentences"
    #: Predictions are rows of one array.
    prediction_format: ClassVar[str] = ".npy"

    def __init__(self, path: str, batch_size: int = 128, eos: bool = True) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size)
        if not Path(path).is_file():
            raise FileNotFoundError(f"no file {path}: give a text file with one sentence per line")
        self.path = path
        self.batch_size = batch_size
        self.eos = eos
        #: The lines of the file, after `setup`.
        self.sentences: list[str] = []

    @property
    def metadata(self) -> dict[str, Any]:
        return {"dataset": Path(self.path).name, "eos": self.eos}

    def setup(self, stage: str | None = None) -> None:
        sentences = [line for _, line in read_texts([TextFile(self.path)])]
        if not sentences:
            raise ValueError(f"{self.path} is empty: give a text file with one sentence per line")
        if "" in sentences:
            raise ValueError(
                f"{self.path}, line {sentences.index('') + 1:,} is empty: every line is a "
                "sentence, so remove it"
            )
        self.sentences = sentences

    def predict_dataloader(self) -> DataLoader:
        order = sorted(range(len(self.sentences)), key=lambda i: len(self.sentences[i].split()))
        # A plain loader: Lightning passes its indices to prediction writers.
        return DataLoader(
            self.sentences,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            sampler=order,
            collate_fn=self._batch,
        )

    def _batch(self, sentences: Sequence[str]) -> tuple[list[str], bool]:
        return list(sentences), self.eos
