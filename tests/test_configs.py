"""Every configuration that ships is one that runs, and norms bring only what is theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from cli_support import CONFIGS, QUIET
from jsonargparse import Namespace

from ln_zoo import norms
from ln_zoo.cli.lightning import ZooCLI
from ln_zoo.models import MLPClassifier, ZooModule
from ln_zoo.norms import BatchNorm, Norm

#: Facts for model cards, and what is laid over a model's file: neither is a run by itself.
RUNS = sorted(
    path
    for path in CONFIGS.rglob("*.yaml")
    if path.relative_to(CONFIGS).parts[0] not in ("cards", "norms", "protocol")
)
OVERLAYS = sorted((CONFIGS / "norms").glob("*.yaml"))
#: The base configuration of each model, over which norms are laid. Fine-tuning has its test in
#: `cli/test_guides.py`.
BASES = [path for path in RUNS if path.parent.name not in ("configs", "fine_tune")]
NORMS = {
    "batch": norms.BatchNorm, "layer": norms.LayerNorm, "none": norms.Identity,
    "rms": norms.RMSNorm, "weight": norms.WeightNorm,
}  # fmt: skip


def name(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


@pytest.fixture(autouse=True)
def _surroundings(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own; no dataset of the machine's is looked at."""
    monkeypatch.delenv("LN_ZOO_DATA", raising=False)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # set again by each command, and put back


def build(*argv: str | Path) -> ZooCLI:
    return ZooCLI(["fit", *map(str, argv), "--trainer.logger=false"])


def sketch(path: Path, *argv: str | Path) -> ZooCLI:
    """The same, where nothing asks for the numbers of a large model or for the words of books."""
    config = yaml.safe_load(path.read_text())
    if not config["model"]["class_path"].endswith("SkipThought"):
        return build("--config", path, *argv)
    with torch.device("meta"):
        return build("--config", path, "--data.vocabulary=[a,book]", *argv)


def norms_at_work(model: ZooModule) -> set[Norm]:
    found = {m.norm for m in model.modules() if isinstance(m, norms.Site)}
    return found - {norms.Identity()} or found


def test_configs_are_found() -> None:
    expected = {"quickstart.yaml", "mlp/paper.yaml", "conv/mnist.yaml", "conv/thousand.yaml"}
    assert expected <= set(map(name, RUNS))
    assert {path.stem for path in OVERLAYS} == set(NORMS)


@pytest.mark.parametrize("path", RUNS, ids=name)
def test_every_run_parses_and_builds(path: Path) -> None:
    cli = sketch(path)
    config = yaml.safe_load(path.read_text())
    assert type(cli.model).__name__ == config["model"]["class_path"].rpartition(".")[2]
    assert cli.trainer.max_epochs == config["trainer"]["max_epochs"]
    for key, value in config["model"]["init_args"].items():
        if key != "norm" and value is not None:
            assert cli.model.hparams[key] == value


def bases_of(overlay: Path) -> list[Path]:
    """The configurations that its first line names: `# Over configs/A and configs/B: ...`."""
    head = overlay.read_text().partition("\n")[0].partition(":")[0]
    assert head.startswith("# Over "), "the first line names the configurations that it is for"
    bases = [CONFIGS / name for name in re.findall(r"configs/([\w/]+\.yaml)", head)]
    assert bases, f"{overlay.name} names no configuration before the colon of its first line"
    return bases


@pytest.mark.parametrize(
    ("path", "base"),
    [(p, base) for p in sorted((CONFIGS / "protocol").glob("*.yaml")) for base in bases_of(p)],
    ids=name,
)
def test_what_the_protocol_lays_over_a_run(path: Path, base: Path) -> None:
    cli = sketch(base, "--config", path)
    config = yaml.safe_load(path.read_text())
    if norm := config.get("model", {}).get("init_args", {}).get("norm"):
        assert cli.model.hparams["norm"]["class_path"] == norm["class_path"]
        assert norm["init_args"].items() <= cli.model.hparams["norm"]["init_args"].items()
    names = {type(callback).__name__ for callback in cli.trainer.callbacks}
    asked = {c["class_path"] for key in config.get("trainer", {}) if key.startswith("callbacks")
             for c in config["trainer"][key]}  # fmt: skip
    assert {path.rpartition(".")[2] for path in asked} <= names
    if "lr_scheduler" in config:
        assert cli.trainer.max_epochs == config["lr_scheduler"]["init_args"]["T_max"]
        assert "EpochEvaluation" not in names  # replaced, where weight_from_data adds
    elif "callbacks+" in config.get("trainer", {}):
        assert "EpochEvaluation" in names


def of_each_model(paths: list[Path]) -> list[Path]:
    classes = {yaml.safe_load(p.read_text())["model"]["class_path"]: p for p in reversed(paths)}
    return list(classes.values())


#: Each model with a norm, and each norm with a model.
MODELS = of_each_model(BASES)
PAIRS = [
    pytest.param(base, overlay, id=f"{name(base)}-{name(overlay)}")
    for i, base in enumerate(MODELS)
    for k, overlay in enumerate(OVERLAYS)
    if (i - k) % len(OVERLAYS) == 0
]


