"""Norms in modules that know nothing of this package."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import environment, same
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from refusals import refuses
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import quiet_trainer

import ln_zoo
from ln_zoo import BatchNorm, Identity, LayerNorm, RMSNorm, WeightNorm, normalize_
from ln_zoo.callbacks import Normalize
from ln_zoo.conversion.layers import acts

PROJECT = Path(__file__).parent / "lightning_project"
OPTIONS = (
    "--trainer.callbacks+=ln_zoo.callbacks.Normalize", "--trainer.callbacks.norm=LayerNorm",
)  # fmt: skip
LOADER = DataLoader(TensorDataset(torch.randn(8, 5, 3, generator=torch.Generator())), 4)


class Net(LightningModule):
    """A plain module: recurrent layers, a cell, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.LSTM(3, 4, batch_first=True)
        self.cell = nn.GRUCell(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.rnn(x)[0][:, -1]))

    def training_step(self, batch: Any, *_: Any) -> Tensor:
        return self(batch[0]).square().mean()

    def test_step(self, batch: Any, *_: Any) -> None:
        self.log("score", self(batch[0]).square().mean())

    def predict_step(self, batch: Any, *_: Any) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(module: LightningModule, *callbacks: Callback, epochs: int = 2, **options: Any) -> Trainer:
    trainer = quiet_trainer(*callbacks, max_epochs=epochs)
    trainer.fit(module, LOADER, **options)
    return trainer


