"""Loading published models, and refusing what is damaged or foreign."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from zoo_support import PREPROCESSING, RESULTS, Doubling, tiny

from ln_zoo.models import DRAW
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, Site, WeightNorm
from ln_zoo.zoo import CardError, catalog, load, source, write_card
from ln_zoo.zoo.source import Source


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "norm", [LayerNorm(eps=1e-3), BatchNorm(unbiased=True), WeightNorm(), Identity(), RMSNorm()]
)
def test_the_loaded_model_is_the_saved_one(make_card: Callable[..., Path], norm: Norm) -> None:
    folder = make_card("model", norm)
    before = torch.get_rng_state()
    model = load(folder)
    assert torch.equal(torch.get_rng_state(), before)

    expected = tiny(norm)
    assert type(model) is type(expected)
    assert model.hparams == expected.hparams
    assert not model.training
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name
        assert state[name].dtype == value.dtype
    assert all(parameter.requires_grad for parameter in model.parameters())
    inputs = torch.rand(5, 1, 8, 8)
    assert torch.equal(model(inputs), expected.eval()(inputs))
    assert model.card.preprocessing == {"scale": 16, "image_shape": [1, 8, 8]}


def test_names_folders_and_strings(
    models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models_folder / "mlp.none"
    assert load("mlp.none").card.folder == folder
    assert load(folder).card.folder == folder
    assert load(str(folder)).card.folder == folder
    monkeypatch.chdir(models_folder)
    assert load("./mlp.none").card.folder == Path("mlp.none")
    assert load(Path("mlp.none")).card.folder == Path("mlp.none")
    monkeypatch.chdir(models_folder.parent)
    # A folder that exists goes before a hub repository of the same spelling.
    assert load("cards/mlp.none").card.folder == Path("cards/mlp.none")


#: Names of version 0.1 by the present ones.
FORMER = {"hidden_sizes": "hidden_features", "sync": "across_processes"}


def former(init_args: dict[str, Any]) -> dict[str, Any]:
    norm = init_args["norm"]
    norm["init_args"] = {FORMER.get(k, k): v for k, v in norm["init_args"].items()}
    return {FORMER.get(name, name): value for name, value in init_args.items()}


def test_a_card_of_version_0_1(make_card: Callable[..., Path]) -> None:
    folder = make_card("model", BatchNorm(sync=True))
    config = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", init_args=former(config["init_args"]))
    model = load(folder)
    assert model.hparams["norm"]["init_args"]["sync"] is True
    assert model.hparams["hidden_sizes"] == [16]


def test_a_checkpoint_of_version_0_1(tested_checkpoint: tuple[Path, Path]) -> None:
    path, _ = tested_checkpoint
    checkpoint = torch.load(path, weights_only=True)
    expected = load(path)
    hparams = checkpoint["hyper_parameters"]
    own = {name: hparams[name] for name in hparams if name.startswith("_")}
    checkpoint["hyper_parameters"] = own | former(
        {name: hparams[name] for name in hparams if not name.startswith("_")}
    )
    assert "hidden_sizes" not in checkpoint["hyper_parameters"]
    torch.save(checkpoint, path)
    model = load(path)
    assert dict(model.hparams) == dict(expected.hparams)
    assert all(torch.equal(a, model.state_dict()[k]) for k, a in expected.state_dict().items())


def test_classes_of_users_keep_the_names_of_version_0_1() -> None:
    own = {"bound": 1, "norm": {"class_path": "mine.Norm", "init_args": {"across_processes": True}}}
    assert source._renamed("mine.Model", own) == own


def test_missing_folders_and_misplaced_arguments(models_folder: Path) -> None:
    with pytest.raises(CardError, match="there is no card folder"):
        load(models_folder / "gone")
    with pytest.raises(CardError, match="there is no card folder"):
        load("./gone")
    with pytest.raises(CardError, match=r"mlp\.layernorm"):
        load("mlp.layernrm")
    with pytest.raises(CardError, match=r"mlp\.none.*'v1'"):
        load("mlp.none", revision="v1")


def test_versions_of_weights(
    models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two folders of one name, as where a newer ln_zoo brings other weights."""
    newer = {**RESULTS, "card": {"version": "2"}}
    write_card(tmp_path / "shipped/mlp.none", tiny(seed=1), newer, preprocessing=PREPROCESSING)
    monkeypatch.setattr(catalog, "SHIPPED", (tmp_path / "shipped",))
    first, second = load("mlp.none").card, load("mlp.none", revision="2").card
    assert (first.folder, first.version) == (models_folder / "mlp.none", "")
    assert (second.folder, second.version) == (tmp_path / "shipped/mlp.none", "2")
    assert "- version: 2" in (second.folder / "README.md").read_text()

    assert load("mlp.none@2").card == second
    for card in (first, second):
        weights = (card.folder / "model.safetensors").read_bytes()
        assert card.digest == hashlib.sha256(weights).hexdigest()
        assert load("mlp.none", revision=card.digest).card == card
        assert load(f"mlp.none@{card.digest[:8]}").card == card
        assert load(card.folder, revision=card.digest[:12]).card == card
    with pytest.raises(CardError, match=r"'3'.*none \(sha256 \w{8}\.{3}\), .*\(version 2"):
        load("mlp.none@3")
    with pytest.raises(CardError, match="version"):
        load("mlp.none", revision=first.digest[:7])
    with pytest.raises(CardError, match="version"):
        load(first.folder, revision=second.digest)
    with pytest.raises(CardError, match=r"'2'.*revision='3'"):
        load("mlp.none@2", revision="3")
    with pytest.raises(CardError, match="revision"):
        load("mlp.none@")


