"""Other libraries' recurrent layers against ours in their place: errors in float64, and times.

Each library is installed at the version pinned here, without its dependencies, into a folder that
is not on Python's path; files that need only torch are imported from there, and what else they
import is replaced by placeholders.
"""

from __future__ import annotations

import abc
import argparse
import copy
import datetime
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import math
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import runner
from benchmarks.contestants import Absent, Size
from benchmarks.timing import interleave, ratios
from ln_zoo.conversion import adopt_, from_dialect, normalize_
from ln_zoo.conversion.adopt import KeepsFloat64
from ln_zoo.conversion.calibrate import tensors
from ln_zoo.conversion.formats.adapters import Adapter
from ln_zoo.norms import Identity

#: What a call returns: tensors in any nesting.
Run = Callable[[nn.Module, Tensor], Any]


class Packages:
    """Libraries installed into a folder, and modules imported from there.

    Args:
        folder: where they are, or will be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, *requirements: str) -> None:
        """Install pinned requirements without their dependencies, unless they are there.

        Raises:
            Absent: if pip fails, for instance without a network.
        """
        for requirement in requirements:
            target = self.folder / requirement
            if (target / "done").exists():
                continue
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
            command += ["--disable-pip-version-check", "--target", str(target), requirement]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
                why = (errors or done.stderr.splitlines() or ["no message"])[-1]
                raise Absent(f"pip cannot install {requirement}: {why}")
            for library in target.rglob("lib/*torchaudio*.so"):
                library.unlink()  # Built for one version of torch; the models do not use it.
            (target / "done").touch()

    def file(self, module: str) -> Path:
        """The file of a module.

        Raises:
            Absent: if no installed package has it.
        """
        inner = Path(*module.split("."))
        for target in sorted(self.folder.iterdir()):
            for path in (target / f"{inner}.py", target / inner / "__init__.py"):
                if path.exists():
                    return path
        raise Absent(f"no installed package has {module}")

    def load(self, module: str, **given: Mapping[str, Any]) -> Any:
        """Import one file of a package; modules that it imports, and that are missing, are empty.

        Args:
            module: its name.
            **given: contents of imported modules, by name with ``__`` for dots.
        """
        spec = importlib.util.spec_from_file_location(module, self.file(module))
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        contents = {name.replace("__", "."): values for name, values in given.items()}
        roots = {module.partition(".")[0], *(name.partition(".")[0] for name in contents)}
        with _placeholders(roots, contents):
            sys.modules[module] = loaded
            spec.loader.exec_module(loaded)
        return loaded

    @contextmanager
    def path(self, *requirements: str) -> Iterator[None]:
        """With packages on Python's path."""
        added = [str(self.folder / requirement) for requirement in requirements]
        sys.path += added
        try:
            yield
        finally:
            for entry in added:
                sys.path.remove(entry)


class _AnyName(abc.ABCMeta):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)

    def __getitem__(cls, key: Any) -> Any:
        return cls


