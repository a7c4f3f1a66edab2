"""Words that a model has not seen in training, by vectors from elsewhere."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info


class VocabularyExpansion(Callback):
    """Lets a model read words beyond its vocabulary before it predicts, validates or is tested.

    The model must have ``expand_vocabulary(path)``, as `ln_zoo.models.SkipThought`. Training leaves
    it alone.

    Args:
        path: vectors of words, as text in the form of word2vec or GloVe.

    Raises:
        ValueError: for a model without that method; as that method does.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" and not hasattr(pl_module, "expand_vocabulary"):
            raise ValueError(
                f"VocabularyExpansion needs a model with expand_vocabulary(path), and "
                f"{type(pl_module).__name__} has none: leave the callback out"
            )

    # Not in `setup`: only after it does Lightning restore the weights of a checkpoint, and the map
    # of the vectors is fitted to the model's own.

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._expand(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._expand(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:  # not within training
            self._expand(pl_module)

    def _expand(self, module: Any) -> None:
        added = module.expand_vocabulary(self.path)
        rank_zero_info(f"{self.path}: {added:,} words beyond the model's vocabulary")
