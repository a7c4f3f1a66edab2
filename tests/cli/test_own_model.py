"""A model of one's own: its file and its configuration, and every command takes it."""

from __future__ import annotations

import importlib
from pathlib import Path

from cli_support import QUIET, Patch, cli, load, python, results, succeed
from refusals import refuses

import ln_zoo

#: All that an outsider writes.
MODEL = """
import torch
from torch.nn import functional as F
from ln_zoo import GRU, LayerNorm, Linear, Norm
from ln_zoo.export import map_path, paths
from ln_zoo.models import DynamicsTask, ZooModule
from ln_zoo.norms import from_config


class RowReader(ZooModule):
    pipeline_tag = "image-classification"

    def __init__(self, hidden_size: int = 8, norm: Norm | None = None, lr: float = 1e-2) -> None:
        super().__init__()
        norm = LayerNorm() if norm is None else from_config(norm)
        self.save_hyperparameters()
        self.resolve_hyperparameters(norm)
        self.lr = lr
        self.rows = GRU(8, hidden_size, batch_first=True, norm=norm)
        self.readout = Linear(hidden_size, 10)

    @classmethod
    def card_example(cls, preprocessing):
        return "print(model(torch.rand(1, 8, 8)).argmax(-1))"

    def export_parts(self):
        return {"logits": self._export_logits}

    def _export_logits(self, copy, form):
        images = {"images": paths.uniform("N", 8, 8)}
        return map_path(self, copy, form, images, "logits", RowReader.forward)

    def forward(self, images):
        return self.readout(self.rows(images.reshape(-1, 8, 8))[0][:, -1])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx, name="val_nll"):
        self.log(name, self.training_step(batch, batch_idx), batch_size=len(batch[1]))

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx, "test_nll")

    def predict_step(self, batch, batch_idx):
        return {"prediction": self(batch[0]).argmax(-1)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def dynamics_data(self, examples):
        return "Digits", {"eval_batch_size": examples}

    def dynamics_task(self, data, examples, steps):
        images, labels = next(iter(data.test_dataloader()))

        def loss(model, batch):
            return F.cross_entropy(model(batch[0]), batch[1])

        return DynamicsTask((images.double(), labels), loss, f"{len(images)} digits by rows")
"""
CARDS = """
from dataclasses import dataclass
from my_reader import RowReader
from ln_zoo.models import DRAW, Handwriting
from ln_zoo.norms import Norm

@dataclass(frozen=True)
class Doubling(Norm):
    factor: float = 2.0

    def normalize(self, site, a, step=None):
        return self.factor * a

class Letters(Handwriting):
    def __init__(self, norm: Norm | None = None):
        super().__init__(8, 2, norm=norm, mixture_components=2, window_components=2)

class Drawer(DRAW):
    def __init__(self, norm: Norm | None = None):
        super().__init__((6, 5), 3, 8, 2, norm=norm)

def save():
    RowReader(6, Doubling(0.5)).save_pretrained("cards/mine.reader")
    Letters().save_pretrained("cards/mine.letters")
    Drawer().save_pretrained("cards/mine.drawer")
"""
CONFIGURATION = """
model:
  class_path: my_reader.RowReader
  init_args: {hidden_size: 6, lr: 0.01}
data:
  class_path: Digits
  init_args: {batch_size: 20, train_size: 100, val_size: 20}
trainer: {max_epochs: 1}
"""


def test_it_is_one_file(here: Path) -> None:
    (here / "my_reader.py").write_text(MODEL)
    (here / "my_reader.yaml").write_text(CONFIGURATION)
    options = ["--model.norm=RMSNorm", "--test_after_fit=true"]
    succeed("fit", "--config=my_reader.yaml", *options, *QUIET)
    folder = Path("runs/RowReader-RMSNorm/version_0")
    measured = results(folder)
    assert (measured["model"], measured["norm"]) == ("RowReader", "RMSNorm")
    assert 0 < measured["metrics"]["nll"] < 10

    last, own = folder / "checkpoints/last.ckpt", "--import=my_reader"
    done = succeed("analyze", "trained_dynamics", last, own, "--batch=4")
    assert done.out.startswith("4 digits by rows, 8 steps")
    assert "last.ckpt trained" in done.out

    tested = folder / "test_results.json"
    succeed("card", last, "--results", tested, "--out=mine.reader", own)
    card = Path("mine.reader/README.md").read_text()
    assert "pipeline_tag: image-classification" in card
    assert "print(model(torch.rand(1, 8, 8)).argmax(-1))" in card


