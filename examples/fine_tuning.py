"""Fine-tune a published model for other classes, save it, and load it again.

    python examples/fine_tuning.py

The network was trained on ten digits, and learns from 20 images whether a digit is odd: first only
a new last layer, then all layers. A network trained from scratch is the baseline.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor

import ln_zoo
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier


class OddDigits(Digits):
    """scikit-learn's digits, labelled 1 if odd."""

    name, num_classes = "odd_digits", 2

    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (images, labels % 2) for name, (images, labels) in super().read().items()}


def error_after(model: MLPClassifier, freeze: int) -> dict[str, float]:
    """Train for 20 epochs, the first ones only the last layer; return test metrics."""
    data = OddDigits(batch_size=10, train_size=20)
    trainer = Trainer(
        max_epochs=20,
        accelerator="cpu",
        callbacks=[BackboneFinetuning(freeze, verbose=False)] if freeze else [],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    (measured,) = trainer.test(model, data, verbose=False)
    return measured


def main() -> dict[str, float]:
    """Train both, and return their errors."""
    seed_everything(0, verbose=False)
    model = ln_zoo.load("mlp.layernorm-digits", num_classes=2)
    print(f"new: {', '.join(model.new_weights)}")
    tuned = error_after(model, freeze=10)
    sizes = model.hparams["hidden_sizes"]
    scratch = error_after(MLPClassifier(64, sizes, 2, lr=model.lr), freeze=0)
    print(f"error from 20 images: {100 * tuned['test_error']:.1f} %")
    print(f"from nothing: {100 * scratch['test_error']:.1f} %")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mlp.odd"
        model.save_pretrained(path, metrics=tuned, data=OddDigits())
        again = MLPClassifier.from_pretrained(path)
        image = torch.rand(1, 8, 8)
        same = torch.equal(again(again.card.preprocess(image)), model.eval()(image[None]))
    print(f"saved and loaded again: {'the same' if same else 'another'} output")
    return {"tuned": tuned["test_error"], "scratch": scratch["test_error"], "same": same}


if __name__ == "__main__":
    main()