@pytest.mark.parametrize("norm", [LayerNorm(), BatchNorm()])
def test_a_head_for_other_classes(make_card: Callable[..., Path], norm: Norm) -> None:
    folder = make_card("model", norm)
    before = torch.get_rng_state()
    trained, model = load(folder), load(folder, num_classes=3)
    assert torch.equal(torch.get_rng_state(), before)

    assert model.hparams["num_classes"] == 3
    # Batch norm acts on the logits too, with a gain for each.
    sites = {"network.3.site.gain"} if norm.batch_dependent else set()
    assert {"network.3.weight", "network.3.bias"} <= set(model.new_weights)
    assert sites <= set(model.new_weights)
    assert trained.new_weights == ()
    for name, value in model.state_dict().items():
        if name not in model.new_weights:
            assert torch.equal(value, trained.state_dict()[name]), name
    inputs = torch.rand(5, 1, 8, 8)
    assert model(inputs).shape == (5, 3)
    assert torch.equal(model.forward_features(inputs), trained.forward_features(inputs))
    # As many classes as before are other classes all the same.
    again = load(folder, num_classes=10)
    assert not torch.equal(again.head.weight, trained.head.weight)


def test_heads_that_cannot_be_replaced(make_card: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'num_classes': 0"):
        load(make_card(), num_classes=0)
    with pytest.raises(TypeError, match="num_classes"):
        load(make_card("other"), num_classes="ten")  # type: ignore[arg-type]
    draw = DRAW((4, 4), glimpses=1, hidden_size=2, latent_size=2)
    folder = write_card(tmp_path / "draw", draw, RESULTS, preprocessing={})
    with pytest.raises(CardError, match=r"draw.*DRAW.*head"):
        load(folder, num_classes=3)


def test_altered_weights(make_card: Callable[..., Path]) -> None:
    folder = make_card()
    weights = folder / "model.safetensors"
    stated = json.loads((folder / "config.json").read_text())["files"]["model.safetensors"]
    content = bytearray(weights.read_bytes())
    content[-3] ^= 0x40
    weights.write_bytes(content)
    with pytest.raises(CardError) as caught:
        load(folder)
    message = str(caught.value)
    assert str(weights) in message
    assert stated["sha256"] in message
    assert hashlib.sha256(content).hexdigest() in message
    assert "fetch" in message


def test_truncated_and_missing_weights(make_card: Callable[..., Path]) -> None:
    folder = make_card()
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CardError, match=f"{size - 100} .*{size}"):
        load(folder)
    weights.unlink()
    with pytest.raises(CardError, match=r"model\.safetensors"):
        load(folder)


def test_a_pickle_in_place_of_the_weights_is_not_opened(
    make_card: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_card()
    mark = tmp_path / "executed"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (mark,))

    torch.save({"state_dict": Payload()}, folder / "model.safetensors")
    _state_digest_again(folder)
    with pytest.raises(CardError, match="safetensors"):
        load(folder)
    assert not mark.exists()


