"""Loading published models, and refusing what is damaged or foreign."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from zoo_support import RESULTS, Doubling, MakeCard, Tested, edit, read, refuses, save, tiny

from ln_zoo.models import DRAW
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, Site, WeightNorm
from ln_zoo.zoo import catalog, load, loading
from ln_zoo.zoo.loading import Source


def edit_arguments(folder: Path, **changes: Any) -> None:
    edit(folder / "config.json", init_args=read(folder / "config.json")["init_args"] | changes)


@pytest.mark.parametrize(
    "norm", [LayerNorm(eps=1e-3), BatchNorm(unbiased=True), WeightNorm(), Identity(), RMSNorm()]
)
def test_the_loaded_model_is_the_saved_one(make_card: MakeCard, norm: Norm) -> None:
    folder = make_card("model", norm)
    before = torch.get_rng_state()
    model = load(folder)
    assert torch.equal(torch.get_rng_state(), before)

    expected = tiny(norm)
    assert type(model) is type(expected)
    assert model.hparams == expected.hparams
    assert not model.training
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    inputs = torch.rand(5, 1, 8, 8)
    assert torch.equal(model(inputs), expected.eval()(inputs))
    assert model.card.preprocessing == {"scale": 16, "image_shape": [1, 8, 8]}


def test_names_folders_and_strings(models_folder: Path, tmp_path: Path, monkeypatch) -> None:
    folder = models_folder / "mlp.none"
    for given in ("mlp.none", folder, str(folder)):
        assert load(given).card.folder == folder
    monkeypatch.chdir(models_folder)
    for given in ("./mlp.none", Path("mlp.none")):
        assert load(given).card.folder == Path("mlp.none")
    monkeypatch.chdir(models_folder.parent)
    # A folder that exists goes before a hub repository of the same spelling.
    assert load("cards/mlp.none").card.folder == Path("cards/mlp.none")


#: Names of version 0.1 by the present ones.
FORMER = {"hidden_sizes": "hidden_features", "sync": "across_processes"}


def former(init_args: dict[str, Any]) -> dict[str, Any]:
    norm = init_args["norm"]
    norm["init_args"] = {FORMER.get(k, k): v for k, v in norm["init_args"].items()}
    return {FORMER.get(name, name): value for name, value in init_args.items()}


def test_a_card_of_version_0_1(make_card: MakeCard) -> None:
    folder = make_card("model", BatchNorm(sync=True))
    edit(folder / "config.json", init_args=former(read(folder / "config.json")["init_args"]))
    model = load(folder)
    assert model.hparams["norm"]["init_args"]["sync"] is True
    assert model.hparams["hidden_sizes"] == [16]


def test_a_checkpoint_of_version_0_1(tested_checkpoint: Tested) -> None:
    path, _ = tested_checkpoint
    checkpoint = torch.load(path, weights_only=True)
    expected = load(path)
    checkpoint["hyper_parameters"] = former(checkpoint["hyper_parameters"])
    assert "hidden_sizes" not in checkpoint["hyper_parameters"]
    torch.save(checkpoint, path)
    model = load(path)
    assert dict(model.hparams) == dict(expected.hparams)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_classes_of_users_keep_the_names_of_version_0_1() -> None:
    own = {"bound": 1, "norm": {"class_path": "mine.Norm", "init_args": {"across_processes": True}}}
    assert loading._renamed("mine.Model", own) == own


def test_missing_folders_and_misplaced_arguments(models_folder: Path) -> None:
    for folder in (models_folder / "gone", "./gone"):
        refuses("there is no card folder", load, folder)
    refuses(r"mlp\.layernorm", load, "mlp.layernrm")
    refuses(r"mlp\.none.*'v1'", load, "mlp.none", revision="v1")


def test_versions_of_weights(models_folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Two folders of one name, as where a newer ln_zoo brings other weights."""
    newer = {**RESULTS, "card": {"version": "2"}}
    save(tmp_path / "shipped/mlp.none", tiny(seed=1), newer)
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
    refuses(r"'3'.*none \(sha256 \w{8}\.{3}\), .*\(version 2", load, "mlp.none@3")
    refuses("version", load, "mlp.none", revision=first.digest[:7])
    refuses("version", load, first.folder, revision=second.digest)
    refuses(r"'2'.*revision='3'", load, "mlp.none@2", revision="3")
    refuses("revision", load, "mlp.none@")


@pytest.mark.parametrize("norm", [LayerNorm(), BatchNorm()])
def test_a_head_for_other_classes(make_card: MakeCard, norm: Norm) -> None:
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


def test_heads_that_cannot_be_replaced(make_card: MakeCard, tmp_path: Path) -> None:
    refuses("num_classes .*0", load, make_card(), num_classes=0, error=ValueError)
    refuses("num_classes", load, make_card("other"), num_classes="ten", error=TypeError)
    draw = DRAW((4, 4), glimpses=1, hidden_size=2, latent_size=2)
    folder = save(tmp_path / "draw", draw)
    refuses(r"draw.*DRAW.*head", load, folder, num_classes=3)