def saving(folder: Path, *callbacks: Callback) -> tuple[Callback, ...]:
    return *callbacks, ModelCheckpoint(
        folder, "{epoch}", save_top_k=-1, enable_version_counter=False
    )


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Checkpoints of a run with layer norm, and its last weights."""
    folder = tmp_path_factory.mktemp("trained")
    module = Net()
    fit(module, *saving(folder, Normalize()))
    return folder, state(module)


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm(eps=1e-3), WeightNorm(), Identity()])
def test_the_numbers_are_those_of_normalize(norm: ln_zoo.Norm) -> None:
    ours, by_hand = Net(), Net()
    trainer = fit(ours, Normalize(norm))
    normalize_(by_hand, norm, include=["rnn", "cell"])
    fit(by_hand)
    assert same(state(ours), state(by_hand))
    optimized = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert optimized == {id(p) for p in ours.parameters()}


def test_it_says_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    callback, module = Normalize(), Net()
    module.tied = nn.GRU(3, 4)
    module.other = nn.GRU(3, 4)
    module.other.weight_hh_l0 = module.tied.weight_hh_l0
    with caplog.at_level("INFO"):
        fit(module, callback)
    (line,) = [each for each in caplog.messages if each.startswith("Normalize")]
    assert all(part in line for part in ("LayerNorm()", "rnn (LSTM)", "cell (GRUCell)"))
    assert "tied (GRU)" in line
    assert "head" not in line
    assert callback.layers == ["rnn", "cell"]
    caplog.clear()
    with caplog.at_level("INFO"):  # the same norm again
        fit(module, callback)
        fit(module, Normalize())
    assert not [each for each in caplog.messages if each.startswith("Normalize")]


def test_layers_by_name() -> None:
    module = Net()
    first, second = Normalize(include=["rnn", "head"]), Normalize(RMSNorm(), exclude="rnn")
    fit(module, first, second)
    assert (first.layers, second.layers) == (["rnn", "head"], ["cell"])
    norms = [module.rnn.sites.l0.cell.norm, module.head.site.norm, module.cell.sites.input.norm]
    assert norms[:2] == [LayerNorm(), LayerNorm()]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"norm": RMSNorm()}, ("rnn", "LayerNorm", "RMSNorm")),
        ({"include": "encoder"}, ("encoder", "rnn")),
    ],
)
def test_another_norm_or_no_layer(change: dict[str, Any], names: tuple[str, ...]) -> None:
    module = Net()
    normalize_(module, LayerNorm(), include="rnn")
    before = state(module)
    message = refuses("Normalize", fit, module, Normalize(**change))
    assert [name for name in names if name not in message] == []
    assert same(state(module), before)


def test_nothing_to_normalise() -> None:
    class Flat(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = self.cell = nn.Identity()

    message = refuses("Normalize.*Flat", fit, Flat(), Normalize())
    assert "'head'" in message
    refuses("norm", Normalize, "layer", error=TypeError)
    refuses("norm", Normalize, LayerNorm, error=TypeError)


class Late(Net):
    """Layers made in `setup` and `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.cell = None, None

    def setup(self, stage: str) -> None:
        if self.rnn is None:
            self.rnn = nn.LSTM(3, 4, batch_first=True)

    def configure_model(self) -> None:
        if self.cell is None:
            self.cell = nn.GRUCell(4, 4)


class Compiled(Net):
    """As a widespread template does it."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.head = nn.Sequential(torch.compile(self.head, backend="eager"))
            self.rnn = torch.compile(self.rnn, backend="eager")


@pytest.mark.parametrize("kind", [Late, Compiled])
def test_layers_made_after_init(kind: type[Net], tmp_path: Path) -> None:
    module, again, callback = kind(), kind(), Normalize(include=["rnn", "cell"])
    fit(module, *saving(tmp_path, callback))
    assert callback.layers == ["rnn", "cell"]
    assert "configure_model" not in vars(module)
    fit(again, Normalize(include=["rnn", "cell"]), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert same(state(again), state(module))


def test_a_compiled_module() -> None:
    module, plain = Net(), Net()
    fit(torch.compile(module, backend="eager"), Normalize())
    fit(plain, Normalize())
    expected = state(plain)
    assert state(module).keys() == expected.keys()
    for name, value in state(module).items():
        assert torch.allclose(value, expected[name], atol=1e-5), name  # another kernel


def test_a_resumed_run(trained: tuple[Path, dict[str, Tensor]]) -> None:
    folder, last = trained
    module = Net()
    fit(module, Normalize(), ckpt_path=folder / "epoch=0.ckpt")
    assert same(state(module), last)


def test_test_and_predict(trained: tuple[Path, dict[str, Tensor]]) -> None:
    folder, last = trained
    path = folder / "epoch=1.ckpt"
    loaded = Normalize.load_from_checkpoint(Net, path)
    assert same(state(loaded), last)
    trainer = quiet_trainer(Normalize())
    (scores,) = trainer.test(Net(), LOADER, ckpt_path=path, verbose=False)
    outputs = torch.cat(trainer.predict(Net(), LOADER, ckpt_path=path))
    assert torch.equal(outputs, torch.cat(quiet_trainer().predict(loaded, LOADER)))
    assert scores["score"] == pytest.approx(float(outputs.square().mean()))


def test_two_norms_are_loaded(tmp_path: Path) -> None:
    module = Net()
    fit(module, *saving(tmp_path, Normalize(BatchNorm(), "rnn"), Normalize(RMSNorm(), ["cell"])))
    loaded = Normalize.load_from_checkpoint(Net, tmp_path / "epoch=1.ckpt", weights_only=True)
    assert same(state(loaded), state(module))


MINE = """
from dataclasses import dataclass
from ln_zoo import LayerNorm

@dataclass(frozen=True)
class Mine(LayerNorm):
    pass
"""


def test_a_checkpoint_imports_no_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "norm_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    norm = importlib.import_module("norm_of_mine").Mine(eps=0.5)
    module = Net()
    fit(module, *saving(tmp_path, Normalize(norm)))
    path = tmp_path / "epoch=1.ckpt"
    assert same(state(Normalize.load_from_checkpoint(Net, path)), state(module))
    del sys.modules["norm_of_mine"]
    refuses(["norm_of_mine.Mine", "import"], Normalize.load_from_checkpoint, Net, path)
    assert "norm_of_mine" not in sys.modules


@pytest.mark.parametrize(
    ("callback", "names"),
    [
        (Normalize(RMSNorm()), ("RMSNorm", "LayerNorm", "rnn")),
        (Normalize(LayerNorm(eps=0.1)), ("0.1", "1e-05")),
        (Normalize(exclude="cell"), ("cell", "LayerNorm", "include")),
    ],
)
def test_a_checkpoint_of_another_norm(
    trained: tuple[Path, dict[str, Tensor]], callback: Normalize, names: tuple[str, ...]
) -> None:
    path = trained[0] / "epoch=0.ckpt"
    message = refuses("Normalize", fit, Net(), callback, ckpt_path=path)
    assert [name for name in (*names, path.name) if name not in message] == []


NORM = {"class_path": "ln_zoo.norms.LayerNorm", "init_args": {"gain": 1.0, "eps": 1e-5}}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda s: s.pop("layers"), ("layers",)),
        (lambda s: s.pop("norm"), ("norm",)),
        (lambda s: s.update(kernel="os"), ("kernel",)),
        (lambda s: s.update(layers="rnn"), ("layers", "rnn")),
        (lambda s: s.update(adopted=[3]), ("adopted", "3")),
        (lambda s: s.update(adopt="yes"), ("adopt", "yes")),
        (lambda s: s.update(include=[["*"]]), ("include",)),
        (lambda s: s.update(norm="LayerNorm"), ("norm", "LayerNorm")),
        (lambda s: s.update(norm=NORM | {"init_args": {"eps": "1"}}), ("norm.eps", "'1'")),
        (lambda s: s.update(norm=NORM | {"init_args": {"depth": 1}}), ("LayerNorm", "depth")),
        (lambda s: s.update(norm=NORM | {"class_path": "os.system"}), ("norm", "os.system")),
        (lambda s: s.update(norm=NORM | {"class_path": "torch.nn.LSTM"}), ("norm", "LSTM")),
        (lambda s: s.update(norm=NORM | {"class_path": "antigravity.Norm"}), ("antigravity",)),
        (lambda s: s.update(norm=NORM | {"class_path": 3}), ("norm", "3")),
    ],
)
def test_a_malformed_or_hostile_state(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path, change: Any, names: tuple[str, ...]
) -> None:
    checkpoint = torch.load(trained[0] / "epoch=0.ckpt", weights_only=True)
    (stored,) = (v for key, v in checkpoint["callbacks"].items() if key.startswith("Normalize"))
    change(stored)
    path = tmp_path / "changed.ckpt"
    torch.save(checkpoint, path)
    for how in (
        partial(Normalize.load_from_checkpoint, Net, path),
        partial(fit, Net(), Normalize(), ckpt_path=path),
    ):
        assert len(refuses([path, *names], how).splitlines()) == 1
    assert "antigravity" not in sys.modules


def test_a_checkpoint_of_a_plain_run(tmp_path: Path) -> None:
    fit(Net(), *saving(tmp_path))
    path = tmp_path / "epoch=0.ckpt"
    assert "without" in refuses("rnn", fit, Net(), Normalize(), ckpt_path=path)
    refuses("without Normalize", Normalize.load_from_checkpoint, Net, path)
    # Without new parameters there is no difference.
    fit(Net(), Normalize(Identity()), ckpt_path=path)


def test_a_module_normalised_by_hand_needs_no_state(tmp_path: Path) -> None:
    one, other = Net(), Net()
    for module in (one, other):
        normalize_(module, LayerNorm(), include=None)
    fit(one, *saving(tmp_path))
    fit(other, Normalize(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert same(state(one), state(other))


@pytest.mark.parametrize("kind", [StochasticWeightAveraging, EMAWeightAveraging])
def test_averages_of_weights(kind: Any) -> None:
    def average() -> Callback:
        return kind(0.01, swa_epoch_start=1) if kind is StochasticWeightAveraging else kind()

    module = Net()
    fit(module, Normalize(), average())
    assert acts(module.rnn)
    refuses(f"{kind.__name__}.*Normalize", fit, Net(), average(), Normalize())


def test_an_interrupted_run_leaves_the_module_whole() -> None:
    class Broken(Callback):
        broken = True

        def setup(self, *_: Any, **__: Any) -> None:
            if self.broken:
                raise RuntimeError("no disk")

    module, broken = Late(), Broken()
    refuses("no disk", fit, module, Normalize(), broken, error=RuntimeError)
    assert not {"configure_model", "on_load_checkpoint"} & set(vars(module))
    broken.broken = False
    fit(module, Normalize(), broken)
    assert acts(module.rnn)


def test_frozen_and_two_optimizers() -> None:
    class Frozen(Net):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.rnn.requires_grad_(False)

        def training_step(self, batch: Any, *_: Any) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            parts = (self.rnn, self.cell), (self.head,)
            groups = [
                [p for m in each for p in m.parameters() if p.requires_grad] for each in parts
            ]
            return [torch.optim.SGD(group, lr=0.1) for group in groups]

    module, before = Frozen(), state(Net())
    fit(module, Normalize())
    after = state(module)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if not name.startswith("rnn")} - {"cell.weight_hh"}
    assert not torch.equal(after["rnn.sites.l0.cell.gain"], torch.ones(4))


def test_adopted_layers_stay_as_they_are(tmp_path: Path) -> None:
    module, callback = Net(), Normalize(include="rnn", adopt=True)
    fit(module, *saving(tmp_path, callback))
    assert callback.adopted == ["cell"]
    assert type(module.cell) is ln_zoo.GRUCell
    assert not acts(module.cell)
    fit(module, Normalize(include="rnn", adopt=True))
    assert not acts(module.cell)
    loaded = Normalize.load_from_checkpoint(Net, tmp_path / "epoch=1.ckpt")
    assert type(loaded.cell) is ln_zoo.GRUCell


# A project of its own


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command of the project, run in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(PROJECT)
    import train

    return lambda *args: train.main([args[0], f"--config={PROJECT / 'config.yaml'}", *args[1:]])


def test_a_project_by_options_alone(project: Any, tmp_path: Path) -> None:
    first, last = (f"checkpoints/epoch={n}.ckpt" for n in (0, 1))
    done = project("fit", *OPTIONS)
    expected = state(done.model)
    # By hand, with the same data and seed.
    seed_everything(3, verbose=False)
    by_hand = type(done.model)()
    normalize_(by_hand, LayerNorm(), include=["net.encoder", "net.decoder"])
    quiet_trainer(max_epochs=2).fit(by_hand, datamodule=type(done.datamodule)())
    assert same(state(by_hand), expected)
    logged = yaml.safe_load(Path("logs/lightning_logs/version_0/hparams.yaml").read_text())
    assert logged["normalize"]["layers"] == ["net.encoder", "net.decoder"]

    resumed = project("fit", *OPTIONS, f"--ckpt_path={first}", "--trainer.callbacks+=ModelSummary")
    assert same(state(resumed.model), expected)
    tested = project("test", *OPTIONS, f"--ckpt_path={last}")
    loaded = Normalize.load_from_checkpoint(type(done.model), last)
    assert same(state(loaded), expected)
    (scores,) = quiet_trainer().test(loaded, datamodule=type(done.datamodule)(), verbose=False)
    assert scores["test/loss"] == tested.trainer.callback_metrics["test/loss"].item()
    # The configuration that the run saved is enough.
    saved = yaml.safe_load(Path("logs/lightning_logs/version_0/config.yaml").read_text())
    assert saved["trainer"]["callbacks"][-1]["class_path"].endswith("Normalize")


@pytest.mark.slow
def test_a_project_in_two_processes(tmp_path: Path) -> None:
    """The command line, in its own process: one process, two, and a test of what two trained."""

    def run(command: str, *options: str) -> str:
        words = [sys.executable, PROJECT / "train.py", command, f"--config={PROJECT}/config.yaml"]
        variables = environment(CUDA_VISIBLE_DEVICES="")
        done = subprocess.run(
            [*words, *OPTIONS, *options], cwd=tmp_path, env=variables, text=True,
            capture_output=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stderr + done.stdout

    def weights(folder: str) -> dict[str, Tensor]:
        return torch.load(tmp_path / folder / "epoch=1.ckpt", weights_only=True)["state_dict"]

    both = "--trainer.devices=2", "--trainer.strategy=ddp"
    # One batch an epoch, since Lightning shuffles for two processes.
    said = run("fit", *both, "--data.batch_size=16")
    assert said.count("Normalize: LayerNorm() in net.encoder (LSTM), net.decoder (GRU)") == 1
    two = weights("checkpoints")
    (tmp_path / "checkpoints").rename(tmp_path / "two")
    run("fit", "--data.batch_size=32")
    one = weights("checkpoints")
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.allclose(value, two[name], atol=1e-5), name
    assert "test/loss" in run("test", *both, "--ckpt_path=two/epoch=1.ckpt")
    assert json.dumps(sorted(one)).count(".gain") > 4
