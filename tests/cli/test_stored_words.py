"""Words go from the data to the model in training, and from a stored model to the data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cli_support import QUIET, cli, load, succeed
from refusals import refuses

#: A model that reads words, and data that give them; each prints what it was made with.
OWN = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from ln_zoo.models import ZooModule
from ln_zoo.norms import Identity, Norm
from ln_zoo.utils.vocabulary import Vocabulary

class Reader(ZooModule):
    def __init__(self, vocabulary: list[str] | str | None = None, norm: Norm | None = None):
        super().__init__()
        self.vocabulary = Vocabulary.of(vocabulary)
        self.save_hyperparameters()
        self.resolve_hyperparameters(Identity(), vocabulary=list(self.vocabulary))
        self.weight = torch.nn.Parameter(torch.zeros(self.vocabulary.size))
        print("model:", *self.vocabulary[:3])

    def training_step(self, batch, batch_idx):
        return self.weight[batch].sum()

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.weight[batch].sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Texts(LightningDataModule):
    def __init__(self, vocabulary: list[str] | str | None = None, size: int = 2):
        super().__init__()
        words = Vocabulary.of(vocabulary or [f"word{i}" for i in range(size)])
        self.vocabulary = list(words)
        print("data:", *self.vocabulary[:3])

    def train_dataloader(self):
        return DataLoader(torch.arange(3))

    test_dataloader = train_dataloader

class Stubborn(Texts):
    def __init__(self):
        super().__init__(["other"])

class Silent(Texts):
    def __init__(self):
        super().__init__()
        del self.vocabulary
"""
READER = "--model=texts.Reader"
QUICK = (*QUIET, "--trainer.max_steps=1", READER)
CHECKPOINT = "runs/Reader-Identity/version_0/checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A current folder with the classes and a model of 2,000 words."""
    folder = tmp_path_factory.mktemp("words")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "texts.py").write_text(OWN)
        more = ("--data=texts.Texts", "--data.size=2000", "--model.vocabulary=no")
        done = succeed("fit", *QUICK, *more)
        assert "model: word0 word1 word2" in done.out
        assert "model.vocabulary is ignored" in done.err
        yield folder


def test_words_of_a_stored_model_go_to_the_data(trained: Path) -> None:
    words = [f"word{i}" for i in range(2000)]
    assert load(trained / CHECKPOINT)["hyper_parameters"]["vocabulary"] == words
    # Nothing prints or writes thousands of words but the checkpoint.
    for path in trained.glob("runs/**/*.yaml"):
        assert "word1999" not in path.read_text(), path

    for option in ("--weights", "--ckpt_path"):
        done = succeed("test", option, CHECKPOINT, READER, "--data=texts.Texts", *QUIET)
        # The module's own default would be two words.
        for reader in ("data", "model"):
            assert f"{reader}: word0 word1 word2" in done.out, option
        assert "note" not in done.err
        assert "word1999" not in done.out + done.err

    # A new run from the weights stores where it took the words from, and runs again from its file.
    succeed("fit", *QUICK, "--weights", CHECKPOINT, "--data=texts.Texts", "--data.size=5")
    (config,) = trained.glob("runs/Reader-Identity/version_3/config.yaml")
    content = yaml.safe_load(config.read_text())
    assert content["weights"] == CHECKPOINT
    assert content["data"]["init_args"] == {"vocabulary": None, "size": 5}
    again = succeed("fit", "--config", config, "--trainer.max_steps=2")
    assert "data: word0 word1 word2" in again.out

    # A resumed run keeps its words.
    done = succeed("fit", *QUICK, "--ckpt_path=last", "--data=texts.Texts", "--trainer.max_steps=3",
                   "--data.vocabulary=[a,b]", "--model.vocabulary=[a,b]")  # fmt: skip
    for word in ("data.vocabulary is ignored", "2,000", "model.vocabulary is ignored"):
        assert word in done.err
    assert "data: word0 word1 word2" in done.out
    assert "word1999" not in done.out + done.err


def test_data_with_other_words_or_none(trained: Path) -> None:
    test = ("test", "--weights", CHECKPOINT, READER, *QUIET)
    assert "model: word0 word1 word2" in succeed(*test, "--data=texts.Silent").out
    line = refuses([CHECKPOINT, "2,000", "Stubborn"], cli, *test, "--data=texts.Stubborn")
    assert len(line) < 400
