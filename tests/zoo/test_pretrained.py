"""Models, norms and cards of users' own, by the methods that other libraries' models have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training import quiet_trainer
from zoo_support import RESULTS, Doubling, MakeCard, StubHub, Tested, edit, refuses, tiny

from ln_zoo.data import Digits
from ln_zoo.models import DRAW, MLPClassifier
from ln_zoo.models.base import ZooModule
from ln_zoo.norms import Norm
from ln_zoo.zoo import card_from_checkpoint, catalog, load, publish, render_card


class Mine(MLPClassifier):
    """A user's own model, with arguments of its own."""

    pipeline_tag = "tabular-classification"

    def __init__(self, width: int = 8, norm: Norm | None = None, lr: float = 1e-2) -> None:
        super().__init__(64, [width, width], 10, norm, lr=lr)

    @classmethod
    def card_example(cls, preprocessing: Any) -> str:
        return "print(model.lr)\n"


class Slower(MLPClassifier):
    """A model of ln_zoo, trained in another way."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class NamelessDigits(Digits):
    """Data that do not say what they are called."""

    @property
    def metadata(self) -> dict[str, Any]:
        return {"seed": self.seed}


def test_a_model_of_the_users_own(tmp_path: Path) -> None:
    model = Mine(6, Doubling(0.25)).eval()
    folder = model.save_pretrained(tmp_path / "mine", facts={"description": "Mine."})
    inputs = torch.rand(3, 64)

    again = Mine.from_pretrained(folder, norm=Doubling(0.25))
    assert type(again) is Mine
    assert not again.training
    assert torch.equal(again(inputs), model(inputs))
    assert torch.equal(load(folder, model=Mine, norm=Doubling(0.25))(inputs), model(inputs))

    card = catalog.read_card(folder)
    assert (card.model, card.norm) == (f"{__name__}.Mine", "zoo_support.Doubling")
    readme = (folder / "README.md").read_text()
    for text in (
        f"from {__name__} import Mine\nfrom zoo_support import Doubling\n",
        'ln_zoo.load("mine", model=Mine, norm=Doubling(factor=0.25))',
        "print(model.lr)", "pipeline_tag: tabular-classification", "Nothing was measured.",
        f"- class: `{__name__}.Mine`, ",
    ):  # fmt: skip
        assert text in readme, text
    refuses(r"model=Mine\)", load, folder)
    refuses(r"norm=Doubling\(\)\)", Mine.from_pretrained, folder)
    refuses(r"Mine.*DRAW", DRAW.from_pretrained, folder)


def test_a_class_reads_models_of_its_kind(make_card: MakeCard) -> None:
    folder = make_card()
    assert type(MLPClassifier.from_pretrained(folder)) is MLPClassifier
    assert type(ZooModule.from_pretrained(folder)) is MLPClassifier
    slower = Slower.from_pretrained(folder)
    assert type(slower) is Slower
    assert torch.equal(slower.head.weight, tiny().head.weight)
    assert Slower.from_pretrained(folder, num_classes=3).head.weight.shape == (3, 16)
    refuses(r"MLPClassifier.*DRAW", DRAW.from_pretrained, folder)
    refuses(r"Mine.*'in_features'", Mine.from_pretrained, folder)
    refuses("'no-such-model'", MLPClassifier.from_pretrained, "no-such-model")


def test_an_unchanged_model_keeps_its_card(make_card: MakeCard, tmp_path: Path) -> None:
    folder = make_card()
    copy = load(folder).save_pretrained(tmp_path / "copy" / "mlp.layernorm")
    for name in catalog.CARD_FILES:
        assert (copy / name).read_bytes() == (folder / name).read_bytes(), name
    model = load(folder)
    refuses("facts", model.save_pretrained, tmp_path / "other", facts={"notes": ["mine"]})
    with torch.no_grad():
        model.head.bias[0] += 1
    changed = catalog.read_card(model.save_pretrained(tmp_path / "changed"))
    assert changed.metrics == []
    assert changed.preprocessing == model.card.preprocessing
    (before,) = changed.results["training"]["earlier"]
    assert before == {
        "weights": f"mlp.layernorm, sha256 {model.card.digest}",
        "dataset": "digits", "batch_size": 32, "epochs": 2, "steps": 20,
    }  # fmt: skip
    assert "epochs" not in changed.results["training"]
    assert changed.digest != model.card.digest


def test_what_was_measured_goes_into_the_card(tmp_path: Path) -> None:
    data, model = Digits(batch_size=200, train_size=200), tiny()
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(model, data)
    (measured,) = trainer.test(model, data, verbose=False)
    facts = {"license": "cc-by-4.0", "main_metric": "error", "version": "1"}
    options = {"metrics": measured, "data": data, "facts": facts}
    folder = model.save_pretrained(tmp_path / "digits.tiny", **options)
    card = catalog.read_card(folder)
    assert {f"test_{m['name']}": m["value"] for m in card.metrics} == measured
    assert card.metrics[0]["name"] == "error"
    assert card.datasets == ["digits"]
    assert card.preprocessing == data.preprocessing
    assert card.results["training"] == {
        "dataset": "digits", "train_size": 200, "batch_size": 200, "lr": 0.001, "epochs": 1,
        "steps": 1, "commands": [],
    }  # fmt: skip
    assert load(folder, revision="1").card.version == "1"
    # A data module that does not say its name has that of its class, as in `ln-zoo test`.
    mine = NamelessDigits(batch_size=200, train_size=200)
    nameless = model.save_pretrained(tmp_path / "nameless", metrics={"f1": 0.5}, data=mine)
    assert catalog.read_card(nameless).datasets == ["NamelessDigits"]
    # Facts in plain words do as well.
    plain = model.save_pretrained(tmp_path / "plain", metrics={"f1": 0.5}, data={"dataset": "own"})
    assert catalog.read_card(plain).datasets == ["own"]


def test_pushing(make_card: MakeCard, stub_hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(make_card())
    sent = model.push_to_hub("someone/mlp-tiny", private=True)
    assert stub_hub.private["someone/mlp-tiny"]
    assert sent.commit == stub_hub.branches["someone/mlp-tiny"]["main"]
    again = MLPClassifier.from_pretrained("someone/mlp-tiny", revision=sent.commit)
    assert [vars(metric) for metric in again.card.metrics] == RESULTS["metrics"]
    assert again.card.name == "mlp-tiny"

    mine = Mine(6, Doubling())
    mine.push_to_hub("someone/mine", metrics={"error": 0.5}, facts={"license": "mit"})
    again = Mine.from_pretrained("someone/mine", norm=Doubling())
    assert torch.equal(again.head.weight, mine.head.weight)


def test_options_of_the_hub(make_card: MakeCard, stub_hub: StubHub, tmp_path: Path) -> None:
    name = "someone/mlp-tiny"
    load(make_card()).push_to_hub(name)

    def load_again(**options: Any) -> tuple[ZooModule, list[str]]:
        """The model, and the requests that it took."""
        before = len(stub_hub.requests)
        model = MLPClassifier.from_pretrained(name, **options)
        return model, stub_hub.requests[before:]

    refuses("local_files_only", load_again, local_files_only=True)
    model, requests = load_again(token="my-token")
    assert {stub_hub.tokens[request] for request in requests} == {"Bearer my-token"}
    cached, requests = load_again(local_files_only=True)
    assert requests == []
    assert torch.equal(cached.head.weight, model.head.weight)
    weights = [request for request in load_again()[1] if catalog.WEIGHTS in request]
    again = [r for r in load_again(force_download=True)[1] if catalog.WEIGHTS in r]
    assert len(again) > len(weights)


def test_precision_and_device(make_card: MakeCard) -> None:
    folder = make_card()
    plain, double = load(folder), load(folder, dtype=torch.float64)
    assert torch.equal(double.head.weight, plain.head.weight.double())
    assert MLPClassifier.from_pretrained(folder, device="meta").head.weight.is_meta
    refuses("floating point", load, folder, dtype=torch.int64, error=TypeError)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model = tiny()
    refuses("finite", model.save_pretrained, tmp_path / "a", metrics={"error": float("nan")})
    model.save_pretrained(tmp_path / "a")
    refuses("--overwrite", model.save_pretrained, tmp_path / "a")
    model.save_pretrained(tmp_path / "a", overwrite=True)


def test_cards_of_own_classes_from_checkpoints(tested_checkpoint: Tested, tmp_path: Path) -> None:
    checkpoint, results = tested_checkpoint
    content = torch.load(checkpoint, weights_only=True)
    edit(results, model="Slower", checkpoint_sha256=None)
    content["hyper_parameters"]["_class_path"] = f"{__name__}.Slower"
    torch.save(content, checkpoint)
    folder = card_from_checkpoint(
        checkpoint, results, tmp_path / "slower", facts={"license": "mit"}
    )
    assert catalog.read_card(folder).model == f"{__name__}.Slower"
    assert isinstance(Slower.from_pretrained(folder), Slower)
    assert (folder / "README.md").read_text() == render_card(folder)
    publish(str(folder), "someone/slower", model=Slower, dry_run=True)

    content["hyper_parameters"]["_class_path"] = "not_imported.Slower"
    torch.save(content, checkpoint)
    message = r"not_imported\.Slower.*--import not_imported"
    refuses(message, card_from_checkpoint, checkpoint, results, tmp_path / "again")
