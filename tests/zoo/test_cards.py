"""Writing cards, from a module or from a checkpoint and its test run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import time
from math import nan
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from huggingface_hub import ModelCard
from zoo_support import PREPROCESSING, RESULTS, MakeCard, Tested, edit, read, refuses, save, tiny

from ln_zoo.models import MLPClassifier, SkipThought
from ln_zoo.norms import Norm
from ln_zoo.zoo import card_from_checkpoint, catalog, load, render_card
from ln_zoo.zoo.publishing import publish, refresh

# The four files


def front_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_config(make_card: MakeCard) -> None:
    folder = make_card()
    assert sorted(p.name for p in folder.iterdir()) == sorted(catalog.CARD_FILES)
    config = read(folder / "config.json")
    weights = (folder / "model.safetensors").read_bytes()
    assert (config["model"], config["name"]) == ("MLPClassifier", "mlp.layernorm")
    options = {"gain": 1.0, "eps": 1e-05, "convolution": "channel"}
    options |= {"per_gate": False, "per_block": False}
    assert config["init_args"]["norm"] == {"class": "LayerNorm", "init_args": options}
    assert config["init_args"]["hidden_sizes"] == [16]
    assert config["preprocessing"] == PREPROCESSING
    assert config["parameters"] == 64 * 16 + 16 + 16 + 16 * 10 + 10
    stated = {"sha256": hashlib.sha256(weights).hexdigest(), "size": len(weights)}
    assert config["files"] == {"model.safetensors": stated}
    assert "class_path" not in (folder / "config.json").read_text()


def test_weights_are_stored_in_the_smallest_exact_format(tmp_path: Path) -> None:
    def stored(model: MLPClassifier, name: str) -> dict[str, torch.Tensor]:
        folder = save(tmp_path / name, model)
        loaded = load(folder).state_dict()
        assert all(torch.equal(loaded[k], v.float()) for k, v in model.state_dict().items())
        return safetensors.torch.load_file(folder / "model.safetensors")

    model = tiny().double()
    assert {value.dtype for value in stored(model, "wide").values()} == {torch.float32}
    assert next(model.parameters()).dtype == torch.float64
    for parameter in model.parameters():
        parameter.data = parameter.half().float()
    assert {value.dtype for value in stored(model, "small").values()} == {torch.float16}
    next(model.parameters()).data[0, 0] += 1e-7
    assert {value.dtype for value in stored(model, "exact").values()} == {torch.float32}


def test_results_take_sizes_from_the_model(make_card: MakeCard) -> None:
    results = read(make_card() / "results.json")
    assert results["metrics"] == RESULTS["metrics"]
    assert results["size"]["hidden_sizes"] == [16]
    assert "norm" not in results["size"]
    assert results["training"] == {"batch_size": 32, "lr": 1e-3} | RESULTS["training"]


def test_front_matter_equals_results(make_card: MakeCard) -> None:
    folder = make_card(card={"license": "mit", "datasets": ["someone/digits"], "tags": ["small"]})
    front = front_of(folder)
    own = ["layer-normalization", "pytorch-lightning", "MLPClassifier", "LayerNorm"]
    expected = {"library_name": "ln-zoo", "pipeline_tag": "image-classification", "license": "mit"}
    expected |= {"datasets": ["someone/digits"], "tags": [*own, "small"]}
    assert {key: front[key] for key in expected} == expected
    (index,) = front["model-index"]
    assert index["name"] == "mlp.layernorm"
    (result,) = index["results"]
    assert result["task"]["type"] == "image-classification"
    assert result["dataset"] == {"type": "someone/digits", "name": "digits", "split": "test"}
    metrics = [("error", 0.0525), ("nll", 0.1875)]
    assert [(m["type"], m["value"]) for m in result["metrics"]] == metrics
    # The hub's own reader finds the same.
    found = ModelCard.load(folder / "README.md").data.eval_results
    assert [(r.metric_type, r.metric_value) for r in found] == metrics


def test_readme_says_what_a_reader_needs(make_card: MakeCard) -> None:
    text = (make_card() / "README.md").read_text()
    for line in (
        'model = ln_zoo.load("mlp.layernorm")',
        "- scale: divide stored values by `16`",
        "images = torch.rand(2, 1, 8, 8)",
        "ln-zoo test --weights mlp.layernorm",
        "ln-zoo fit --config mine.yaml",
        "- hardware: 2 CPU cores",
        "- seed of the test: `3`",
        "- versions: torch 2.13.0, lightning 2.6.6",
        "- other data",
        "- a model for tests",
        "- norm: `LayerNorm(gain=1.0, eps=1e-05, convolution='channel', per_gate=False, "
        "per_block=False)`",
        "1,226 parameters",
        "https://arxiv.org/abs/1607.06450",
    ):
        assert line in text, line
    (row,) = [line for line in text.splitlines() if line.startswith("| error |")]
    # sqrt(0.0525 * 0.9475 / 359)
    assert row == "| error | digits, test | 5.25 % ± 1.2 |"
    assert "| nll | digits, test | 0.1875 nats |" in text
    assert "--ckpt_path" not in text
    assert "datasets:" not in text  # "digits" is not an id of the hub
    assert "@misc{ba2016," in text


def test_render_is_a_function_of_the_two_data_files(make_card: MakeCard) -> None:
    folder = make_card()
    text = (folder / "README.md").read_text()
    (folder / "model.safetensors").unlink()
    (folder / "README.md").unlink()
    assert render_card(folder) == text
    results = read(folder / "results.json")

    def rendered(**metric: Any) -> str:
        results["metrics"][0] |= metric
        (folder / "results.json").write_text(json.dumps(results))
        return render_card(folder)

    assert "| 4 % ± 1 |" in rendered(value=0.04)
    # Of the task's sentences, for any test set.
    text = rendered(name="mr_fast", value=75.0, unit="%", dataset="MR")
    assert "| mr_fast | MR, test | 75 % ± 0.42 |" in text
    assert "trained on digits by ln_zoo" in text
    text = rendered(name="error", value=0.04, unit="fraction")
    refresh(folder)
    assert (folder / "README.md").read_text() == text


def test_what_the_author_says(make_card: MakeCard) -> None:
    facts = {
        "license": "other",
        "license_name": "for-research",
        "license_link": "https://example.org/terms",
        "language": "en",
        "intended_use": "Tests.",
        "limitations": ["It knows nothing."],
        "uncertainty": "one seed.",
        "training_time": "a second",
        "training_commands": ["ln-zoo fit --config yours.yaml"],
    }
    folder = make_card()
    before = files_of(folder)
    refresh(folder, facts)
    text = (folder / "README.md").read_text()
    front, keys = front_of(folder), ("license", "license_name", "license_link", "language")
    assert [front[key] for key in keys] == [facts[key] for key in keys]
    for line in (
        "## Intended use\n\nTests.\n",
        "## Limitations\n\n- It knows nothing.\n",
        "Uncertainty: one seed.\n",
        "- time: a second\n",
        "ln-zoo fit --config yours.yaml\n",
    ):
        assert line in text, line
    after = files_of(folder)
    assert {name for name in after if after[name] != before[name]} == {"README.md", "results.json"}
    assert read(folder / "results.json")["metrics"] == RESULTS["metrics"]
    refuses("license_name and license_link", refresh, folder, {"license": "other"})
    assert files_of(folder) == after


@pytest.mark.parametrize("runs", [[], [{}], [{"dataset": "digits", "epochs": -1}]], ids=str)
def test_optimizer_and_unknown_training_are_told(
    tested_checkpoint: Tested, tmp_path: Path, runs: list[dict[str, Any]]
) -> None:
    told = {
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.25}},
        "lr_scheduler": {"class_path": "CosineAnnealingLR", "init_args": {"T_max": 9}},
        "lr_scheduler_config": {"interval": "step", "frequency": 1},
    }
    edit(tested_checkpoint[1], training_runs=runs, optimization=told)
    folder = card_from_checkpoint(*tested_checkpoint, tmp_path / "card")
    training = read(folder / "results.json")["training"]
    assert (training["optimizer"], training["lr"]) == (told["optimizer"], 0.25)
    assert training["lr_scheduler"]["interval"] == "step"
    assert not {"epochs", "steps", "earlier"} & training.keys()


# What must not happen


def test_a_card_is_replaced_only_when_asked(make_card: MakeCard) -> None:
    folder = make_card()
    before = files_of(folder)
    refuses("--overwrite", make_card)
    assert files_of(folder) == before

    save(folder, tiny(seed=1), overwrite=True)
    assert (folder / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_other_files_and_folders_are_never_lost(make_card: MakeCard, tmp_path: Path) -> None:
    folder = make_card()
    (folder / "curves.png").write_bytes(b"precious")
    refuses(r"curves\.png", save, folder, tiny(), overwrite=True)
    assert (folder / "curves.png").read_bytes() == b"precious"

    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("precious")
    refuses(f"{home}", save, home, tiny(), overwrite=True)
    assert (home / "thesis.tex").read_text() == "precious"
    refuses(r"thesis\.tex", save, home / "thesis.tex", tiny(), overwrite=True)


def test_a_failed_write_leaves_nothing_behind(make_card: MakeCard, monkeypatch) -> None:
    folder = make_card()
    before = files_of(folder)
    write_text = Path.write_text

    def full(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name == "README.md":
            raise OSError(28, "No space left on device")
        return write_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    refuses("No space left", save, folder, tiny(seed=1), overwrite=True)
    refuses("new", save, folder.parent / "new", tiny())
    assert files_of(folder) == before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_killed_write_leaves_no_half_card(tmp_path: Path) -> None:
    """Killed at some moment of many rewrites, the folder still holds one whole card."""
    folder = tmp_path / "card"
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            for seed in itertools.count():
                save(folder, tiny(seed=seed), overwrite=True)
        os._exit(1)
    while not folder.exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    # Between the two renames of a swap the old card lies under its hidden name.
    candidates = [folder] if folder.exists() else []
    candidates = candidates or list(tmp_path.glob(".card-old-*"))
    load(candidates[0])


class Forgetful(MLPClassifier):
    """A model whose argument is not in its hyperparameters."""

    def __init__(self, width: int, norm: Norm | None = None) -> None:
        super().__init__(64, [width], 10, norm)
        del self.hparams["width"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"results": RESULTS | {"metrics": [RESULTS["metrics"][0] | {"value": nan}]}}, "finite"),
        ({"preprocessing": {"mean": torch.zeros(2)}}, "finite"),
        ({"name": "-x y"}, "'-x y'"),
        ({"files": {"../b": Path(__file__)}}, r"'\.\./b'"),
        ({"model": Forgetful(8)}, r"Forgetful.*'width'.*save_hyperparameters"),
        ({"model": torch.nn.Linear(2, 2)}, r"Linear.*ZooModule"),
    ],
)
def test_what_cannot_be_stored_or_made_again(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    refuses(message, save, tmp_path / "a", **{"model": tiny()} | change)
    assert list(tmp_path.iterdir()) == []


# From a checkpoint


def test_card_from_checkpoint(tested_checkpoint: Tested, tmp_path: Path) -> None:
    checkpoint, results = tested_checkpoint
    facts = tmp_path / "facts.yaml"
    facts.write_text(
        "license: cc-by-4.0\nnotes: [trained in a test]\ntraining_commands: [ln-zoo fit]\n"
        "differences: [smaller]\nsize: {training_data: eight rows}\nmain_metric: error\n"
    )
    folder = card_from_checkpoint(checkpoint, results, tmp_path / "mlp.tiny", facts=facts)

    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    model = load(folder)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    stored, tested = read(folder / "results.json"), read(results)
    assert {f"test_{m['name']}": m["value"] for m in stored["metrics"]} == tested["metrics"]
    assert [m["name"] for m in stored["metrics"]] == ["error", "nll"]
    assert {(m["dataset"], m["split"]) for m in stored["metrics"]} == {("digits", "test")}
    assert stored["metrics"][0]["unit"] == "fraction"
    training = stored["training"]
    assert (training["commands"], training["steps"]) == (["ln-zoo fit"], 2)
    assert stored["evaluation"]["command"] == "ln-zoo test --ckpt_path best.ckpt"
    assert stored["size"]["training_data"] == "eight rows"
    words = {"notes": ["trained in a test"], "differences": ["smaller"]}
    assert stored["card"] == {"license": "cc-by-4.0"} | words
    config = read(folder / "config.json")
    assert (config["preprocessing"], config["name"]) == (PREPROCESSING, "mlp.tiny")


def test_pictures_travel_with_the_card(tested_checkpoint: Tested, tmp_path: Path) -> None:
    (tmp_path / "drawn").mkdir()
    picture = tmp_path / "drawn" / "samples.png"
    picture.write_bytes(b"a picture")
    facts = {"pictures": {str(picture): "Lines that were written."}}
    folder = card_from_checkpoint(*tested_checkpoint, tmp_path / "a", facts=facts)
    assert (folder / "samples.png").read_bytes() == b"a picture"
    assert "![Lines that were written.](samples.png)" in (folder / "README.md").read_text()
    assert "samples.png" in read(folder / "config.json")["files"]
    assert str(tmp_path) not in (folder / "results.json").read_text()
    load(folder)
    # As any file of the card it is checked.
    (folder / "samples.png").write_bytes(b"another one")
    refuses(r"samples\.png", load, folder)
    facts = {"pictures": {"no such.png": "a"}}
    refuses("no such", card_from_checkpoint, *tested_checkpoint, tmp_path / "b", facts=facts)


@pytest.mark.parametrize(
    "stated", [None, {"method": "average", "batch_size": 1000, "examples": 50000}]
)
def test_statistics_of_the_population_are_told(
    tested_checkpoint: Tested, tmp_path: Path, stated: dict[str, Any] | None
) -> None:
    edit(tested_checkpoint[1], population_statistics=stated)
    folder = card_from_checkpoint(*tested_checkpoint, tmp_path / "card")
    evaluation = read(folder / "results.json")["evaluation"]
    assert evaluation.get("population_statistics") == stated
    lines = (folder / "README.md").read_text().splitlines()
    assert (f"- population_statistics: `{json.dumps(stated)}`" in lines) == bool(stated)
    load(folder)


def test_facts_may_be_json_or_nothing(tested_checkpoint: Tested, tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"notes": ["from JSON"]}))
    folder = card_from_checkpoint(*tested_checkpoint, tmp_path / "a", facts=facts, name="b")
    assert catalog.read_card(folder).results.card == {"notes": ["from JSON"]}
    assert catalog.read_card(folder).name == "b"
    bare = card_from_checkpoint(*tested_checkpoint, tmp_path / "c")
    assert "license:" not in (bare / "README.md").read_text()
    refuses(["c", "license", "--facts"], publish, str(bare), "someone/c", dry_run=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": "last.ckpt"}, r"'last\.ckpt'.*'best\.ckpt'"),
        ({"checkpoint_sha256": "0" * 64}, r"sha256.*best\.ckpt"),
        ({"norm": "BatchNorm"}, r"BatchNorm.*LayerNorm"),
        ({"metrics": {}}, "metrics"),
        ({"metrics": None}, r"metrics.*None"),
        ({"checkpoint": None}, r"checkpoint None"),
        ({"training_runs": 3}, r"training_runs.* 3"),
        ({"data": {"batch_size": 4}}, r"data.*'dataset'"),
        ({"population_statistics": "average"}, r"population_statistics.*'average'"),
        ({"part": {"batches": 1, "of_batches": 2, "examples": 4}}, "limit_test_batches"),
    ],
)
def test_results_of_another_run_are_refused(
    tested_checkpoint: Tested, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    edit(tested_checkpoint[1], **change)
    refuses(message, card_from_checkpoint, *tested_checkpoint, tmp_path / "card")
    assert not (tmp_path / "card").exists()


def test_bad_files_are_named(tested_checkpoint: Tested, tmp_path: Path) -> None:
    checkpoint, results = tested_checkpoint

    def refuses_files(message: str, checkpoint: Path, results: Path, **facts: Any) -> None:
        given = {"facts": facts} if facts else {}
        refuses(message, card_from_checkpoint, checkpoint, results, tmp_path / "card", **given)

    refuses_files(r"gone\.ckpt", tmp_path / "gone.ckpt", results)
    refuses_files(r"gone\.json", checkpoint, tmp_path / "gone.json")
    refuses_files(r"'licence'.*license", checkpoint, results, licence="mit")
    refuses_files(r"notes.*list.*'one'", checkpoint, results, notes="one")
    refuses_files("main_metric 'loss'", checkpoint, results, main_metric="loss")
    short = tmp_path / "cut" / "best.ckpt"
    short.parent.mkdir()
    short.write_bytes(checkpoint.read_bytes()[:2000])
    refuses_files(r"cut/best\.ckpt", short, results)
    results.write_text("[1, 2]")
    refuses_files(r"test_results\.json", checkpoint, results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_path": "subprocess.Popen"}, r"best\.ckpt.*subprocess\.Popen"),
        ({"_class_path": None}, r"best\.ckpt"),
        ({"hidden_sizes": [17]}, "hidden_sizes|network"),
    ],
)
def test_foreign_checkpoints_are_refused(
    tested_checkpoint: Tested, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    checkpoint, results = tested_checkpoint
    content = torch.load(checkpoint, weights_only=True)
    stored = content["hyper_parameters"] | change
    content["hyper_parameters"] = {k: v for k, v in stored.items() if k not in change or v}
    torch.save(content, checkpoint)
    refuses(message, card_from_checkpoint, checkpoint, results, tmp_path / "card")


def test_words_are_a_file_of_the_card(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(40)] + ["été"]
    torch.manual_seed(0)
    model = SkipThought(words, hidden_size=4, embedding_features=3).eval()
    folder = save(tmp_path / "skip.test", model)
    assert (folder / "vocabulary.txt").read_text(encoding="utf-8").splitlines() == words
    for name in ("config.json", "results.json", "README.md"):
        assert "w39" not in (folder / name).read_text(encoding="utf-8"), name
    assert read(folder / "results.json")["size"]["vocab_size"] == 43
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert "- vocabulary: vocabulary.txt" in readme
    assert "model.encode(sentences)" in readme

    loaded = load(folder)
    assert isinstance(loaded, SkipThought)
    assert list(loaded.vocabulary) == words
    assert (loaded.encode(["w3 été"]) == model.encode(["w3 été"])).all()

    # A card may name no file but its own.
    (tmp_path / "secret.txt").write_text("".join(word + "\n" for word in words))
    arguments = read(folder / "config.json")["init_args"]
    stolen = arguments | {"vocabulary": str(tmp_path / "secret.txt")}
    edit(folder / "config.json", init_args=stolen)
    refuses(r"secret\.txt", load, folder)