def _placeholder(name: str) -> Any:
    """A class that can be inherited from, subscripted, and used as a decorator or to make one."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is not made:
            return object.__new__(cls)  # A class of the library that inherits from it.
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda *given, **_: given[0] if given else None

    made: Any = _AnyName(name, (), {"__new__": new})
    return made


class _Empty(types.ModuleType):
    """A module of placeholders."""

    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: set[str], contents: Mapping[str, Mapping[str, Any]]) -> None:
        self.roots, self.contents = roots, contents
        self.made: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        self.made.append(spec.name)
        module = _Empty(spec.name)
        vars(module).update(self.contents.get(spec.name, {}))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


@contextmanager
def _placeholders(roots: set[str], contents: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """With packages replaced by placeholders while a file is imported."""
    finder = _Finder(roots, contents)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.made:
            sys.modules.pop(name, None)


# Clients


@dataclass(frozen=True)
class Client:
    """A layer of another library.

    Args:
        requirements: what is installed, the library first.
        make: makes the layer; it gets the packages and the size.
        size: steps, sequences, inputs and units.
        run: calls theirs on x (T, N, I).
        convert: returns ours, given a copy of theirs.
        run_ours: calls ours; default: as theirs.
        dialect: the dialect, where the weights of the whole layer are of one.
    """

    requirements: tuple[str, ...]
    make: Callable[[Packages, Size], nn.Module]
    size: Size
    run: Run
    convert: Callable[[nn.Module], nn.Module]
    run_ours: Run | None = None
    dialect: str | None = None

    def layer(self, packages: Packages, size: Size | None = None) -> nn.Module:
        """Their layer, in evaluation mode, with weights that are not the initial ones.

        Raises:
            Absent: if the library cannot be installed or imported.
        """
        packages.install(*self.requirements)
        torch.manual_seed(0)
        try:
            module = self.make(packages, size or self.size).eval()
        except (ImportError, AttributeError) as error:
            raise Absent(f"{self.requirements[0]} cannot be imported: {error}") from error
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return module


def _adopted(module: nn.Module) -> nn.Module:
    holder = nn.ModuleDict({"client": module})
    adopt_(holder, subclasses=True)
    return holder["client"]


def _normalized(module: nn.Module) -> nn.Module:
    normalize_(module, Identity())
    return module


def _whole(dialect: str, eps: float) -> Callable[[nn.Module], nn.Module]:
    return lambda module: from_dialect(dialect, module.state_dict(), eps=eps)


def _steps(step: Callable[[nn.Module, Tensor, Any], tuple[Tensor, Any]], start: Any) -> Run:
    """A loop over time of a cell of H units."""

    def run(module: nn.Module, x: Tensor) -> Any:
        state = start(x.new_zeros(x.shape[1], _units(module)))
        outputs = []
        for row in x:
            output, state = step(module, row, state)
            outputs.append(output)
        return torch.stack(outputs), state

    return run


def _units(module: Any) -> int:
    sizes = (getattr(module, name, None) for name in ("hidden_size", "_size", "cell_size"))
    return next(int(size) for size in sizes if size is not None)


def _layer(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def _batch_first(module: nn.Module, x: Tensor) -> Any:
    return module(x.transpose(0, 1))


def _padded(module: Any, x: Tensor) -> Any:
    """With as many inputs as the layer has."""
    return module(nn.functional.pad(x.transpose(0, 1), (0, module.input_size - x.shape[2])))


def _no_state(module: nn.Module, x: Tensor) -> Any:
    return module(x, None)


def _torchaudio(packages: Packages, size: Size) -> nn.Module:
    with packages.path(_TORCHAUDIO):
        rnnt = importlib.import_module("torchaudio.models.rnnt")
    layer: nn.Module = rnnt._CustomLSTM(size.I, size.H, layer_norm=True, layer_norm_epsilon=1e-3)
    return layer


def nemo_rnn(packages: Packages) -> Any:
    """NeMo's module of recurrent layers."""
    log = logging.getLogger("nemo")
    log.setLevel(logging.ERROR)
    return packages.load("nemo.collections.common.parts.rnn", nemo__utils={"logging": log})


def _nemo(packages: Packages, size: Size) -> nn.Module:
    layer: nn.Module = nemo_rnn(packages).rnn(size.I, size.H, 2, norm="layer")
    return layer


def _di(packages: Packages, size: Size) -> nn.Module:
    norms = packages.load("ding.torch_utils.network.normalization")
    tree = {"Tensor": type("Tensor", (), {})}
    rnn = packages.load(
        "ding.torch_utils.network.rnn",
        ding={"enable_hpc_rl": False},
        ding__torch_utils__network__normalization=vars(norms),
        treetensor__torch=tree,
    )
    layer: nn.Module = rnn.LSTM(size.I, size.H, 1, norm_type="LN")
    return layer


def _di_dreamer(packages: Packages, size: Size) -> nn.Module:
    networks = packages.load("ding.world_model.model.networks")
    layer: nn.Module = networks.GRUCell(size.I, size.H, norm=True)
    return layer


def _sheeprl(packages: Packages, size: Size, bias: bool = False) -> nn.Module:
    models = packages.load("sheeprl.models.models")
    layer: nn.Module = models.LayerNormGRUCell(
        size.I, size.H, bias=bias, layer_norm_cls=nn.LayerNorm, layer_norm_kw={"eps": 1e-3}
    )
    return layer