def test_altered_truncated_and_missing_weights(make_card: MakeCard) -> None:
    folder = make_card()
    weights = folder / "model.safetensors"
    stated = read(folder / "config.json")["files"]["model.safetensors"]
    content = bytearray(weights.read_bytes())
    content[-3] ^= 0x40
    weights.write_bytes(content)
    message = refuses("fetch", load, folder)
    for part in (str(weights), stated["sha256"], hashlib.sha256(content).hexdigest()):
        assert part in message
    weights.write_bytes(content[:-100])
    refuses(f"{len(content) - 100} .*{len(content)}", load, folder)
    weights.unlink()
    refuses(r"model\.safetensors", load, folder)


def test_a_pickle_in_place_of_the_weights_is_not_opened(
    make_card: MakeCard, tmp_path: Path
) -> None:
    folder, mark = make_card(), tmp_path / "executed"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (mark,))

    torch.save({"state_dict": Payload()}, folder / "model.safetensors")
    _state_digest_again(folder)
    refuses("safetensors", load, folder)
    assert not mark.exists()


def _state_digest_again(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    edit(folder / "config.json", files={"model.safetensors": entry})


DOCTORED: list[dict[str, Any]] = [
    {"model": "os.system"},
    {"model": "doctored_module.Model"},
    {"model": "LightningModule"},
    {"init_args": {"norm": {"class": "os.system", "init_args": {"command": "true"}}}},
    {"init_args": {"norm": {"class": "doctored_module.Norm", "init_args": {}}}},
    {"init_args": {"norm": {"class": "Norm", "init_args": {}}}},
    {"init_args": {"activation": {"class_path": "doctored_module.Norm", "init_args": {}}}},
    {"init_args": {"hidden_sizes": [{"class_path": "doctored_module.Norm"}]}},
]


@pytest.mark.parametrize("change", DOCTORED, ids=str)
def test_no_class_of_a_file_is_imported(
    make_card: MakeCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    folder = make_card()
    if "init_args" in change:
        edit_arguments(folder, **change["init_args"])
    else:
        edit(folder / "config.json", **change)
    (tmp_path / "doctored_module.py").write_text("class Norm: ...\nclass Model: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    executed: list[str] = []
    monkeypatch.setattr(os, "system", executed.append)

    refuses(r"doctored_module|os\.system|LightningModule|Norm", load, folder)
    assert "doctored_module" not in sys.modules
    assert executed == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden_sizes": [16]}, r"'hiden_sizes'.*hidden_sizes"),
        ({"norm": {"class": "LayerNorm", "init_args": {"epsilon": 1e-5}}}, r"'epsilon'.*eps"),
        ({"activation": "softsign"}, "activation"),
    ],
)
def test_unknown_arguments_and_values_out_of_range(
    make_card: MakeCard, changes: dict[str, Any], message: str
) -> None:
    folder = make_card()
    edit_arguments(folder, **changes)
    refuses(message, load, folder)


def test_parameter_count_and_shapes_are_checked(make_card: MakeCard) -> None:
    folder = make_card()
    edit(folder / "config.json", parameters=1227)
    refuses(r"1,227 .*1,226", load, folder)
    edit(folder / "config.json", parameters=1226)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    state["network.1.weight"] = torch.zeros(16, 63)
    state["stray"] = torch.zeros(1)
    safetensors.torch.save_file(state, folder / "model.safetensors")
    _state_digest_again(folder)
    assert "network.1.weight" in refuses("stray", load, folder)


@pytest.mark.parametrize(
    "init_args",
    [
        *({"hidden_sizes": sizes} for sizes in ([60_000, 60_000], [1] * 200_000, [10**30])),
        *({"hidden_sizes": sizes} for sizes in ([2**62], [[]], {"a": 1})),
        {"in_features": None},
        {"num_classes": 0.5},
        {"activation": []},
    ],
)
def test_no_memory_is_taken_for_a_model_that_the_weights_do_not_fit(
    make_card: MakeCard, init_args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_card()
    edit_arguments(folder, **init_args)
    devices = []
    build = Source.build

    def noted(source: Source) -> Any:
        devices.append(torch.empty(0).device.type)
        return build(source)

    monkeypatch.setattr(Source, "build", noted)
    start = time.process_time()
    assert "Traceback" not in refuses(".", load, folder)
    assert set(devices) <= {"meta"}
    assert time.process_time() - start < 5  # seconds; two hundred thousand layers take 25


def test_a_norm_that_needs_numbers_to_be_built(make_card: MakeCard) -> None:
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
    edit_arguments(folder, hidden_sizes=[1] * 9_000)
    refuses("far larger model", load, folder, norm=Doubling())


def test_another_norm_goes_where_its_parameters_are_those_of_the_weights(
    make_card: MakeCard,
) -> None:
    folder = make_card("own", Doubling())
    assert load(folder, norm=RMSNorm()).hparams["norm"]["class_path"].endswith("RMSNorm")
    refuses("parameters", load, folder, norm=Identity())
