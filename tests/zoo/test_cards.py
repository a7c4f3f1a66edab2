"""Writing cards, from a module or from a checkpoint and its test run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from huggingface_hub import ModelCard
from zoo_support import PREPROCESSING, RESULTS, tiny

from ln_zoo.models import MLPClassifier, SkipThought
from ln_zoo.norms import Norm
from ln_zoo.zoo import CardError, card_from_checkpoint, catalog, load, render_card, write_card
from ln_zoo.zoo.cards import refresh


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# The four files


def test_config(make_card: Callable[..., Path]) -> None:
    folder = make_card()
    assert sorted(p.name for p in folder.iterdir()) == sorted(catalog.CARD_FILES)
    config = read(folder / "config.json")
    weights = (folder / "model.safetensors").read_bytes()
    assert config["model"] == "MLPClassifier"
    assert config["name"] == "mlp.layernorm"
    assert config["init_args"]["norm"] == {
        "class": "LayerNorm",
        "init_args": {"gain": 1.0, "eps": 1e-05, "convolution": "channel", "per_gate": False},
    }
    assert config["init_args"]["hidden_sizes"] == [16]
    assert config["preprocessing"] == PREPROCESSING
    assert config["parameters"] == 64 * 16 + 16 + 16 + 16 * 10 + 10
    assert config["files"] == {
        "model.safetensors": {
            "sha256": hashlib.sha256(weights).hexdigest(),
            "size": len(weights),
        }
    }
    assert "class_path" not in (folder / "config.json").read_text()


def test_weights_are_stored_in_the_smallest_exact_format(tmp_path: Path) -> None:
    def stored(model: MLPClassifier, name: str) -> dict[str, torch.Tensor]:
        folder = write_card(tmp_path / name, model, RESULTS, preprocessing={})
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


def test_results_take_sizes_from_the_model(make_card: Callable[..., Path]) -> None:
    results = read(make_card() / "results.json")
    assert results["metrics"] == RESULTS["metrics"]
    assert results["size"]["hidden_sizes"] == [16]
    assert "norm" not in results["size"]
    assert results["training"] == {
        "batch_size": 32,
        "lr": 1e-3,
        "epochs": 2,
        "steps": 20,
        "commands": ["ln-zoo fit --config mine.yaml"],
    }


def test_front_matter_equals_results(make_card: Callable[..., Path]) -> None:
    folder = make_card(card={"license": "mit", "datasets": ["someone/digits"], "tags": ["small"]})
    front = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    own = ["layer-normalization", "pytorch-lightning", "MLPClassifier", "LayerNorm"]
    expected = {
        "library_name": "ln-zoo",
        "pipeline_tag": "image-classification",
        "license": "mit",
        "datasets": ["someone/digits"],
        "tags": [*own, "small"],
    }
    assert {key: front[key] for key in expected} == expected
    (index,) = front["model-index"]
    assert index["name"] == "mlp.layernorm"
    (result,) = index["results"]
    assert result["task"]["type"] == "image-classification"
    assert result["dataset"] == {"type": "someone/digits", "name": "digits", "split": "test"}
    assert [(m["type"], m["value"]) for m in result["metrics"]] == [
        (metric["name"], metric["value"]) for metric in RESULTS["metrics"]
    ]
    # The hub's own reader finds the same.
    found = ModelCard.load(folder / "README.md").data.eval_results
    assert found is not None
    assert [(r.metric_type, r.metric_value) for r in found] == [("error", 0.0525), ("nll", 0.1875)]


def test_readme_says_what_a_reader_needs(make_card: Callable[..., Path]) -> None:
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
        "- norm: `LayerNorm(gain=1.0, eps=1e-05, convolution='channel', per_gate=False)`",
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


def test_render_is_a_function_of_the_two_data_files(make_card: Callable[..., Path]) -> None:
    folder = make_card()
    text = (folder / "README.md").read_text()
    assert render_card(folder) == text
    (folder / "README.md").unlink()
    (folder / "model.safetensors").unlink()
    assert render_card(folder) == text
    results = read(folder / "results.json")
    results["metrics"][0]["value"] = 0.04
    (folder / "results.json").write_text(json.dumps(results))
    assert "| 4 % ± 1 |" in render_card(folder)
    # Of the sentences of the task, whatever the test set.
    results["metrics"][0] |= {"name": "mr_fast", "value": 75.0, "unit": "%", "dataset": "MR"}
    (folder / "results.json").write_text(json.dumps(results))
    assert "| mr_fast | MR, test | 75 % ± 0.42 |" in render_card(folder)
    assert "trained on digits by ln_zoo" in render_card(folder)
    results["metrics"][0] |= {"name": "error", "value": 0.04, "unit": "fraction"}
    (folder / "results.json").write_text(json.dumps(results))
    refresh(folder)
    assert (folder / "README.md").read_text() == render_card(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_the_author_says(make_card: Callable[..., Path]) -> None:
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
    front = yaml.safe_load(text.split("---\n")[1])
    keys = ("license", "license_name", "license_link", "language")
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
    with pytest.raises(CardError, match="license_name and license_link"):
        refresh(folder, {"license": "other"})
    assert files_of(folder) == after


def test_optimizer_and_unknown_training_are_told(
    tested_checkpoint: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, results = tested_checkpoint
    tested = read(results)
    told = {
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.25}},
        "lr_scheduler": {"class_path": "CosineAnnealingLR", "init_args": {"T_max": 9}},
        "lr_scheduler_config": {"interval": "step", "frequency": 1},
    }
    for number, runs in enumerate(([], [{}], [{"dataset": "digits", "epochs": -1}])):
        results.write_text(json.dumps(tested | {"training_runs": runs, "optimization": told}))
        folder = card_from_checkpoint(checkpoint, results, tmp_path / str(number))
        training = read(folder / "results.json")["training"]
        assert training["optimizer"] == told["optimizer"]
        assert training["lr"] == 0.25
        assert training["lr_scheduler"]["interval"] == "step"
        assert not {"epochs", "steps", "earlier"} & training.keys()


# What must not happen


def test_a_card_is_replaced_only_when_asked(make_card: Callable[..., Path]) -> None:
    folder = make_card()
    before = files_of(folder)
    with pytest.raises(CardError, match="--overwrite"):
        make_card()
    assert files_of(folder) == before

    write_card(folder, tiny(seed=1), RESULTS, preprocessing={}, overwrite=True)
    assert (folder / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_other_files_and_folders_are_never_lost(
    make_card: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_card()
    (folder / "curves.png").write_bytes(b"precious")
    with pytest.raises(CardError, match=r"curves\.png"):
        write_card(folder, tiny(), RESULTS, preprocessing={}, overwrite=True)
    assert (folder / "curves.png").read_bytes() == b"precious"

    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("precious")
    with pytest.raises(CardError, match=f"{home}"):
        write_card(home, tiny(), RESULTS, preprocessing={}, overwrite=True)
    assert (home / "thesis.tex").read_text() == "precious"
    with pytest.raises(CardError, match=r"thesis\.tex"):
        write_card(home / "thesis.tex", tiny(), RESULTS, preprocessing={}, overwrite=True)


def test_a_failed_write_leaves_nothing_behind(
    make_card: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_card()
    before = files_of(folder)
    write_text = Path.write_text

    def full(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name == "README.md":
            raise OSError(28, "No space left on device")
        return write_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CardError, match="No space left"):
        write_card(folder, tiny(seed=1), RESULTS, preprocessing={}, overwrite=True)
    with pytest.raises(CardError, match="new"):
        write_card(folder.parent / "new", tiny(), RESULTS, preprocessing={})
    assert files_of(folder) == before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_killed_write_leaves_no_half_card(tmp_path: Path) -> None:
    """Killed at some moment of many rewrites, the folder still holds one whole card."""
    folder = tmp_path / "card"
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            for seed in itertools.count():
                write_card(folder, tiny(seed=seed), RESULTS, preprocessing={}, overwrite=True)
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


def test_values_that_cannot_be_stored(tmp_path: Path) -> None:
    infinite = [{**RESULTS["metrics"][0], "value": float("nan")}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"results": {**RESULTS, "metrics": infinite}}, "finite"),
        ({"preprocessing": {"mean": torch.zeros(2)}}, "finite"),
        ({"name": "-x y"}, "'-x y'"),
        ({"files": {"../b": Path(__file__)}}, r"'\.\./b'"),
    ]
    for change, message in cases:
        with pytest.raises(CardError, match=message):
            write_card(tmp_path / "a", tiny(), **{"results": RESULTS, "preprocessing": {}} | change)
    assert list(tmp_path.iterdir()) == []


def test_models_that_nobody_could_make_again(tmp_path: Path) -> None:
    class Forgetful(MLPClassifier):
        def __init__(self, width: int, norm: Norm | None = None) -> None:
            super().__init__(64, [width], 10, norm)
            del self.hparams["width"]

    with pytest.raises(CardError, match=r"Forgetful.*'width'.*save_hyperparameters"):
        write_card(tmp_path / "mine", Forgetful(8), RESULTS, preprocessing={})
    with pytest.raises(CardError, match=r"Linear.*ZooModule"):
        write_card(tmp_path / "mine", torch.nn.Linear(2, 2), RESULTS, preprocessing={})
    assert list(tmp_path.iterdir()) == []


# From a checkpoint


def test_card_from_checkpoint(tested_checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
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
    assert {m["name"]: m["value"] for m in stored["metrics"]} == {
        name.removeprefix("test_"): value for name, value in tested["metrics"].items()
    }
    assert [m["name"] for m in stored["metrics"]] == ["error", "nll"]
    assert {(m["dataset"], m["split"]) for m in stored["metrics"]} == {("digits", "test")}
    assert [m["unit"] for m in stored["metrics"] if m["name"] == "error"] == ["fraction"]
    assert stored["training"]["commands"] == ["ln-zoo fit"]
    assert stored["training"]["steps"] == 2
    assert stored["evaluation"]["command"] == "ln-zoo test --ckpt_path best.ckpt"
    assert stored["size"]["training_data"] == "eight rows"
    assert stored["card"] == {
        "license": "cc-by-4.0",
        "notes": ["trained in a test"],
        "differences": ["smaller"],
    }
    assert read(folder / "config.json")["preprocessing"] == PREPROCESSING
    assert read(folder / "config.json")["name"] == "mlp.tiny"


def test_pictures_travel_with_the_card(
    tested_checkpoint: tuple[Path, Path], tmp_path: Path
) -> None:
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
    with pytest.raises(CardError, match=r"samples\.png"):
        load(folder)
    with pytest.raises(CardError, match=r"no such"):
        card_from_checkpoint(
            *tested_checkpoint, tmp_path / "b", facts={"pictures": {"no such.png": "a"}}
        )


def test_statistics_of_the_population_are_told(
    tested_checkpoint: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, results = tested_checkpoint
    told = {"method": "average", "batch_size": 1000, "examples": 50_000}
    text = '{"method": "average", "batch_size": 1000, "examples": 50000}'
    for name, value in (("none", None), ("told", told)):
        results.write_text(json.dumps(read(results) | {"population_statistics": value}))
        folder = card_from_checkpoint(checkpoint, results, tmp_path / name)
        evaluation = read(folder / "results.json")["evaluation"]
        assert evaluation.get("population_statistics") == value
        lines = (folder / "README.md").read_text().splitlines()
        assert (f"- population_statistics: `{text}`" in lines) == bool(value)
        load(folder)


def test_facts_may_be_json_or_nothing(tested_checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"notes": ["from JSON"]}))
    folder = card_from_checkpoint(*tested_checkpoint, tmp_path / "a", facts=facts, name="b")
    assert catalog.read_card(folder).results.card == {"notes": ["from JSON"]}
    assert catalog.read_card(folder).name == "b"
    bare = card_from_checkpoint(*tested_checkpoint, tmp_path / "c")
    assert "license: apache-2.0" in (bare / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": "last.ckpt"}, r"'last\.ckpt'.*'best\.ckpt'"),
        ({"checkpoint_sha256": "0" * 64}, r"sha256.*best\.ckpt"),
        (
            {"norm": "BatchNorm"},
            r"BatchNorm.*LayerNorm",
        ),
        ({"metrics": {}}, "metrics"),
        ({"metrics": None}, r"metrics.*None"),
        ({"checkpoint": None}, r"checkpoint None"),
        ({"training_runs": 3}, r"training_runs.* 3"),
        ({"data": {"batch_size": 4}}, r"data.*'dataset'"),
        ({"population_statistics": "average"}, r"population_statistics.*'average'"),
        (
            {"part": {"batches": 1, "of_batches": 2, "examples": 4}},
            "limit_test_batches",
        ),
    ],
)
def test_results_of_another_run_are_refused(
    tested_checkpoint: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    checkpoint, results = tested_checkpoint
    results.write_text(json.dumps(read(results) | change))
    with pytest.raises(CardError, match=message):
        card_from_checkpoint(checkpoint, results, tmp_path / "card")
    assert not (tmp_path / "card").exists()


def test_bad_files_are_named(tested_checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, results = tested_checkpoint
    out = tmp_path / "card"
    with pytest.raises(CardError, match=r"gone\.ckpt"):
        card_from_checkpoint(tmp_path / "gone.ckpt", results, out)
    with pytest.raises(CardError, match=r"gone\.json"):
        card_from_checkpoint(checkpoint, tmp_path / "gone.json", out)
    with pytest.raises(CardError, match=r"'licence'.*license"):
        card_from_checkpoint(checkpoint, results, out, facts={"licence": "mit"})
    with pytest.raises(CardError, match=r"notes.*list.*'one'"):
        card_from_checkpoint(checkpoint, results, out, facts={"notes": "one"})
    with pytest.raises(CardError, match="main_metric 'loss'"):
        card_from_checkpoint(checkpoint, results, out, facts={"main_metric": "loss"})
    short = tmp_path / "cut" / "best.ckpt"
    short.parent.mkdir()
    short.write_bytes(checkpoint.read_bytes()[:2000])
    with pytest.raises(CardError, match=r"cut/best\.ckpt"):
        card_from_checkpoint(short, results, out)
    results.write_text("[1, 2]")
    with pytest.raises(CardError, match=r"test_results\.json"):
        card_from_checkpoint(checkpoint, results, out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_path": "subprocess.Popen"}, r"best\.ckpt.*subprocess\.Popen"),
        ({"_class_path": None}, r"best\.ckpt"),
        ({"hidden_sizes": [17]}, "hidden_sizes|network"),
    ],
)
def test_foreign_checkpoints_are_refused(
    tested_checkpoint: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    checkpoint, results = tested_checkpoint
    content = torch.load(checkpoint, weights_only=True)
    stored = content["hyper_parameters"] | change
    content["hyper_parameters"] = {k: v for k, v in stored.items() if k not in change or v}
    torch.save(content, checkpoint)
    with pytest.raises(CardError, match=message):
        card_from_checkpoint(checkpoint, results, tmp_path / "card")


def test_words_are_a_file_of_the_card(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(40)] + ["été"]
    torch.manual_seed(0)
    model = SkipThought(words, hidden_size=4, embedding_features=3).eval()
    folder = write_card(tmp_path / "skip.test", model, RESULTS, preprocessing={})
    assert (folder / "vocabulary.txt").read_text(encoding="utf-8").splitlines() == words
    for name in ("config.json", "results.json", "README.md"):
        assert "w39" not in (folder / name).read_text(encoding="utf-8"), name
    assert json.loads((folder / "results.json").read_text())["size"]["vocab_size"] == 43
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert "- vocabulary: vocabulary.txt" in readme
    assert "model.encode(sentences)" in readme

    loaded = load(folder)
    assert isinstance(loaded, SkipThought)
    assert list(loaded.vocabulary) == words
    assert (loaded.encode(["w3 été"]) == model.encode(["w3 été"])).all()

    # A card may name no file but its own.
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "secret.txt").write_text("".join(word + "\n" for word in words))
    config["init_args"]["vocabulary"] = str(tmp_path / "secret.txt")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CardError, match=r"secret\.txt"):
        load(folder)