def _rllib(packages: Packages, size: Size) -> nn.Module:
    model = packages.load(
        "ray.rllib.algorithms.dreamerv3.torch.models.components.sequence_model",
        ray__rllib__utils__framework={"try_import_torch": lambda: (torch, nn)},
        gymnasium={},
    )
    layer: nn.Module = model.DreamerV3GRU(size.I, size.H)
    return layer


def _speechbrain(name: str, **options: Any) -> Callable[[Packages, Size], nn.Module]:
    def make(packages: Packages, size: Size) -> nn.Module:
        rnn = packages.load("speechbrain.nnet.RNN")
        shape = (size.B, size.T, size.I)
        layer: nn.Module = getattr(rnn, name)(size.H, input_shape=shape, **options)
        return layer

    return make


def _asteroid(packages: Packages, size: Size) -> nn.Module:
    parts = {name: packages.load(f"asteroid.masknn.{name}") for name in ("activations", "norms")}
    masks = packages.load(
        "asteroid.masknn.recurrent",
        asteroid__masknn=parts,
        asteroid__masknn__norms=vars(parts["norms"]),
        asteroid__utils={"has_arg": lambda function, name: False},
    )
    layer: nn.Module = masks.DPRNN(
        size.I, 2, bn_chan=size.I, hid_size=size.H, chunk_size=20, n_repeats=2
    )
    return layer


def _frames(module: nn.Module, x: Tensor) -> Any:
    return module(x.permute(1, 2, 0))


def _tianshou(packages: Packages, size: Size) -> nn.Module:
    common = packages.load(
        "tianshou.utils.net.common",
        tianshou__data__batch={"Batch": dict},
        gymnasium={},
    )
    net = common.Recurrent(
        layer_num=1, state_shape=size.I, action_shape=size.I, hidden_layer_size=size.H
    )
    layer: nn.Module = net.nn  # The network around it casts its input to float32.
    return layer


def _rl_games(packages: Packages, size: Size) -> nn.Module:
    recurrent = packages.load("rl_games.common.layers.recurrent")
    layer: nn.Module = recurrent.LSTMWithDones(size.I, size.H)
    return layer


def _with_dones(module: Any, x: Tensor) -> Any:
    generator = torch.Generator().manual_seed(1)
    dones = (torch.rand(*x.shape[:2], 1, generator=generator) < 0.02).to(x.dtype)
    zeros = x.new_zeros(1, x.shape[1], module.rnn.hidden_size)
    return module(x, (zeros, zeros), dones)


def _torchrl(packages: Packages, size: Size) -> nn.Module:
    with packages.path(*_TORCHRL):
        modules = importlib.import_module("torchrl.modules")
    layer: nn.Module = modules.LSTMModule(size.I, size.H, in_key="x", out_key="y")
    return layer


def _tensordict(module: Any, x: Tensor) -> Any:
    """A rollout (N, T) whose episodes start at random, in TorchRL's recurrent mode."""
    modules, tensordict = (importlib.import_module(n) for n in ("torchrl.modules", "tensordict"))
    n, t = x.shape[1], x.shape[0]
    starts = torch.rand(n, t, 1, generator=torch.Generator().manual_seed(1)) < 0.02
    zeros = x.new_zeros(n, t, 1, module.lstm.hidden_size)
    data = tensordict.TensorDict(
        {
            "x": x.transpose(0, 1),
            "is_init": starts,
            "recurrent_state_h": zeros,
            "recurrent_state_c": zeros,
        },
        [n, t],
    )
    with modules.set_recurrent_mode(True):
        found = module(data)
    return found["y"], found["next", "recurrent_state_h"], found["next", "recurrent_state_c"]


