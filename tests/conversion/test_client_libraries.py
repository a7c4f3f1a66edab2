"""Layers of other libraries themselves, installed for the test, against ours in their place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks import clients
from benchmarks.contestants import Absent, Size
from ln_zoo import adopt_, to_dialect
from ln_zoo.conversion.formats.adapters import Adapter

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
def test_results_and_gradients_are_equal_in_float64(name: str, packages: clients.Packages) -> None:
    found = clients.errors(clients.CLIENTS[name], packages, SMALL)
    assert found.largest <= 1e-10


@pytest.mark.parametrize("name", [n for n, c in clients.CLIENTS.items() if c.dialect is not None])
def test_weights_load_into_the_librarys_layer(name: str, packages: clients.Packages) -> None:
    client = clients.CLIENTS[name]
    theirs = client.layer(packages, SMALL)
    ours = client.convert(copy.deepcopy(theirs))
    fresh = client.layer(packages, SMALL)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.load_state_dict(to_dialect(client.dialect, ours))
    x = torch.randn(SMALL.T, SMALL.B, SMALL.I)
    torch.testing.assert_close(client.run(fresh, x), client.run(theirs, x))


@pytest.mark.parametrize("name", clients.MODELS)
def test_whole_models_give_the_same_predictions(name: str, packages: clients.Packages) -> None:
    entry = clients.MODELS[name]
    with entry.made(packages) as model, torch.no_grad():
        keys, theirs = model.state_dict().keys(), copy.deepcopy(model)
        report = adopt_(model, subclasses=True)
        assert [layer.name for layer in report.layers] == ADOPTED[name]
        for call in entry.calls.values():
            torch.testing.assert_close(call(model), call(theirs), **CLOSE)
        if entry.dialect is None:
            assert model.state_dict().keys() == keys
            return
        for parameter in theirs.parameters():
            parameter.zero_()
        theirs.load_state_dict(to_dialect(entry.dialect, model))
        for call in entry.calls.values():
            torch.testing.assert_close(call(theirs), call(model), **CLOSE)


ADOPTED = {
    "xlstm xLSTMBlockStack, one mLSTM and one sLSTM block": ["blocks.1.xlstm.slstm_cell"],
    "torchaudio emformer_rnnt_base": [f"predictor.lstm_layers.{k}" for k in range(3)],
    "NeMo RNNTDecoder": ["prediction.dec_rnn"],
    "pytorch-forecasting DeepAR": ["rnn"],
}


def test_token_by_token(packages: clients.Packages) -> None:
    with clients.MODELS["torchaudio emformer_rnnt_base"].made(packages) as model, torch.no_grad():
        predictor: Any = model
        tokens, lengths = torch.randint(0, 4097, (8, 40)), torch.full((8,), 40)
        expected, _, states = predictor.predict(tokens, lengths, None)
        adopt_(model)
        one_by_one, state = [], None
        for k in range(40):
            output, _, state = predictor.predict(tokens[:, k : k + 1], lengths, state)
            one_by_one.append(output)
        torch.testing.assert_close(torch.cat(one_by_one, 1), expected, **CLOSE)
        torch.testing.assert_close(state, states, **CLOSE)
    with clients.MODELS["NeMo RNNTDecoder"].made(packages) as model:
        decoder: Any = model
        expected, states = decoder.predict(tokens[:, :9] % 1024, state=None)
        adopt_(model)
        assert isinstance(decoder.prediction["dec_rnn"], Adapter)
        found, ours = decoder.predict(tokens[:, :9] % 1024, state=None)
        torch.testing.assert_close(found, expected, **CLOSE)
        torch.testing.assert_close(ours, states, **CLOSE)
        again, _ = decoder.predict(tokens[:, :1] % 1024, state=ours, add_sos=False)
        assert again.shape == (8, 1, 640)


def test_empty_sequences_of_deepar(packages: clients.Packages) -> None:
    with clients.MODELS["pytorch-forecasting DeepAR"].made(packages) as model:
        plain: Any = copy.deepcopy(model.rnn)
        adopt_(model, subclasses=True)
        x, lengths = torch.randn(3, 7, plain.input_size), torch.tensor([7, 0, 3])
        options: dict[str, Any] = {"lengths": lengths, "enforce_sorted": False}
        rnn: Any = model.rnn
        torch.testing.assert_close(rnn(x, **options), plain(x, **options))
