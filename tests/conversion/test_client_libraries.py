"""Layers of other libraries themselves, installed for the test, against ours in their place."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import clients
from benchmarks.contestants import Absent, Size
from ln_zoo import adopt_, to_dialect
from ln_zoo.conversion.adapters import Adapter

pytestmark = pytest.mark.slow
SMALL = Size(9, 4, 8, 12)
#: Rounding of float32 through three layers that carry normalised states.
CLOSE: dict[str, float] = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> clients.Packages:
    return clients.Packages(tmp_path_factory.mktemp("clients"))


@pytest.fixture(autouse=True)
def absent_is_skipped(packages: clients.Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that cannot be reached skips the test."""
    install = packages.install

    def install_or_skip(*requirements: str) -> None:
        try:
            install(*requirements)
        except Absent as reason:
            pytest.skip(str(reason))

    monkeypatch.setattr(packages, "install", install_or_skip)


@pytest.mark.parametrize("name", clients.CLIENTS)
def test_outputs_states_and_gradients_are_equal_in_float64(
    name: str, packages: clients.Packages
) -> None:
    found = clients.errors(clients.CLIENTS[name], packages, SMALL)
    assert found.largest <= 1e-10


@pytest.mark.parametrize("name", [n for n, c in clients.CLIENTS.items() if c.dialect is not None])
def test_weights_load_strictly_into_the_librarys_layer(
    name: str, packages: clients.Packages
) -> None:
    client = clients.CLIENTS[name]
    theirs = client.layer(packages, SMALL)
    ours = client.convert(copy.deepcopy(theirs))
    fresh = client.layer(packages, SMALL)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    assert client.dialect is not None
    fresh.load_state_dict(to_dialect(client.dialect, ours))
    x = torch.randn(SMALL.T, SMALL.B, SMALL.I)
    torch.testing.assert_close(client.run(fresh, x), client.run(theirs, x))


def test_an_rnn_t_of_torchaudio(packages: clients.Packages) -> None:
    """The predictor of the whole model, in one call and token by token."""
    packages.install("torchaudio==2.11.0")
    with packages.path("torchaudio==2.11.0"):
        models = importlib.import_module("torchaudio.models")
    torch.manual_seed(0)
    model = models.emformer_rnnt_base(4097).eval()
    tokens, lengths = torch.randint(0, 4097, (8, 40)), torch.full((8,), 40)
    with torch.no_grad():
        expected, _, states = model.predict(tokens, lengths, None)
        report = adopt_(model)
        assert [layer.name for layer in report.layers] == [
            f"predictor.lstm_layers.{k}" for k in range(3)
        ]
        found, _, ours = model.predict(tokens, lengths, None)
        torch.testing.assert_close(found, expected, **CLOSE)
        torch.testing.assert_close(ours, states, **CLOSE)
        one_by_one, state = [], None
        for k in range(40):
            output, _, state = model.predict(tokens[:, k : k + 1], lengths, state)
            one_by_one.append(output)
        torch.testing.assert_close(torch.cat(one_by_one, 1), expected, **CLOSE)
        fresh = models.emformer_rnnt_base(4097).eval()
        fresh.load_state_dict(to_dialect("torchaudio", model))
        torch.testing.assert_close(fresh.predict(tokens, lengths, None)[0], expected)


def test_a_decoder_of_nemo(packages: clients.Packages) -> None:
    """Its scripted layers, found in the prediction network."""
    packages.install("nemo-toolkit==3.0.0")
    rnn = clients.nemo_rnn(packages)
    abstract = packages.load(
        "nemo.collections.asr.modules.rnnt_abstract", nemo__core={"NeuralModule": nn.Module}
    )
    rnnt = packages.load(
        "nemo.collections.asr.modules.rnnt",
        nemo__collections__common__parts={"rnn": rnn},
        nemo__collections__asr__modules={"rnnt_abstract": abstract},
        omegaconf={},
        hydra={},
    )
    torch.manual_seed(0)
    network = {"pred_hidden": 32, "pred_rnn_layers": 2}
    decoder = rnnt.RNNTDecoder(network, vocab_size=20, normalization_mode="layer").eval()
    decoder.is_adapter_available = lambda: False
    tokens = torch.randint(0, 20, (4, 9))
    expected, states = decoder.predict(tokens, state=None)
    report = adopt_(decoder)
    assert [layer.name for layer in report.layers] == ["prediction.dec_rnn"]
    assert isinstance(decoder.prediction["dec_rnn"], Adapter)
    found, ours = decoder.predict(tokens, state=None)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(ours, states, **CLOSE)
    again, _ = decoder.predict(tokens[:, :1], state=ours, add_sos=False)
    assert again.shape == (4, 1, 32)
    fresh = rnnt.RNNTDecoder(network, vocab_size=20, normalization_mode="layer")
    fresh.load_state_dict(to_dialect("torchscript", decoder))


@pytest.fixture
def forecasting(packages: clients.Packages) -> Iterator[Any]:
    requirements = ("pytorch-forecasting==1.8.0", "scikit-base==1.2.0", "pandas==2.3.3",
                    "python-dateutil==2.9.0.post0", "pytz==2025.2", "tzdata==2025.2",
                    "six==1.17.0")  # fmt: skip
    packages.install(*requirements)
    with packages.path(*requirements):
        yield importlib.import_module("pytorch_forecasting")


def test_deepar_of_pytorch_forecasting(forecasting: Any) -> None:
    """A subclass of torch's LSTM with sequences of length 0, inside a LightningModule."""
    pandas = importlib.import_module("pandas")
    series = torch.arange(30.0).sin().repeat(2).tolist()
    table = pandas.DataFrame({"y": series, "t": [*range(30)] * 2, "who": ["a"] * 30 + ["b"] * 30})
    dataset = forecasting.TimeSeriesDataSet(
        table, time_idx="t", target="y", group_ids=["who"], max_encoder_length=8,
        min_encoder_length=1, max_prediction_length=4, time_varying_unknown_reals=["y"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = forecasting.DeepAR.from_dataset(dataset, hidden_size=10, rnn_layers=2).eval()
    batch, _ = next(iter(dataset.to_dataloader(train=False, batch_size=16)))
    keys = model.state_dict().keys()

    def predict() -> Tensor:
        torch.manual_seed(1)
        with torch.no_grad():
            found: Tensor = model(batch)["prediction"]
        return found

    plain, expected = copy.deepcopy(model.rnn), predict()
    report = adopt_(model, subclasses=True)
    assert [layer.name for layer in report.layers] == ["rnn"]
    assert model.state_dict().keys() == keys
    torch.testing.assert_close(predict(), expected, **CLOSE)
    x, lengths = torch.randn(3, 7, plain.input_size), torch.tensor([7, 0, 3])
    options: dict[str, Any] = {"lengths": lengths, "enforce_sorted": False}
    torch.testing.assert_close(model.rnn(x, **options), plain(x, **options))