def _state_digest_again(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    edit(folder / "config.json", files={"model.safetensors": entry})


DOCTORED: list[dict[str, Any]] = [
    {"model": "os.system"},
    {"model": "doctored_module.Model"},
    {"model": "ln_zoo.models.MLPClassifier"},
    {"model": "LightningModule"},
    {"init_args": {"norm": {"class": "os.system", "init_args": {"command": "true"}}}},
    {"init_args": {"norm": {"class": "doctored_module.Norm", "init_args": {}}}},
    {"init_args": {"norm": {"class": "Norm", "init_args": {}}}},
    {"init_args": {"activation": {"class_path": "doctored_module.Norm", "init_args": {}}}},
    {"init_args": {"hidden_sizes": [{"class_path": "doctored_module.Norm"}]}},
]


@pytest.mark.parametrize("change", DOCTORED, ids=str)
def test_no_class_of_a_file_is_imported(
    make_card: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
) -> None:
    folder = make_card()
    config = json.loads((folder / "config.json").read_text())
    if "init_args" in change:
        change = {"init_args": config["init_args"] | change["init_args"]}
    edit(folder / "config.json", **change)
    (tmp_path / "doctored_module.py").write_text("class Norm: ...\nclass Model: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    executed: list[str] = []
    monkeypatch.setattr(os, "system", executed.append)

    with pytest.raises(CardError, match=r"import"):
        load(folder)
    assert "doctored_module" not in sys.modules
    assert executed == []


def test_unknown_arguments_and_values_out_of_range(make_card: Callable[..., Path]) -> None:
    folder = make_card()
    config = json.loads((folder / "config.json").read_text())

    def with_args(**changes: Any) -> None:
        edit(folder / "config.json", init_args=config["init_args"] | changes)

    with_args(hiden_sizes=[16])
    with pytest.raises(CardError, match=r"'hiden_sizes'.*hidden_sizes"):
        load(folder)
    with_args(norm={"class": "LayerNorm", "init_args": {"epsilon": 1e-5}})
    with pytest.raises(CardError, match=r"'epsilon'.*eps"):
        load(folder)
    with_args(activation="softsign")
    with pytest.raises(CardError, match="activation"):
        load(folder)


def test_parameter_count_and_shapes_are_checked(make_card: Callable[..., Path]) -> None:
    folder = make_card()
    config = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", parameters=config["parameters"] + 1)
    with pytest.raises(CardError, match=r"1,227 .*1,226"):
        load(folder)
    edit(folder / "config.json", parameters=config["parameters"])
    state = safetensors.torch.load_file(folder / "model.safetensors")
    state["network.1.weight"] = torch.zeros(16, 63)
    state["stray"] = torch.zeros(1)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    _state_digest_again(folder)
    with pytest.raises(CardError, match="stray") as caught:
        load(folder)
    assert "network.1.weight" in str(caught.value)


@pytest.mark.parametrize(
    "init_args",
    [
        {"hidden_sizes": [60_000, 60_000]},
        {"hidden_sizes": [1] * 200_000},
        {"hidden_sizes": [10**30]},
        {"hidden_sizes": [2**62]},
        {"hidden_sizes": [[]]},
        {"hidden_sizes": {"a": 1}},
        {"in_features": None},
        {"num_classes": 0.5},
        {"activation": []},
    ],
)
def test_no_memory_is_taken_for_a_model_that_the_weights_do_not_fit(
    make_card: Callable[..., Path], init_args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_card()
    config = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", init_args=config["init_args"] | init_args)
    devices = []
    build = Source.build

    def noted(source: Source) -> Any:
        devices.append(torch.empty(0).device.type)
        return build(source)

    monkeypatch.setattr(Source, "build", noted)
    start = time.process_time()
    with pytest.raises(CardError) as caught:
        load(folder)
    assert devices == ["meta"]
    assert time.process_time() - start < 5  # seconds; two hundred thousand layers take 25
    assert "Traceback" not in str(caught.value)


def test_a_norm_that_needs_numbers_to_be_built(make_card: Callable[..., Path]) -> None:
    """One of the user's own, which cannot be built where there are none."""

    @dataclass(frozen=True)
    class Counting(Doubling):
        def init_params(self, site: Site) -> None:
            super().init_params(site)
            assert site.gain.sum().item() > 0

    folder = make_card("model", Doubling())
    model = load(folder, norm=Counting())
    assert torch.equal(model.network[1].weight, tiny(Doubling()).network[1].weight)
    # One that can be built without numbers is held to the size of the weights.
    init_args = json.loads((folder / "config.json").read_text())["init_args"]
    edit(folder / "config.json", init_args=init_args | {"hidden_sizes": [1] * 20_000})
    with pytest.raises(CardError, match="far larger model"):
        load(folder, norm=Doubling())


def test_another_norm_goes_where_its_parameters_are_those_of_the_weights(
    make_card: Callable[..., Path],
) -> None:
    folder = make_card("own", Doubling())
    assert load(folder, norm=RMSNorm()).hparams["norm"]["class_path"].endswith("RMSNorm")
    with pytest.raises(CardError, match="parameters"):
        load(folder, norm=Identity())
