"""JSON and YAML from outside become plain values, within bounds."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from marlinq.core.plain_values import MAX_DEPTH, MAX_YAML_BYTES, check_depth, load_json, load_yaml

BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: 1\nb: [x, yes, no, 1.5, ~]", {"a": 1, "b": ["x", True, False, 1.5, None]}),
        ("{a: {b: [[1]]}}", {"a": {"b": [[1]]}}),
        ("no: 'no'\n1: \"2\"", {"no": "no", "1": "2"}),
        ("day: 2001-01-01", {"day": "2001-01-01"}),
        ("sparsity: 2:4", {"sparsity": "2:4"}),
        ("a: 1:30.5", {"a": "1:30.5"}),
        ("<<: {a: 1}", {"<<": {"a": 1}}),
        ("n: 0x1F", {"n": 31}),
    ],
)
def test_yaml_becomes_plain_values(text: str, value: object) -> None:
    assert load_yaml(text.encode()) == value


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(PLAIN)
def test_plain_values_are_read_as_the_libraries_read_them(value: object) -> None:
    try:
        text = yaml.safe_dump(value, allow_unicode=True).encode()
    except UnicodeEncodeError:
        return  # half of a surrogate pair
    assert load_yaml(text) == yaml.safe_load(text)
    assert load_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"license: !!bool x", "line 1: the tag 'tag:yaml.org,2002:bool' is not supported"),
        (b"a: !!python/object/apply:os.system [id]", "tag"),
        (b"a: ! 1", "tag"),
        (BOMB, "line 1: anchors and aliases are not supported"),
        (b"a: *a", "aliases"),
        (b"seed: 0x" + b"f" * 5_000, "5002 characters"),
        (b"seed: " + b"9" * 4_300, "4300 characters"),
        (b"[" * 500, "nested deeper"),
        (b"- " * 500 + b"a", "nested deeper"),
        (b"a: 1\na: 2", "line 2: the key 'a' stands twice"),
        (b"? [a]\n: b", "expected a name as key"),
        (b"--- 1\n--- 2\n", "a second document"),
        (b"\xff", "utf-8"),
        (b"\x00", "special characters"),
        (b"a: b: c", "mapping values are not allowed"),
        (b"- a\n" * 30_000, "more than 20000 values"),
        (b"x" * (MAX_YAML_BYTES + 1), "at most 262144"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_yaml_beyond_the_bounds_is_refused(text: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load_yaml(text)


def test_json_beyond_the_bounds_is_refused() -> None:
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    load_json(deepest)
    for text in (b"[%s]" % deepest, b'{"a":' * 101 + b"1" + b"}" * 101, b"[" * 1_000_000):
        with pytest.raises(ValueError, match="nested deeper than 100"):
            load_json(text)
    with pytest.raises(ValueError, match="41 digits"):
        load_json(b"1" * 41)
    assert load_json(b"1" * 40) == int("1" * 40)


def test_brackets_in_strings_are_no_depth() -> None:
    for text in ("[" * 500, '\\"[[' * 300, "]{" * 300, '"'):
        encoded = json.dumps({"template": text, "more": [text]}).encode()
        check_depth(encoded)
        assert load_json(encoded)["more"] == [text]
