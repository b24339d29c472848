"""Reading YAML and JSON, with positions, and refusing what cannot be trusted."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from rlightning.api.manifests import LoadedManifest, Position, load_manifests, load_text
from rlightning.errors import ManifestError


def one(text: str | bytes) -> LoadedManifest:
    (loaded,) = load_text(text, "f.yaml")
    return loaded


def complaint(text: str | bytes) -> str:
    return str(one(text).problems[0])


def test_every_field_has_the_position_of_its_key_and_value() -> None:
    loaded = one("a: 1\nb:\n  - c: x\n    d: {e: 2}\n")
    assert loaded.value == {"a": 1, "b": [{"c": "x", "d": {"e": 2}}]}
    assert loaded.keys[("b",)] == Position(2, 1)
    assert loaded.values[("b", 0)] == Position(3, 5)
    assert loaded.keys[("b", 0, "d")] == Position(4, 5)
    assert loaded.values[("b", 0, "d", "e")] == Position(4, 12)


def test_documents_are_read_one_by_one_and_empty_ones_left_out() -> None:
    first, second = load_text("# nothing\n---\na: 1\n---\n---\n# still nothing\n---\nb: 2\n...\n")
    assert (first.value, second.value) == ({"a": 1}, {"b": 2})
    assert second.start == Position(8, 1)


def test_documents_before_a_broken_one_are_read() -> None:
    good, broken = load_text("a: 1\n---\nb: [1, 2\nc: 3\n", "f.yaml")
    assert good.value == {"a": 1}
    assert str(broken.problems[0]).startswith("f.yaml:4:2: is not YAML: ")


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n", b"\xef\xbb\xbf"])
def test_a_file_without_a_manifest_says_so(text: str | bytes) -> None:
    assert complaint(text) == "f.yaml:1:1: holds no manifest (write an RLJob into it)"


def test_a_byte_order_mark_is_skipped_and_other_encodings_are_refused() -> None:
    assert one(b"\xef\xbb\xbfa: 1").value == {"a": 1}
    assert complaint(b"a: 1\nb: \xe9\n") == "f.yaml:2:1: is not UTF-8 (byte 0xe9) (save it as UTF-8)"
    assert "is not YAML" in complaint("a: \x00\n")


def test_json_may_be_indented_with_tabs_and_escape_what_it_likes() -> None:
    value = {"a": [1, 2.5, "\t\\/"], "b": {"c": None, "clé": "𝄞 \\ud834"}}
    text = json.dumps(value, indent="\t").replace("/", "\\/")
    assert "\\ud834\\udd1e" in text
    loaded = one(text)
    assert loaded.value == value
    assert loaded.problems == []
    assert loaded.keys[("b",)] == Position(7, 2)
    assert one('{"a":1,"b":"x"}').value == {"a": 1, "b": "x"}


def test_a_key_set_twice_names_the_first_line() -> None:
    assert complaint("a:\n  x: 1\n  z: 2\n  x: 3\n") == (
        "f.yaml:4:3: a.x: is set twice, first in line 2 (remove one of the two)"
    )


def test_aliases_and_merges_are_followed() -> None:
    loaded = one("base: &b {v: 1, w: [1]}\nother: &o {w: 2, z: 3}\nuse:\n  <<: [*b, *o]\n  z: 4\ncopy: *b\n")
    assert loaded.value["use"] == {"v": 1, "w": [1], "z": 4}  # the first in the list wins, the mapping's own over all
    assert loaded.value["copy"] == {"v": 1, "w": [1]}
    assert loaded.keys[("use", "z")] == Position(5, 3)
    assert loaded.problems == []


def test_a_merge_after_other_keys_is_refused_because_readers_disagree() -> None:
    text = "b: &b {x: 1}\nuse: {x: 2, <<: *b}\n"
    assert complaint(text) == ("f.yaml:2:13: << stands after other keys, where YAML readers disagree (put << first)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [*a]", "f.yaml:1:8: the alias *a contains itself"),
        ("a: *b", "the alias *b names no anchor"),
        ("a: !!python/object:os.system x", "the YAML tag tag:yaml.org,2002:python/object:os.system is not supported"),
        ("a: !!binary aGk=", "is not supported"),
        ("? [a]\n: b", "a key must be text"),
        ("a: {<<: 3}", "<< takes a mapping or a list of mappings"),
        ("[" * 100_000, " nest"),
        ("a: " + "{a: " * 70, "is nested deeper than 64 levels"),
        (" " * (1 << 20) + "a: 1", "is larger than 1 MiB"),
    ],
    ids=["cycle", "no anchor", "python tag", "binary", "complex key", "merge of a scalar", "deep", "deep maps", "huge"],
)
def test_what_cannot_be_trusted_is_refused_quickly(text: str, said: str) -> None:
    start = time.process_time()
    assert said in complaint(text)
    assert time.process_time() - start < 2


def test_an_alias_bomb_is_refused_before_it_is_expanded() -> None:
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 20))
    start = time.process_time()
    assert "has more than 50000 values" in complaint("l0: &l0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + levels)
    assert time.process_time() - start < 2


def test_a_string_tag_keeps_text() -> None:
    assert one("a: !!str 010").value == {"a": "010"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a: 010",
            'f.yaml:1:4: a: 010 is read as 8 by kubectl (value 010; quote it, "010", if it is text, or write 8)',
        ),
        ("a: 1_000", "1_000 is read as 1000 by kubectl"),
        ("a: on", 'on is read as true by kubectl (value on; quote it, "on", if it is text, or write true)'),
        ("a: .inf", ".inf is read as no number that JSON can carry by kubectl"),
        ("on: 1", 'f.yaml:1:1: on: the key on is not text in YAML but true (quote it: "on")'),
    ],
)
def test_forms_that_people_misread_say_quote_it(text: str, said: str) -> None:
    assert said in complaint(text)


@pytest.mark.parametrize(
    ("text", "value"),
    # What go-yaml v2 makes of them; tests/integration/test_crds.py compares with kubectl itself.
    [("3e-4", 3e-4), ("1e6", 1_000_000), ("0b11", 3), ("12:30", "12:30"), ("2024-01-01", "2024-01-01"), ("1.0", 1)],
)
def test_scalars_have_the_value_that_kubectl_stores(text: str, value: Any) -> None:
    read = one(f"a: {text}").value["a"]
    assert (type(read), read) == (type(value), value)


def test_a_dash_reads_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(b"a: 1\n")

    monkeypatch.setattr("sys.stdin", Stdin)
    (loaded,) = load_manifests("-")
    assert (loaded.file, loaded.value) == ("-", {"a": 1})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ManifestError, match=r"nowhere\.yaml: cannot be read: No such file or directory\. Give the path"
    ):
        load_manifests(tmp_path / "nowhere.yaml")
    with pytest.raises(ManifestError, match="Is a directory"):
        load_manifests(tmp_path)
