"""Words that a model has not seen in training, by vectors from elsewhere."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
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
        if stage == "fit":
            return
        expand = getattr(pl_module, "expand_vocabulary", None)
        if expand is None:
            raise ValueError(f"{type(pl_module).__name__} has no vocabulary that can be expanded")
        added = expand(self.path)
        rank_zero_info(f"{self.path}: {added:,} words beyond the model's vocabulary")
