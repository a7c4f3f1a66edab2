"""Pictures of retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ln_zoo.callbacks.evaluation_loop import batches, check_model, data_module, evaluating
from ln_zoo.plots.figures import save_figure
from ln_zoo.plots.retrieval import Found, plot_retrieval
from ln_zoo.utils.checks import check_at_least


class RetrievalPictures(Callback):
    """Draw ``retrieval.png`` when ``predict`` starts.

    It shows the nearest images of random test captions, and the nearest captions of random test
    images; correct answers are green. The model must return embeddings of captions and images of a
    batch and have ``penalties``, as `ln_zoo.models.OrderEmbedding`; the data module
    ``captioned(name)`` and ``thumbnail(name)``, as `ln_zoo.data.CaptionedImages`. The terms of the
    dataset apply to thumbnails.

    Args:
        folder: folder to write to; default: the log directory.
        queries: number of captions, and of images.
        answers: answers per query.
        seed: seed of the queries.
    """

    def __init__(
        self, folder: str | None = None, queries: int = 3, answers: int = 5, seed: int = 0
    ) -> None:
        check_at_least(1, queries=queries, answers=answers)
        self.folder = folder
        self.queries = queries
        self.answers = answers
        self.seed = seed
        self.written: list[Path] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        check_model(self, pl_module, "OrderEmbedding", "penalties")
        data_module(trainer, self, "captioned", "thumbnail", "test_dataloader")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(self.folder or trainer.log_dir or ".")  # collective
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        data = data_module(trainer, self)
        images, captions = self._found(trainer, pl_module)
        count = len(data.captioned("test").names)
        title = f"nearest of {count:,} images, and of their captions; own in green"
        path = folder / "retrieval.png"
        save_figure(plot_retrieval(images, captions, data.thumbnail, title), path, quantize=True)
        self.written = [path]

    def _found(self, trainer: Trainer, module: Any) -> tuple[list[Found], list[Found]]:
        read = data_module(trainer, self).captioned("test")
        words = [" ".join(caption) for caption in read.captions]
        parts = []
        with evaluating(module):
            # Not the test loader, which is a share of the set under several processes.
            loader = data_module(trainer, self).predict_dataloader()
            for batch in batches(trainer, loader):
                with trainer.precision_plugin.predict_step_context():
                    parts.append(module(batch))
            s, v = (torch.cat(each) for each in zip(*parts, strict=True))
            each = len(s) // len(v)
            generator = torch.Generator().manual_seed(self.seed)
            rows = torch.randperm(len(s), generator=generator)[: self.queries]
            columns = torch.randperm(len(v), generator=generator)[: self.queries]
            of_images = module.penalties(s[rows], v)
            of_captions = module.penalties(s, v[columns]).T
        images = [
            self._answers(e, words[row], read.names, [int(row) // each])
            for e, row in zip(of_images, rows.tolist(), strict=True)
        ]
        captions = [
            self._answers(e, read.names[i], words, range(each * i, each * (i + 1)))
            for e, i in zip(of_captions, columns.tolist(), strict=True)
        ]
        return images, captions

    def _answers(
        self, penalties: Tensor, query: str, names: Sequence[str], right: Sequence[int]
    ) -> Found:
        nearest = penalties.argsort()[: self.answers].tolist()
        best = penalties[list(right)].min()
        return Found(
            query,
            [names[i] for i in nearest],
            [i in right for i in nearest],
            1 + int((penalties < best).sum()),
        )
