"""The policy: its cells against a naive model, and an error for each mistake."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnbuffer.access.limits import PrincipalLimits
from txnbuffer.access.policy import (
    ALLOWED,
    EVERYTHING,
    NAMED,
    SERVICE,
    AccessRole,
    Action,
    Policy,
    ResourceKind,
    ResourceName,
    check_principal,
    parse_policy,
)
from txnbuffer.errors import InvalidPolicy

NAMES = ["a", "ab", "abc", "b", "ba", "a-partition-0"]
PATTERNS = st.lists(st.sampled_from([*NAMES[:-1], "a*", "ab*", "b*", "*"]), min_size=1, max_size=3, unique=True)
ROLES = st.lists(st.sampled_from([role.value for role in AccessRole]), min_size=1, max_size=4, unique=True)
RULES = st.fixed_dictionaries(
    {"principals": PATTERNS, "roles": ROLES, "topics": PATTERNS, "producers": PATTERNS, "groups": PATTERNS}
)


def toml(rules: list[dict[str, list[str]]]) -> str:
    return "\n".join("[[allow]]\n" + "\n".join(f"{key} = {value}" for key, value in rule.items()) for rule in rules)


def without_useless(rule: dict[str, list[str]]) -> dict[str, list[str]]:
    """A rule without the keys that its roles have no use for, which are errors."""
    kinds = {kind for role in rule["roles"] for _, kind in ALLOWED[AccessRole(role)]}
    useless = {f"{kind.value}s" for kind in (ResourceKind.PRODUCER, ResourceKind.GROUP)} - {
        f"{kind.value}s" for kind in kinds
    }
    return {key: value for key, value in rule.items() if key not in useless}


def fits(patterns: list[str], name: str) -> bool:
    return any(name == one or (one.endswith("*") and name.startswith(one[:-1])) for one in patterns)


def naive(rules: list[dict[str, list[str]]], principal: str, action: str, kind: str, name: str) -> bool:
    """The table of the module's text, cell by cell."""
    name = name.partition("-partition-")[0] if kind == "topic" else name
    for rule in rules:
        if not fits(rule["principals"], principal):
            continue
        for role in rule["roles"]:
            cells = {
                "read": ["read topic"],
                "write": ["write topic", "use producer"],
                "process": ["read topic", "join group"],
                "operate": ["operate topic", "operate group"],
            }[role]
            if f"{action} {kind}" in cells and fits(rule.get(f"{kind}s", []), name):
                return True
            if kind == "service" and (action == "observe" or (role == "operate" and "*" in rule["topics"])):
                return True
    return False


@given(st.lists(RULES.map(without_useless), min_size=1, max_size=3))
def test_each_cell_is_that_of_the_naive_model(rules: list[dict[str, list[str]]]) -> None:
    policy = parse_policy(toml(rules), "policy.toml")
    resources = [SERVICE, *(ResourceName(kind, name) for kind in NAMED for name in NAMES)]
    for principal, action, resource in product(["a", "ab", "c"], Action, resources):
        expected = naive(rules, principal, action.value, resource.kind.value, resource.name)
        assert policy.allows(principal, action, resource) == expected, (principal, action, resource)


def test_without_authentication_everything_is_allowed() -> None:
    for action, kind in [
        *ALLOWED[AccessRole.READ],
        *ALLOWED[AccessRole.WRITE],
        *ALLOWED[AccessRole.PROCESS],
        *ALLOWED[AccessRole.OPERATE],
    ]:
        assert EVERYTHING.allows("anonymous", action, ResourceName(kind, "x"))
    assert EVERYTHING.allows("anonymous", Action.OPERATE, SERVICE)


def test_an_empty_policy_allows_nothing() -> None:
    policy = Policy()
    assert not any(policy.allows("a", action, ResourceName(kind, "x")) for action in Action for kind in ResourceKind)


def test_limits_of_the_first_rule_that_names_the_principal_count() -> None:
    text = """
        [[allow]]
        principals = ["*"]
        roles = ["read"]
        topics = ["*"]
        [[limit]]
        principals = ["batch-1"]
        sessions = 5
        [[limit]]
        principals = ["batch-*"]
        sessions = 7
        requests_per_second = 0.5
    """
    policy, defaults = parse_policy(text, "policy.toml"), PrincipalLimits(sessions=1, streams=9)
    assert policy.limits("batch-1", defaults) == PrincipalLimits(sessions=5, streams=9, requests_per_second=0.5)
    assert policy.limits("batch-2", defaults) == PrincipalLimits(sessions=7, streams=9, requests_per_second=0.5)
    assert policy.limits("other", defaults) == defaults


