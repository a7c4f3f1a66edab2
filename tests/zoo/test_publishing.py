"""Publishing to a hub on loopback and loading from it by id."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
import torch
from zoo_support import PREPROCESSING, MakeCard, StubHub, edit, read, refuses, save, tiny

from ln_zoo.zoo import catalog, load, publish
from ln_zoo.zoo.catalog import CARD_FILES

REPO = "someone/mlp-layernorm"


@pytest.mark.parametrize("lfs_files", [set(), {"model.safetensors"}], ids=["inline", "lfs"])
def test_publish_and_load_by_hub_id_give_the_same_model(
    tmp_path: Path, stub_hub: StubHub, lfs_files: set[str]
) -> None:
    stub_hub.lfs_files = lfs_files
    (tmp_path / "words.json").write_text('["a", "b"]')
    files = {"words.json": tmp_path / "words.json"}
    folder = tmp_path / "mlp.layernorm"
    save(folder, tiny(), preprocessing=PREPROCESSING, files=files)
    (folder / "scratch.txt").write_text("not part of the card")

    sent = publish(str(folder), REPO, token="token-of-tests", private=True)

    stored = stub_hub.commits[stub_hub.branches[REPO]["main"]]
    assert stored == {n: (folder / n).read_bytes() for n in (*CARD_FILES, "words.json")}
    assert sent.files == {name: len(content) for name, content in stored.items()}
    assert sent.commit == stub_hub.branches[REPO]["main"]
    assert sent.url == f"{stub_hub.url}/{REPO}/commit/{sent.commit}"
    assert stub_hub.private[REPO]
    for request in ("POST /api/repos/create", f"POST /api/models/{REPO}/commit/main"):
        assert stub_hub.tokens[request] == "Bearer token-of-tests"
    assert any(r.startswith("PUT /lfs/") for r in stub_hub.requests) == bool(lfs_files)

    model = load(REPO)
    torch.testing.assert_close(model.state_dict(), tiny().state_dict(), rtol=0, atol=0)
    assert model.card.folder.name == sent.commit
    assert (model.card.folder / "words.json").read_text() == '["a", "b"]'
    assert not model.training


def test_branch_and_pinned_revision(make_card: MakeCard, stub_hub: StubHub) -> None:
    first = publish(str(make_card()), REPO)
    second = publish(
        str(make_card("other", card={"license": "mit", "notes": ["newer"]})), REPO, revision="next"
    )

    assert load(REPO).card.results["card"]["notes"] == ["a model for tests"]
    assert load(REPO, revision="next").card.results["card"]["notes"] == ["newer"]
    assert load(REPO, revision=first.commit).card.name == "mlp.layernorm"
    assert load(REPO, revision=second.commit).card.name == "other"
    refuses("revision 'gone'", load, REPO, revision="gone")


def test_offline_uses_the_cache_and_says_when_it_is_empty(
    make_card: MakeCard, stub_hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(str(make_card()), REPO)
    load(REPO)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = len(stub_hub.requests)

    assert load(REPO).card.name == "mlp.layernorm"
    refuses("HF_HUB_OFFLINE", load, REPO, cache_dir=tmp_path / "empty")
    assert len(stub_hub.requests) == asked


def test_repositories_that_are_not_there(
    make_card: MakeCard, stub_hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses("'someone/nothing'", load, "someone/nothing")
    stub_hub.branches[REPO] = {"main": "a" * 40}
    stub_hub.commits["a" * 40] = {"readme.txt": b"nothing here"}
    refuses(r"config\.json", load, REPO)
    folder = str(make_card())
    refuses("'no/such/id'", publish, folder, "no/such/id")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    refuses(r"mlp\.layernorm", publish, folder, REPO)


def test_dry_run_sends_nothing(make_card: MakeCard, stub_hub: StubHub) -> None:
    would = publish(str(make_card()), REPO, dry_run=True)
    assert set(would.files) == set(CARD_FILES)
    assert (would.commit, would.url) == (None, f"{stub_hub.url}/{REPO}")
    assert stub_hub.requests == []


def test_damaged_or_outdated_cards_are_not_published(
    make_card: MakeCard, stub_hub: StubHub
) -> None:
    folder = make_card()
    readme = folder / "README.md"
    text = readme.read_text()
    readme.write_text(text.replace("5.25 %", "1.25 %"))
    refuses(r"README\.md.*config\.json", publish, str(folder), REPO)
    readme.write_text(text)
    first, *others = read(folder / "results.json")["metrics"]
    edit(folder / "results.json", metrics=[first | {"value": 0.0125}, *others])
    refuses(r"README\.md", publish, str(folder), REPO)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    refuses("sha256", publish, str(folder), REPO)
    assert stub_hub.requests == []


def test_weights_that_the_wheel_leaves_out_come_from_the_hub(
    tmp_path: Path, make_card: MakeCard, stub_hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found under LN_ZOO_HUB, and refused unless they are those that the package's card names."""
    folder = make_card()
    publish(str(folder), f"somebody/{folder.name}")
    other = save(tmp_path / "theirs" / folder.name, tiny(seed=1), preprocessing=PREPROCESSING)
    publish(str(other), f"stranger/{folder.name}")
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(catalog, "SHIPPED", (folder.parent,))

    refuses("LN_ZOO_MODELS", load, folder.name)
    monkeypatch.setenv("LN_ZOO_HUB", "somebody")
    cache = tmp_path / "cache"
    model = load(folder.name, cache_dir=cache)
    assert model.card.folder == folder
    assert cache in model.card.path("model.safetensors").parents
    # Unchanged it keeps its card. It is not fetched a second time.
    asked = len(stub_hub.requests)
    again = type(model).from_pretrained(folder.name, cache_dir=cache)
    saved = again.save_pretrained(tmp_path / "saved" / folder.name)
    assert (saved / "results.json").read_bytes() == (folder / "results.json").read_bytes()
    assert not [r for r in stub_hub.requests[asked:] if "resolve" in r and "safetensors" in r]
    sent = publish(folder.name, "someone/again")
    assert stub_hub.commits[sent.commit] == {n: (saved / n).read_bytes() for n in CARD_FILES}
    monkeypatch.setenv("LN_ZOO_HUB", "stranger")
    refuses(r"sha256.*config\.json", load, folder.name)
