"""The inventory of decoders is complete, and says what is true."""

from __future__ import annotations

import pytest
from fuzz import target as limits
from fuzz.inventory import INSIDE, LISTED, TARGETS, documentation, entered, function_of, missing
from fuzz.target import FOUND, Finding, Target, check
from source_tree import PACKAGES, Module, modules

from txnbuffer.errors import InvalidRequest


def test_every_decoder_is_listed() -> None:
    assert missing(modules(*PACKAGES)) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def decode_thing(data): ...", ["x.y.decode_thing"]),
        ("class A:\n    def parse(self, text): ...", ["x.y.A.parse"]),
        ("def thing(data):\n    return json.loads(data)", ["x.y"]),
        ("def encode(data): ...", []),
    ],
)
def test_a_decoder_that_is_not_listed_is_seen(text: str, found: list[str]) -> None:
    assert missing([Module("x/y.py", text)]) == found


def test_reasons_are_of_what_exists() -> None:
    known = {module.name for module in modules(*PACKAGES)}
    nested = "broker_io.block._of_columns.decode_columns"
    assert [name for name in INSIDE if name not in known and name != nested and not callable(function_of(name))] == []
    assert not INSIDE.keys() & LISTED


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_enter_the_decoders(name: str) -> None:
    target = TARGETS[name]
    assert target.seeds()
    names = {f"{function_of(one).__module__}.{function_of(one).__qualname__}" for one in target.decoders}
    assert names - entered(target) == set()


@pytest.mark.parametrize("name", TARGETS)
def test_errors_are_those_of_the_docstrings(name: str) -> None:
    target = TARGETS[name]
    text = documentation(target)
    assert [error.__name__ for error in target.errors if error.__name__ not in text] == []


def test_found_inputs_belong_to_targets() -> None:
    assert {path.name for path in FOUND.iterdir()} <= TARGETS.keys()


class TestCheck:
    """Each kind of broken promise is a finding."""

    def target(self, decode: limits.Decode) -> Target:
        return Target("t", decode, (), (InvalidRequest,), lambda: [b""])

    def test_an_undocumented_error(self) -> None:
        def decode(data: bytes) -> object:
            raise KeyError(data) if data else InvalidRequest("empty")

        check(self.target(decode), b"")
        with pytest.raises(Finding, match="KeyError"):
            check(self.target(decode), b"x")

    def test_memory(self) -> None:
        check(self.target(lambda data: bytes(60 * limits.MIB)), b"x")
        with pytest.raises(Finding, match="MiB"):
            check(self.target(lambda data: bytes(70 * limits.MIB)), b"x")
        with pytest.raises(Finding, match="MemoryError"):
            check(self.target(lambda data: bytes(2**34)), b"x")

    def test_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "SECONDS", 0.01)
        check(self.target(len), b"x")
        with pytest.raises(Finding, match="s for"):
            check(self.target(lambda data: sum(range(2_000_000))), b"x")

    def test_repaired_checksums(self) -> None:
        target = Target("t", lambda data: 1 // (data != b"good"), (), (), list, lambda _: b"good")
        with pytest.raises(Finding):
            check(target, b"bad")