def _block_gru(name: str) -> Callable[[Packages, Size], nn.Module]:
    def make(packages: Packages, size: Size) -> nn.Module:
        with packages.path(*_TORCHRL):
            models = importlib.import_module("torchrl.modules.models.model_based")
        options = {"projection_size": size.H // 2, "num_blocks": math.gcd(8, size.H)}
        layer: nn.Module = getattr(models, name)(size.I, size.H, **options)
        return layer

    return make


def _with_starts(module: Any, x: Tensor) -> Any:
    """A rollout whose episodes start at random."""
    starts = torch.rand(x.shape[1], x.shape[0], generator=torch.Generator().manual_seed(1)) < 0.02
    return module(x.transpose(0, 1), None, starts)


def _forecasting(packages: Packages, size: Size) -> nn.Module:
    rnn = packages.load("pytorch_forecasting.models.nn.rnn")
    layer: nn.Module = rnn.LSTM(size.I, size.H, num_layers=2, batch_first=True)
    return layer


def _lengths(module: nn.Module, x: Tensor) -> Any:
    """Sequences of all lengths, one of them empty."""
    lengths = torch.arange(x.shape[1]) * x.shape[0] // max(1, x.shape[1] - 1)
    lengths[-1] = x.shape[0]
    return module(x.transpose(0, 1), lengths=lengths, enforce_sorted=False)


def _xlstm_cell(packages: Packages, size: Size) -> nn.Module:
    """A cell whose 4 H inputs are the terms of its gates."""
    with packages.path(_XLSTM):
        cell = importlib.import_module("xlstm.blocks.slstm.cell")
    config = cell.sLSTMCellConfig(hidden_size=size.I // 4, **_xlstm_options(size.I // 4))
    layer: nn.Module = cell.sLSTMCell(config)
    return layer


def _xlstm_layer(packages: Packages, size: Size) -> nn.Module:
    with packages.path(_XLSTM):
        layers = importlib.import_module("xlstm.blocks.slstm.layer")
    config = layers.sLSTMLayerConfig(embedding_dim=size.I, **_xlstm_options(size.I))
    layer: nn.Module = layers.sLSTMLayer(config)
    return layer


def _xlstm_options(units: int) -> dict[str, Any]:
    # Initial biases of heads of one unit are NaN.
    return {"num_heads": math.gcd(4, units // 2), "backend": "vanilla", "dtype": "float32"}


_XLSTM = "xlstm==2.0.6"
_TORCHAUDIO = "torchaudio==2.11.0"
_TORCHRL = ("torchrl==0.14.1", "tensordict==0.15.3", "pyvers==0.2.3")
_DREAMER = Size(64, 16, 512, 512)
_PAIR = _steps(lambda cell, x, h: cell(x, h), lambda h: h)
_LIST = _steps(lambda cell, x, h: cell(x, h), lambda h: [h])


def _sheeprl_step(cell: nn.Module, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = cell(x, h)
    return h, h


_SHEEPRL = _steps(_sheeprl_step, lambda h: h)

CLIENTS: dict[str, Client] = {
    "torchaudio _CustomLSTM": Client(
        (_TORCHAUDIO,),
        _torchaudio,
        Size(40, 8, 512, 512),
        _no_state,
        _adopted,
        dialect="torchaudio",
    ),
    "NeMo ln_lstm": Client(
        ("nemo-toolkit==3.0.0",),
        _nemo,
        Size(40, 16, 320, 512),
        _no_state,
        _adopted,
        dialect="torchscript",
    ),
    "DI-engine LSTM": Client(
        ("DI-engine==0.5.3",),
        _di,
        Size(80, 64, 512, 512),
        _no_state,
        _adopted,
        dialect="di-engine",
    ),
    "DI-engine Dreamer GRUCell": Client(
        ("DI-engine==0.5.3",), _di_dreamer, _DREAMER, _LIST, _adopted, dialect="di-engine"
    ),
    "sheeprl LayerNormGRUCell": Client(
        ("sheeprl==0.8.4",), _sheeprl, _DREAMER, _SHEEPRL, _adopted, dialect="sheeprl"
    ),
    "sheeprl LayerNormGRUCell, bias": Client(
        ("sheeprl==0.8.4",),
        lambda packages, size: _sheeprl(packages, size, bias=True),
        _DREAMER,
        _SHEEPRL,
        _adopted,
        dialect="sheeprl",
    ),
    "sheeprl LayerNormGRUCell, as a layer": Client(
        ("sheeprl==0.8.4",),
        _sheeprl,
        _DREAMER,
        lambda cell, x: _SHEEPRL(cell, x),
        _whole("sheeprl", 1e-3),
        lambda layer, x: (lambda output, h: (output, h[0]))(*layer(x)),
        dialect="sheeprl",
    ),
    "RLlib DreamerV3GRU": Client(
        ("ray==2.60.0",), _rllib, _DREAMER, _PAIR, _adopted, dialect="rllib"
    ),
    "SpeechBrain LiGRU": Client(
        ("speechbrain==1.1.0",),
        _speechbrain("LiGRU", num_layers=2, bidirectional=True, normalization="layernorm"),
        Size(200, 8, 80, 512),
        _batch_first,
        _adopted,
    ),
    "SpeechBrain SLiGRU": Client(
        ("speechbrain==1.1.0",),
        _speechbrain("SLiGRU", num_layers=2, bidirectional=True, ff_normalization="layernorm"),
        Size(200, 8, 80, 512),
        _batch_first,
        _adopted,
    ),
    "SpeechBrain GRU": Client(
        ("speechbrain==1.1.0",),
        _speechbrain("GRU", num_layers=2, bidirectional=True),
        Size(200, 8, 80, 512),
        _batch_first,
        _normalized,
    ),
    "asteroid DPRNN": Client(
        ("asteroid==0.7.0",), _asteroid, Size(400, 2, 64, 128), _frames, _normalized
    ),
    "TorchRL LSTMModule": Client(_TORCHRL, _torchrl, Size(64, 16, 64, 256), _tensordict, _adopted),
    **{
        f"TorchRL DreamerV3BlockGRU, {units} units": Client(
            _TORCHRL,
            _block_gru("DreamerV3BlockGRU"),
            Size(64, 16, 512, units),
            _with_starts,
            _adopted,
            dialect="torchrl",
        )
        for units in (512, 1024)
    },
    **{
        f"TorchRL DreamerV3BlockGRUCell, {steps} x {rows}": Client(
            _TORCHRL,
            _block_gru("DreamerV3BlockGRUCell"),
            Size(steps, rows, 512, 512),
            _SHEEPRL,
            _adopted,
            dialect="torchrl",
        )
        for steps, rows in ((1, 1), (1, 16), (64, 16), (15, 1024))
    },
    "tianshou Recurrent": Client(
        ("tianshou==2.0.1",), _tianshou, Size(32, 64, 128, 128), _padded, _normalized
    ),
    "rl_games LSTMWithDones": Client(
        ("rl-games==1.6.5",), _rl_games, Size(32, 64, 64, 256), _with_dones, _normalized
    ),
    "xlstm sLSTMCell": Client(
        (_XLSTM,), _xlstm_cell, Size(64, 16, 2048, 512), _batch_first, _adopted, dialect="xlstm"
    ),
    "xlstm sLSTMLayer": Client(
        (_XLSTM,), _xlstm_layer, Size(64, 16, 512, 512), _batch_first, _adopted
    ),
    "pytorch-forecasting LSTM": Client(
        ("pytorch-forecasting==1.8.0",), _forecasting, Size(60, 64, 16, 64), _lengths, _adopted
    ),
}


# Whole models


@dataclass(frozen=True)
class Model:
    """A model of another library, some layers of which `adopt_` replaces.

    Args:
        requirements: what is installed, the library first.
        make: makes the model in evaluation mode; the packages are on Python's path.
        calls: its calls by what they do, which return tensors.
        dialect: the dialect of `to_dialect`, if the library's layers are of one.
    """

    requirements: tuple[str, ...]
    make: Callable[[Packages], nn.Module]
    calls: Mapping[str, Callable[[Any], Any]]
    dialect: str | None = None

    @contextmanager
    def made(self, packages: Packages) -> Iterator[nn.Module]:
        """Install the library and make the model, the same at each call.

        Raises:
            Absent: if the library cannot be installed.
        """
        packages.install(*self.requirements)
        torch.manual_seed(0)
        with packages.path(*self.requirements):
            yield self.make(packages)


def _rnn_t(packages: Packages) -> nn.Module:
    model: nn.Module = importlib.import_module("torchaudio.models").emformer_rnnt_base(4097)
    return model.eval()


def _predict(model: Any) -> Any:
    tokens = torch.arange(320).mul(997).remainder(4097).view(8, 40)
    return model.predict(tokens, torch.full((8,), 40), None)


def _transcribe(model: Any) -> Any:
    """Of two utterances: all of the model, encoder and joiner included."""
    sources = torch.sin(torch.arange(2.0 * 132 * 80)).view(2, 132, 80)
    tokens = torch.arange(40).mul(997).remainder(4097).view(2, 20)
    lengths = (torch.tensor([n, n], dtype=torch.int32) for n in (132, 20))
    source_lengths, target_lengths = lengths
    return model(sources, source_lengths, tokens, target_lengths)[0]


def _nemo_decoder(packages: Packages) -> nn.Module:
    modules = packages.load(
        "nemo.collections.asr.modules.rnnt_abstract", nemo__core={"NeuralModule": nn.Module}
    )
    rnnt = packages.load(
        "nemo.collections.asr.modules.rnnt",
        nemo__collections__common__parts={"rnn": nemo_rnn(packages)},
        nemo__collections__asr__modules={"rnnt_abstract": modules},
        omegaconf={},
        hydra={},
    )
    network = {"pred_hidden": 640, "pred_rnn_layers": 2}
    decoder: Any = rnnt.RNNTDecoder(network, vocab_size=1024, normalization_mode="layer")
    decoder.is_adapter_available = lambda: False
    return nn.Module.eval(decoder)


def _decode(model: Any) -> Any:
    return model.predict(torch.arange(320).mul(997).remainder(1024).view(8, 40), state=None)


def _deepar(packages: Packages) -> nn.Module:
    forecasting = importlib.import_module("pytorch_forecasting")
    pandas = importlib.import_module("pandas")
    series, days = torch.arange(90.0).sin().tolist(), [*range(90)]
    table = pandas.DataFrame({"y": series * 64, "t": days * 64})
    table["who"] = [str(k) for k in range(64) for _ in days]
    data = forecasting.TimeSeriesDataSet(
        table, time_idx="t", target="y", group_ids=["who"], max_encoder_length=60,
        min_encoder_length=1, max_prediction_length=20, time_varying_unknown_reals=["y"],
    )  # fmt: skip
    model: Any = forecasting.DeepAR.from_dataset(data, hidden_size=64, rnn_layers=2)
    model.batch, _ = next(iter(data.to_dataloader(train=False, batch_size=64)))
    return nn.Module.eval(model)


def _forecast(model: Any) -> Any:
    torch.manual_seed(1)  # paths are sampled
    return model(model.batch)["prediction"]


def _xlstm_stack(packages: Packages) -> nn.Module:
    xlstm = importlib.import_module("xlstm")
    config = xlstm.xLSTMBlockStackConfig(
        mlstm_block=xlstm.mLSTMBlockConfig(mlstm=xlstm.mLSTMLayerConfig(num_heads=4)),
        slstm_block=xlstm.sLSTMBlockConfig(slstm=xlstm.sLSTMLayerConfig(**_xlstm_options(256))),
        context_length=64,
        num_blocks=2,
        embedding_dim=256,
        slstm_at=[1],
    )
    model: nn.Module = xlstm.xLSTMBlockStack(config)
    return model.eval()


def _embedded(model: Any) -> Any:
    return model(torch.sin(torch.arange(16.0 * 64 * 256)).view(16, 64, 256))


MODELS: dict[str, Model] = {
    "xlstm xLSTMBlockStack, one mLSTM and one sLSTM block": Model(
        (_XLSTM,), _xlstm_stack, {"16 x 64 tokens": _embedded}, "xlstm"
    ),
    "torchaudio emformer_rnnt_base": Model(
        (_TORCHAUDIO,),
        _rnn_t,
        {"predictor, 8 x 40 tokens": _predict, "2 x 132 frames, 20 tokens": _transcribe},
        "torchaudio",
    ),
    "NeMo RNNTDecoder": Model(
        ("nemo-toolkit==3.0.0",), _nemo_decoder, {"8 x 40 tokens": _decode}, "torchscript"
    ),
    "pytorch-forecasting DeepAR": Model(
        (
            *("pytorch-forecasting==1.8.0", "scikit-base==1.2.0", "pandas==2.3.3"),
            *("python-dateutil==2.9.0.post0", "pytz==2025.2", "tzdata==2025.2", "six==1.17.0"),
        ),
        _deepar,
        {"64 series": _forecast},
    ),
}


# Errors


@dataclass(frozen=True)
class Errors:
    """Largest differences of ours from theirs, each relative to the largest value of its tensor."""

    outputs: float
    input_gradient: float
    weight_gradients: float

    @property
    def largest(self) -> float:
        """The largest of all."""
        return max(self.outputs, self.input_gradient, self.weight_gradients)


def errors(client: Client, packages: Packages, size: Size) -> Errors:
    """Compare a client's layer and ours in float64: outputs, states and all gradients.

    Gradients of weights that the libraries store in another form are compared along directions:
    the derivative of the loss with respect to each of their tensors along two random ones.
    """
    theirs = client.layer(packages, size).double()
    ours = client.convert(copy.deepcopy(theirs))
    x = torch.randn(size.T, size.B, size.I, dtype=torch.float64)
    runs = ((theirs, client.run), (ours, client.run_ours or client.run))
    results = []
    for module, run in runs:
        x_ = x.clone().requires_grad_()
        with KeepsFloat64():
            found = list(tensors(run(module, x_)))
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(a.shape, generator=generator, dtype=a.dtype) for a in found]
        torch.autograd.backward([(a * w).sum() for a, w in zip(found, weights, strict=True)])
        results.append(([a.detach() for a in found], x_.grad))
    (expected, d_x), (found, ours_d_x) = results
    assert [a.shape for a in found] == [a.shape for a in expected]
    assert d_x is not None
    assert ours_d_x is not None
    return Errors(
        max(_gap(a, b) for a, b in zip(found, expected, strict=True)),
        _gap(ours_d_x, d_x),
        max(_weight_gaps(client, theirs, ours)),
    )


def _gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def _weight_gaps(client: Client, theirs: nn.Module, ours: nn.Module) -> Iterator[float]:
    adopted = {name: part for name, part in ours.named_modules() if isinstance(part, Adapter)}
    layers: dict[str, tuple[str, nn.Module]] = {
        name: (part.dialect, part.layer) for name, part in adopted.items()
    }
    if not layers and client.dialect is not None:
        layers = {"": (client.dialect, ours)}
    for name, (dialect, layer) in layers.items():
        part = theirs.get_submodule(name) if name else theirs
        yield from _dialect_gaps(dialect, part, layer)
    for name, parameter in theirs.named_parameters():
        if not any(not lead or name.startswith(f"{lead}.") for lead in layers):
            mine = ours.get_parameter(name).grad
            if parameter.grad is not None and mine is not None:
                yield _gap(mine, parameter.grad)


def _dialect_gaps(dialect: str, theirs: nn.Module, ours: nn.Module) -> Iterator[float]:
    gradients = {
        name.removesuffix("_l0").replace("sites.l0.", "sites."): parameter.grad
        for name, parameter in ours.named_parameters()
    }
    state = theirs.state_dict()
    origin = {name: torch.zeros_like(value) for name, value in state.items()}

    def read(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layer = from_dialect(dialect, values)
        return {
            name.removesuffix("_l0").replace("sites.l0.", "sites."): parameter.detach()
            for name, parameter in layer.named_parameters()
        }

    start = read(origin)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in theirs.named_parameters():
        for _ in range(2):
            along = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            moved = read({**origin, name: along})
            terms = [
                (gradient * (moved[key] - start[key])).sum()
                for key, gradient in gradients.items()
                if gradient is not None
            ]
            assert parameter.grad is not None
            size = parameter.grad.norm() * along.norm()
            yield float((sum(terms) - (parameter.grad * along).sum()).abs() / size)


# The command


@dataclass(frozen=True)
class Row:
    """Times of one client, in milliseconds, and the ratio of theirs to ours."""

    client: str
    mode: str
    threads: int
    theirs: float
    ours: float
    ratio: float


def times(client: str, packages: Packages, threads: int, rounds: int) -> Iterator[Row]:
    """Time forward passes, and training steps, of both layers in turn."""
    entry = CLIENTS[client]
    theirs = entry.layer(packages)
    ours = entry.convert(copy.deepcopy(theirs))
    size = entry.size
    x = torch.randn(size.T, size.B, size.I)
    run_ours = entry.run_ours or entry.run
    torch.set_num_threads(threads)

    def leaf() -> Tensor:
        return x.clone().requires_grad_()

    calls = {
        "theirs": lambda: entry.run(theirs, leaf()),
        "ours": lambda: run_ours(ours, leaf()),
    }
    yield from _both_modes(client, threads, rounds, calls, (theirs, ours))


def model_times(name: str, packages: Packages, threads: int, rounds: int) -> Iterator[Row]:
    """The same of a whole model before and after `adopt_`."""
    entry = MODELS[name]
    torch.set_num_threads(threads)
    with entry.made(packages) as theirs:
        ours = copy.deepcopy(theirs)
        adopt_(ours, subclasses=True)
        for what, call in entry.calls.items():
            calls = {
                "theirs": lambda call=call: call(theirs),
                "ours": lambda call=call: call(ours),
            }
            yield from _both_modes(f"{name}, {what}", threads, rounds, calls, (theirs, ours))


def _both_modes(
    client: str,
    threads: int,
    rounds: int,
    calls: Mapping[str, Callable[[], Any]],
    modules: Sequence[nn.Module],
) -> Iterator[Row]:
    def infer(call: Callable[[], Any]) -> object:
        with torch.no_grad():
            return call()

    def train(call: Callable[[], Any]) -> object:
        for module in modules:
            module.zero_grad()
        return next(tensors(call())).sum().backward()

    for mode, do in (("infer", infer), ("train", train)):
        timed = {name: lambda call=call, do=do: do(call) for name, call in calls.items()}
        found = interleave(timed, rounds, seconds=30.0)
        wall = {name: sorted(t.wall)[len(t.wall) // 2] * 1000 for name, t in found.items()}
        ratio = ratios(found["theirs"].wall, found["ours"].wall).median
        yield Row(client, mode, threads, wall["theirs"], wall["ours"], ratio)


def _error_line(name: str, packages: Packages) -> str:
    client, size = CLIENTS[name], CLIENTS[name].size
    found = errors(client, packages, Size(min(size.T, 12), 3, size.I // 8, size.H // 8))
    return (
        f"{name} ({size}): outputs {found.outputs:.0e}, gradient of input "
        f"{found.input_gradient:.0e}, of weights {found.weight_gradients:.0e}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each client; write a CSV file of the times."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    names = [*CLIENTS, *MODELS]
    parser.add_argument("--clients", nargs="+", default=names, choices=names)
    parser.add_argument("--folder", type=Path, help="where libraries are installed; reused")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=7, help="0: errors only")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        packages = Packages(args.folder or Path(scratch))
        packages.folder.mkdir(parents=True, exist_ok=True)
        rows: list[Row] = []
        for name in args.clients:
            try:
                if name in CLIENTS:
                    print(_error_line(name, packages))
                timed = times if name in CLIENTS else model_times
                for threads in args.threads if args.rounds else ():
                    for row in timed(name, packages, threads, args.rounds):
                        print(
                            f"  {row.client}, {row.mode}, {threads} threads: theirs "
                            f"{row.theirs:.2f} ms, ours {row.ours:.2f} ms, {row.ratio:.2f} times "
                            "faster"
                        )
                        rows.append(row)
            except Absent as reason:
                print(f"{name}: skipped: {reason}")
    first = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
    runner.write([first | vars(row) for row in rows], args.csv)


if __name__ == "__main__":
    main()