@pytest.mark.parametrize(("base", "overlay"), PAIRS)
def test_a_norms_file_gives_its_own_defaults(base: Path, overlay: Path) -> None:
    """Nothing of the norm before it leaks: not a gain, not an eps."""
    cli = sketch(base, "--config", overlay)
    assert norms_at_work(cli.model) == {NORMS[overlay.stem]()}
    assert cli.model.hparams["norm"] == norms.to_config(NORMS[overlay.stem]())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(first, second, id=f"{name(first)}-{name(second)}")
        for i, first in enumerate(OVERLAYS)
        for k, second in enumerate(OVERLAYS)
        if (i - k) % len(OVERLAYS) == 1 or i == k < 2
    ],
)
def test_the_later_of_two_norms_stands_alone(first: Path, second: Path, tmp_path: Path) -> None:
    """The first with every value changed, as a user's own file may have it."""
    changed = yaml.safe_load(first.read_text())
    arguments = changed["model"]["init_args"]["norm"]["init_args"]
    words = {"channel": "position"}
    for key, value in arguments.items():
        if isinstance(value, str):
            arguments[key] = words[value]
        else:
            arguments[key] = not value if isinstance(value, bool) else value / 2 if value < 1 else 7
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed))
    parsed = parse("--config", BASES[0], "--config", tmp_path / "changed.yaml", "--config", second)
    norm = parsed.model.init_args.norm
    assert norm.class_path.endswith(f".{NORMS[second.stem].__name__}")
    given = vars(norm.get("init_args") or Namespace())
    assert given == norms.to_config(NORMS[second.stem]())["init_args"]


@pytest.mark.parametrize("overlay", OVERLAYS, ids=name)
def test_every_field_is_written_out(overlay: Path) -> None:
    norm = yaml.safe_load(overlay.read_text())["model"]["init_args"]["norm"]
    expected = norms.to_config(NORMS[overlay.stem]())
    assert norm["init_args"].keys() == expected["init_args"].keys()
    assert norm["class_path"] == expected["class_path"]


def test_a_class_chosen_on_the_command_line_brings_its_own_defaults() -> None:
    """Where no file says otherwise: the models' arguments have no default instance to leak from."""
    cli = build("--config", CONFIGS / "mlp/paper.yaml", "--model.norm=BatchNorm")
    assert norms_at_work(cli.model) == {BatchNorm()}
    both = ("--config", CONFIGS / "mlp/paper.yaml", "--config", CONFIGS / "norms/batch.yaml")
    cli = build(*both, "--model.norm.unbiased=true")
    assert norms_at_work(cli.model) == {BatchNorm(unbiased=True)}
    # A norm may be named before the model.
    overlay = CONFIGS / "norms/layer.yaml"
    own = ("--model", "MLPClassifier", "--model.in_features=64", "--model.num_classes=10")
    cli = build("--config", overlay, "--model.hidden_sizes=[8]", *own, "--data", "Digits")
    assert norms_at_work(cli.model) == {norms.LayerNorm()}


#: Steps of these take seconds, and their models have smaller configurations too.
LARGE = ("handwriting/paper.yaml", "order_embedding/paper.yaml", "order_embedding/flickr8k.yaml")
#: All are built above; one of each model trains, and the others with -m slow.
TRAINED = of_each_model([base for base in BASES if name(base) not in LARGE])


@pytest.mark.filterwarnings("ignore:the alphabet")  # of quickstarts has few characters
@pytest.mark.parametrize(
    "base",
    [
        pytest.param(base, id=name(base), marks=[] if base in TRAINED else pytest.mark.slow)
        for base in BASES
    ],
)
def test_one_of_each_model_takes_two_steps(base: Path) -> None:
    """On data that need no download; the sizes are the paper's, but of models that read text."""
    data, evaluation = {
        "attentive_reader": ("SyntheticClozeQA", "StepEvaluation"),
        "draw": ("BinarizedDigits", "StepEvaluation"),
        "handwriting": ("SyntheticHandwriting", "StepEvaluation"),
        "skip_thought": ("SyntheticBooks", "StepEvaluation"),
        "order_embedding": ("SyntheticScenes", "FiniteLoss"),
    }.get(base.parent.name, ("Digits", "EpochEvaluation"))
    few = ["--data.train_size=40", "--data.val_size=20"]
    if data == "SyntheticBooks":
        few = ["--data.books=5", "--data.paragraphs=3", "--model.hidden_size=8"]
    cli = build(
        "--config", base, f"--data={data}", "--data.batch_size=4", *few, *QUIET,
        "--trainer.max_steps=2", "--trainer.enable_checkpointing=false",
        "--trainer.accelerator=cpu", f"--trainer.callbacks={evaluation}",
    )  # fmt: skip
    before = {k: v.clone() for k, v in cli.model.named_parameters()}
    cli.run()
    assert cli.trainer.global_step == 2
    assert all((v != before[k]).any() for k, v in cli.model.named_parameters())


def test_the_paper_at_its_size() -> None:
    """Section 6.6: 784-1000-1000-10, batch 128, 60 epochs, 55,000 training images."""
    cli = build("--config", CONFIGS / "mlp/paper.yaml")
    assert isinstance(cli.model, MLPClassifier)
    assert sum(p.numel() for p in cli.model.parameters()) == 1_798_010
    assert (cli.datamodule.batch_size, cli.datamodule.train_size) == (128, 55_000)
    assert cli.trainer.max_epochs == 60


def parse(*argv: str | Path) -> Namespace:
    class Parsed(ZooCLI):
        def instantiate_classes(self) -> None:
            self.model = self.trainer = None

        def after_instantiate_classes(self) -> None:
            """There is nothing to load weights into."""

    return Parsed(["fit", *map(str, argv), "--trainer.logger=false"]).settings