GOOD = 'principals = ["a"]\nroles = ["write"]\ntopics = ["a"]\n'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "policy.toml has no rule, so it denies everything: begin a rule with [[allow]]"),
        ("[[allow]", "policy.toml is not valid TOML"),
        ("[allow]\n" + GOOD, "policy.toml: 'allow' must be tables: begin each with [[allow]]"),
        ("[[alow]]\n" + GOOD, "policy.toml: unknown key 'alow'; did you mean 'allow'?"),
        ("[[allow]]\n" + GOOD + "topic = []", "[[allow]] number 1: unknown key 'topic'; did you mean 'topics'?"),
        (
            "[[allow]]\nprincipals = ['a']\nroles = ['read']",
            "[[allow]] number 1: the role 'read' allows nothing here: add topics",
        ),
        ("[[allow]]\nprincipals = ['a']\nroles = ['wrte']", "unknown role 'wrte'; did you mean 'write'?"),
        ("[[allow]]\nprincipals = ['a']\nroles = 'read'", "roles must be a list of at least one text, got 'read'"),
        ("[[allow]]\nprincipals = ['a']\nroles = []", "roles must be a list of at least one text, got []"),
        ("[[allow]]\nprincipals = [1]\nroles = ['read']\ntopics = ['a']", "principals must be a list"),
        ("[[allow]]\nprincipals = ['a']\nroles = ['read']\ntopics = ['a*b']", "topics: 'a*b' is not a valid pattern"),
        ("[[allow]]\nprincipals = ['a']\nroles = ['read']\ntopics = ['']", "topics: '' is not a valid pattern"),
        (
            "[[allow]]\nprincipals = ['a']\nroles = ['read']\ntopics = ['a-partition-*']",
            "topics: 'a-partition-*': partitions have the rights of their topic: name that",
        ),
        (
            "[[allow]]\nprincipals = ['a']\nroles = ['read']\ntopics = ['a']\ngroups = ['g']",
            "groups have no effect without the role 'process' or 'operate': add it, or remove groups",
        ),
        (
            "[[allow]]\nprincipals = ['a']\nroles = ['read']\ntopics = ['a']\nproducers = ['g']",
            "producers have no effect without the role 'write': add it, or remove producers",
        ),
        (
            "[[allow]]\n" + GOOD + "[[limit]]\nprincipals = ['a']",
            "[[limit]] number 1 sets no limit: add one of sessions",
        ),
        ("[[allow]]\n" + GOOD + "[[limit]]\nprincipals = ['a']\nsession = 1", "did you mean 'sessions'?"),
        (
            "[[allow]]\n" + GOOD + "[[limit]]\nprincipals = ['a']\nsessions = -1",
            "sessions must be a number of 0 or more",
        ),
        ("[[allow]]\n" + GOOD + "[[limit]]\nprincipals = ['a']\nsessions = true", "got True"),
        ("[[allow]]\n" + GOOD + "[[limit]]\nprincipals = ['a']\nsessions = inf", "got inf"),
        ("[[allow]]\n" + GOOD + "[[limit]]\nprincipals = ['a']\nsessions = 1.5", "must be a whole number, got 1.5"),
        (
            "[[allow]]\n" + GOOD + "[[limit]]\nsessions = 1",
            "principals must be a list of at least one text, it is missing",
        ),
    ],
)
def test_each_mistake_has_one_clear_error(text: str, error: str) -> None:
    with pytest.raises(InvalidPolicy) as raised:
        parse_policy(text, "policy.toml")
    assert error in str(raised.value)


@given(st.text())
def test_any_text_is_a_policy_or_one_error(text: str) -> None:
    with pytest.raises(InvalidPolicy, match=r"^policy\.toml"):  # no text by chance has a rule
        parse_policy(text, "policy.toml")


@pytest.mark.parametrize("name", ["", "a*", "a\nb", "x" * 201])
def test_a_name_that_no_policy_could_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="can't name a principal"):
        check_principal(name)
    assert check_principal("team a, müller") == "team a, müller"