CHARACTERS = """
import torch
from lightning.pytorch import LightningDataModule
from ln_zoo import GRU, LayerNorm, Norm
from ln_zoo.models import ZooModule

TEXT = "one line,\\nand another one\\u2028\\n" * 20

class Text(LightningDataModule):
    alphabet = "".join(sorted(set(TEXT)))
    vocabulary = list(alphabet)
    vocab_size = len(alphabet)

    def train_dataloader(self):
        places = torch.tensor([self.alphabet.index(c) for c in TEXT])
        return torch.utils.data.DataLoader(places.view(20, -1), batch_size=10)

    val_dataloader = test_dataloader = train_dataloader


class CharLM(ZooModule):
    def __init__(self, vocab_size: int, alphabet: str, vocabulary: list[str],
                 norm: Norm | None = None) -> None:
        super().__init__()
        norm = LayerNorm() if norm is None else norm
        self.save_hyperparameters()
        self.resolve_hyperparameters(norm)
        self.embedding = torch.nn.Embedding(vocab_size, 4)
        self.rnn = GRU(4, vocab_size, batch_first=True, norm=norm)

    def training_step(self, batch, batch_idx):
        scores = self.rnn(self.embedding(batch[:, :-1]))[0]
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch, batch_idx, name="val_nll"):
        self.log(name, self.training_step(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx, "test_nll")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
"""


def test_an_alphabet_travels_with_the_card(here: Path, monkeypatch: Patch) -> None:
    """Also one with ends of lines, which a file of one word per line cannot hold."""
    (here / "chars.py").write_text(CHARACTERS)
    options = ["--data=chars.Text", "--trainer.max_epochs=1", "--trainer.log_every_n_steps=1"]
    succeed("fit", "--model=chars.CharLM", *options, "--test_after_fit=true", *QUIET)
    folder = Path("runs/CharLM-LayerNorm/version_0")
    results_file = f"--results={folder / 'test_results.json'}"
    last = folder / "checkpoints/last.ckpt"
    succeed("card", last, results_file, "--out=cards/chars.ln", "--import=chars")
    monkeypatch.syspath_prepend(here)
    chars = importlib.import_module("chars")
    loaded = ln_zoo.load("cards/chars.ln", model=chars.CharLM)
    assert loaded.hparams["alphabet"] == chars.Text.alphabet
    assert loaded.hparams["vocabulary"] == chars.Text.vocabulary
    assert loaded.hparams["vocab_size"] == len(chars.Text.alphabet)


def test_cards_of_own_models(here: Path, monkeypatch: Patch) -> None:
    """By folder and by name, if the user names their classes, and not otherwise."""
    (here / "my_reader.py").write_text(MODEL)
    (here / "my_cards.py").write_text(CARDS)
    made = python(here, "import sys; sys.path.insert(0, '.'); import my_cards; my_cards.save()")
    assert made.code == 0, made.err
    monkeypatch.setenv("LN_ZOO_MODELS", "cards")
    data = ["--data=Digits", "--data.train_size=40", "--data.val_size=20"]
    for argv, code, remedy in (
        (["test", "--weights=mine.reader", *data], 2, "--model my_reader.RowReader"),
        (["export", "mine.reader", "--out=a.pt2", "--format=pt2"], 1, "--import my_reader"),
        (["write", "hi", "--model=cards/mine.letters"], 1, "--import my_cards"),
        (["draw", "--model=mine.drawer"], 1, "--import my_cards"),
    ):
        refuses([remedy], cli, *argv, code=code)

    named = ["--model=my_reader.RowReader", "--model.norm=my_cards.Doubling", *data, *QUIET]
    succeed("test", "--weights=cards/mine.reader", *named)
    assert results(Path("runs"))["norm"] == "Doubling"
    succeed("predict", "--weights=mine.reader", *named, "--trainer.limit_predict_batches=1")
    succeed("fit", "--weights=mine.reader", *named, "--trainer.max_epochs=1")
    hparams = load(next(Path("runs").rglob("last.ckpt")))["hyper_parameters"]
    # The arguments are the card's: other ones than the classes' own defaults.
    assert hparams["hidden_size"] == 6
    assert hparams["norm"] == {"class_path": "my_cards.Doubling", "init_args": {"factor": 0.5}}

    own = "--import=my_cards"
    succeed("export", "mine.reader", own, "--out=a.pt2", "--format=pt2", "--form=sequence")
    succeed("write", "hi", "--model=mine.letters", own, "--out=a.svg")
    succeed("draw", "--model=cards/mine.drawer", own, "--number=2", "--out=a.png")
    assert {"a.pt2", "a.svg", "a.png"} <= {path.name for path in Path().iterdir()}
