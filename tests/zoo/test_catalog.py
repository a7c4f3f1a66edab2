"""Lists of published models, without torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from zoo_support import RESULTS, MakeCard, edit, read, refuses

from ln_zoo.cli import listing
from ln_zoo.zoo import catalog
from ln_zoo.zoo.catalog import describe, find, list_models, read_card


def test_cards_being_written_and_other_folders_are_passed_over(models_folder: Path) -> None:
    before = list_models()
    (models_folder / ".mlp.draft-x1").mkdir()
    (models_folder / ".mlp.draft-x1" / "config.json").write_text("{}")
    (models_folder / "notes").mkdir()
    assert list_models() == before


def test_filters(models_folder: Path) -> None:
    assert list_models() == ["mlp.batchnorm", "mlp.layernorm", "mlp.none"]
    assert list_models("*.none") == ["mlp.none"]
    assert list_models("mlp.[bl]*norm", dataset="digits") == ["mlp.batchnorm", "mlp.layernorm"]
    assert list_models(norm="layernorm", dataset="Digits") == ["mlp.layernorm"]
    assert "mlp.none" in list_models(dataset="mnist")
    assert list_models(model="MLPClassifier", norm="Identity", dataset="mnist") == ["mlp.none"]
    assert list_models(model="DRAW") == []
    assert list_models("draw*") == []


def test_describe(models_folder: Path) -> None:
    card = describe("mlp.batchnorm")
    assert (card.name, card.model, card.norm) == ("mlp.batchnorm", "MLPClassifier", "BatchNorm")
    # 64-16-10 with weights, biases, and a gain per normalised sum: BN acts on the logits too.
    assert card.parameters == 64 * 16 + 16 + 16 + 16 * 10 + 10 + 10
    assert card.preprocessing == {"scale": 16, "image_shape": [1, 8, 8]}
    assert card.datasets == ["digits"]
    assert [metric["name"] for metric in card.metrics] == ["error", "nll"]


def test_unknown_names_get_suggestions(models_folder: Path, monkeypatch) -> None:
    refuses(r"'mlp.layer_norm'.*mlp\.layernorm", find, "mlp.layer_norm")
    refuses(r"mlp\.batchnorm, mlp\.layernorm, mlp\.none", find, "draw")
    monkeypatch.chdir(models_folder)
    (models_folder / "my_own_run").mkdir()
    refuses(r"\./my_own_run", find, "my_own_run")


def test_no_models_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_roots", lambda: [tmp_path])
    assert list_models() == []
    assert "no published models" in listing.list_text()
    assert "no published models" in listing.cards_text()
    refuses("LN_ZOO_MODELS", find, "mlp.layernorm")


def test_models_variable_must_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LN_ZOO_MODELS", str(tmp_path / "gone"))
    refuses(r"LN_ZOO_MODELS.*gone'", list_models)


def test_text_for_the_command_line(models_folder: Path) -> None:
    lines = listing.list_text("mlp.*", dataset="digits").splitlines()
    assert lines[0].split("  ")[0] == "name"
    assert [cell.strip() for cell in lines[1].split("  ") if cell] == [
        "mlp.batchnorm", "MLPClassifier", "BatchNorm", "digits", "error 5.25 %", "1,236",
    ]  # fmt: skip
    assert len(lines) == 3
    assert listing.list_text("draw*").startswith("no model matches; there are ")
    folder = models_folder / "mlp.none"
    assert f"mlp.none       {folder}" in listing.cards_text().splitlines()
    assert listing.cards_text(str(folder)) == (folder / "README.md").read_text()
    refuses(r"'mlp\.nothing'", listing.cards_text, "mlp.nothing")
    refuses(r"README\.md", listing.cards_text, str(models_folder / "elsewhere"))


def test_a_damaged_card_keeps_its_line(models_folder: Path) -> None:
    (models_folder / "mlp.none" / "results.json").write_text("{")
    text = listing.list_text()
    assert "mlp.layernorm  MLPClassifier" in text
    assert f"mlp.none: {models_folder / 'mlp.none' / 'results.json'} cannot be read" in text
    refuses(r"results\.json.*JSON", list_models, norm="Identity")


BOTH = ("config", "results")
HUGE = {**RESULTS["metrics"][0], "value": 10**400}
FILE = {"sha256": "", "size": 1}
FILES = {"model.safetensors": FILE}


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        *((f"{name}.json", {"format_version": 2}, r"format_version.* 2") for name in BOTH),
        *((f"{name}.json", {"colour": "red"}, "'colour'") for name in BOTH),
        ("config.json", {"parameters": "many"}, r"parameters.*int.*'many'"),
        ("config.json", {"parameters": True}, r"parameters.*int.*True"),
        ("config.json", {"files": {}}, r"files.*model\.safetensors"),
        ("config.json", {"files": {**FILES, "../x": FILE}}, r"files.*'\.\./x'"),
        ("config.json", {"files": {**FILES, "/x": FILE}}, "files.*'/x'"),
        ("config.json", {"files": {**FILES, "*": FILE}}, r"files.*'\*'"),
        ("config.json", {"files": {"x": {"sha256": ""}}}, r"files.*'x'.*'size'"),
        ("config.json", {"init_args": {"norm": "LayerNorm"}}, r"norm.*'LayerNorm'"),
        ("config.json", {"init_args": {"norm": {"class_path": "a"}}}, r"norm.*class_path"),
        ("config.json", {"format_version": 0}, r"format_version.* 0"),
        ("results.json", {"format_version": -1}, r"format_version.* -1"),
        ("config.json", {"name": "../mlp"}, r"'\.\./mlp'"),
        ("config.json", {"name": "mlp\x1b[2J"}, r"'mlp\\x1b\[2J'"),
        ("config.json", {"name": "a" * 101}, "'aaa"),
        ("config.json", {"parameters": -1}, "parameters.* -1"),
        ("config.json", {"parameters": 10**30}, "parameters.* 1000000"),
        ("config.json", {"\x1b[2J": 1}, r"'\\x1b\[2J'"),
        ("results.json", {"metrics": [HUGE]}, r"metrics\[0\]: value.* 1000"),
        ("results.json", {"metrics": [{"name": "error"}]}, r"metrics.*'value'"),
    ],
)
def test_malformed_cards_are_named(
    make_card: MakeCard, file: str, change: dict[str, object], message: str
) -> None:
    folder = make_card()
    edit(folder / file, **change)
    assert str(folder / file) in refuses(message, read_card, folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested|JSON"),
        ('{"a": ' + "[" * 60 + "]" * 60 + "}", "50"),
        ('{"name": "a", "name": "b"}', "'name'"),
        ('{"a": [{"b": 1, "b": 1}]}', "'b'"),
        ('{"value": NaN}', "NaN"),
        ('{"value": -Infinity}', "-Infinity"),
        ('{"value": 1e999}', "1e999"),
        ("1" * 5000, "cannot be read as JSON"),
        (" " * 10_000_001, "10,000,000"),
        ("\xe9", "cannot be read as JSON"),
    ],
)
def test_json_that_means_harm(make_card: MakeCard, text: str, message: str) -> None:
    folder = make_card()
    (folder / "results.json").write_text(text, encoding="latin-1")
    assert "\n" not in refuses(message, read_card, folder)


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "broken link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("name", ["config.json", "results.json", "README.md"])
def test_what_is_no_regular_file_is_refused_at_once(
    models_folder: Path, name: str, what: str
) -> None:
    path = models_folder / "mlp.none" / name
    path.unlink()
    UNREADABLE[what](path)
    if name == "README.md":
        refuses(name, listing.cards_text, "mlp.none")
        return
    refuses(name, read_card, path.parent)
    if os.path.lexists(models_folder / "mlp.none/config.json"):
        assert f"mlp.none: {path} " in listing.list_text()


def test_faulty_cards_have_a_line_each_and_others_are_listed(models_folder: Path) -> None:
    """Whatever is wrong with them, and with any filter."""
    good = listing.list_text("mlp.layernorm").splitlines()
    whole = (models_folder / "mlp.none" / "config.json").read_text()
    faults = {
        "deep": "[" * 100_000,
        "twice": whole.replace("{", '{"name": "x", ', 1),
        "zero": whole.replace('"format_version": 1', '"format_version": 0'),
        "escape\x1b[2J\nline": "{",
    }
    for name, text in faults.items():
        shutil.copytree(models_folder / "mlp.none", models_folder / name)
        (models_folder / name / "config.json").write_text(text)
    for filters in ({}, {"norm": "LayerNorm"}):
        lines = listing.list_text(**filters).splitlines()
        assert [line.split() for line in lines[:1]] == [good[0].split()]
        assert [line for line in lines if line.split() == good[1].split()]
        told = [line for line in lines if "config.json" in line]
        assert len(told) == len(faults)
        assert all(line.isprintable() for line in lines)
    assert listing.list_text("deep").startswith("deep: ")


def test_nothing_a_terminal_obeys_is_printed(models_folder: Path) -> None:
    readme = models_folder / "mlp.none" / "README.md"
    readme.write_bytes("a\x1b]0;title\x07\r\n\tb\x9b2J\u202ec\n".encode())
    assert listing.cards_text("mlp.none") == "a\\x1b]0;title\\x07\n\tb\\x9b2J\\u202ec\n"
    (models_folder / "mlp.none").rename(models_folder / "mlp\x1b[2J")
    assert all(line.isprintable() for line in listing.cards_text().splitlines())
    assert all(line.isprintable() for line in listing.list_text("no*").splitlines())
    assert refuses("no such", describe, "no such").isprintable()
    readme = models_folder / "mlp.layernorm" / "README.md"
    readme.write_bytes(b"\xff")
    refuses(r"README\.md", listing.cards_text, "mlp.layernorm")


def test_the_table_of_the_readme_has_the_first_metrics(models_folder: Path) -> None:
    path = models_folder / "mlp.none" / "results.json"
    first = read(path)["metrics"][0] | {"unit": "nats", "value": 0.5}
    for names, end in (("abcde", "e 0.5 nats |"), ("abcdef", "e 0.5 nats, ... |")):
        edit(path, metrics=[first | {"name": name} for name in names])
        assert f"| a 0.5 nats, b 0.5 nats, c 0.5 nats, d 0.5 nats, {end}" in (
            listing.markdown_table("mlp.none")
        )


def test_a_metric_may_say_anything_in_one_line(models_folder: Path) -> None:
    path = models_folder / "mlp.none" / "results.json"
    first, *others = read(path)["metrics"]
    strange = first | {"name": "error\x1b[2J\nof", "unit": "x" * 500}
    edit(path, metrics=[strange, *others])
    lines = listing.list_text().splitlines()
    assert len(lines) == 4
    assert all(line.isprintable() and len(line) < 250 for line in lines)
