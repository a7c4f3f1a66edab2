"""Pictures of the attention of a reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from ln_zoo.callbacks.evaluation_loop import check_model, data_module, evaluating
from ln_zoo.plots.attention import Attended, plot_attention
from ln_zoo.plots.figures import save_figure
from ln_zoo.utils.checks import check_at_least


class AttentionPictures(Callback):
    """Draw ``attention.png``, attention over test passages, when ``predict`` starts.

    The questions are evenly spread over the test set. The model must have ``vocabulary`` and
    ``attention(inputs)``, weights (N, T) of tokens; the data module ``evaluation_set("test",
    examples)`` with batches as `ln_zoo.data.ClozeData`.

    Args:
        folder: folder to write to; default: the log directory.
        questions: number of questions.
    """

    def __init__(self, folder: str | None = None, questions: int = 3) -> None:
        check_at_least(1, questions=questions)
        self.folder = folder
        self.questions = questions
        #: Pictures of the last prediction.
        self.written: list[Path] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        data_module(trainer, self, "evaluation_set")
        check_model(self, pl_module, "AttentiveReader", "attention")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(self.folder or trainer.log_dir or ".")  # collective
        self.written = []
        with evaluating(pl_module):
            found = self._attended(trainer, pl_module)
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.written = [folder / "attention.png"]
            save_figure(plot_attention(found), self.written[0], quantize=True)

    def _attended(self, trainer: Trainer, module: Any) -> list[Attended]:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        chosen = data.evaluation_set("test", self.questions)
        batch = trainer.strategy.batch_to_device(chosen[torch.arange(len(chosen))])
        inputs, answers = batch
        attention = module.attention(inputs).double().cpu()
        predictions = module(inputs).argmax(-1)
        words = module.vocabulary.words
        passages, lengths, queries, query_lengths = inputs
        return [
            Attended(
                words(passages[i, : int(lengths[i])].tolist()),
                attention[i, : int(lengths[i])].tolist(),
                words(queries[i, : int(query_lengths[i])].tolist()),
                *words([int(answers[i]), int(predictions[i])]),
            )
            for i in range(len(answers))
        ]
