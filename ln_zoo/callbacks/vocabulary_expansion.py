"""Vocabulary expansion by pretrained word vectors."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from ln_zoo.callbacks.evaluation_loop import check_model


class VocabularyExpansion(Callback):
    """Expand a model's vocabulary before ``predict``, ``validate`` and ``test``.

    The model must have ``expand_vocabulary(path)``, as `ln_zoo.models.SkipThought`.

    Args:
        path: word vectors in the text format of word2vec or GloVe.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            check_model(self, pl_module, "SkipThought", "expand_vocabulary")

    # Not in `setup`: checkpoints are loaded later, and the map of vectors is fitted to the weights.

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._expand(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._expand(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:  # not within training
            self._expand(pl_module)

    def _expand(self, module: Any) -> None:
        added = module.expand_vocabulary(self.path)
        rank_zero_info(f"{self.path}: {added:,} words added to the vocabulary")
