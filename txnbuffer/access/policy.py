"""The policy: what each principal may do, and its limits

A policy is a TOML file of rules. A rule allows; what no rule allows is denied.

    [[allow]]
    principals = ["orders", "team-a-*"]   # who
    roles = ["write", "process"]          # read, write, process, operate
    topics = ["orders-*"]                 # on which topics
    producers = ["orders-*"]              # names of producers that it may use; none if it is left out
    groups = ["billing"]                  # groups and durable cursors that it may use; none if it is left out

    [[limit]]
    principals = ["batch-*"]
    sessions = 10                         # settings of the section [limits] that differ for these principals

A pattern is a name, a prefix and `*`, or `*` for all names. Partitions have the rights of their topic. The first limit
that names a principal and a setting counts.

The roles, and the actions that each of them allows:

| role | on topics | on producers | on groups |
|---|---|---|---|
| read | read | | |
| write | write | use | |
| process | read | | join |
| operate | operate | | operate |

Who may operate all topics (`*`) may also operate the service, such as end a transaction of others, write a backup, and
read internal topics. Every principal that a rule names may see the status of the service and its metrics.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from broker_io.partitions import whole_name
from txnbuffer.access.limits import PrincipalLimits
from txnbuffer.errors import InvalidPolicy

ALL = "*"
MAX_SHOWN = 100
"""Characters of a name that errors show."""
MAX_NAME = 200
"""Bytes of the name of a principal."""


class AccessRole(Enum):
    READ = "read"
    WRITE = "write"
    PROCESS = "process"
    OPERATE = "operate"


class ResourceKind(Enum):
    """What an action is about."""

    TOPIC = "topic"
    PRODUCER = "producer"
    GROUP = "group"
    SERVICE = "service"


class Action(Enum):
    READ = "read"
    WRITE = "write"
    USE = "use"
    JOIN = "join"
    OPERATE = "operate"
    OBSERVE = "observe"


class ResourceName(NamedTuple):
    """`name` is empty for the service."""

    kind: ResourceKind
    name: str = ""

    def __str__(self) -> str:
        shown = self.name if len(self.name) <= MAX_SHOWN else self.name[:MAX_SHOWN] + "…"
        return "the service" if self.kind is ResourceKind.SERVICE else f"{self.kind.value} {shown!r}"


SERVICE = ResourceName(ResourceKind.SERVICE)

NAMED = (ResourceKind.TOPIC, ResourceKind.PRODUCER, ResourceKind.GROUP)
"""What a rule names."""

ALLOWED: Mapping[AccessRole, frozenset[tuple[Action, ResourceKind]]] = {
    AccessRole.READ: frozenset({(Action.READ, ResourceKind.TOPIC)}),
    AccessRole.WRITE: frozenset({(Action.WRITE, ResourceKind.TOPIC), (Action.USE, ResourceKind.PRODUCER)}),
    AccessRole.PROCESS: frozenset({(Action.READ, ResourceKind.TOPIC), (Action.JOIN, ResourceKind.GROUP)}),
    AccessRole.OPERATE: frozenset({(Action.OPERATE, ResourceKind.TOPIC), (Action.OPERATE, ResourceKind.GROUP)}),
}
"""What each role may do with the resources that a rule names."""


@dataclass(frozen=True, slots=True)
class Names:
    """A set of names: all, or some names and prefixes."""

    all: bool = False
    exact: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    @classmethod
    def of(cls, patterns: Iterable[str]) -> Names:
        patterns = [*patterns]
        prefixes = tuple(sorted({one[:-1] for one in patterns if one.endswith(ALL) and one != ALL}))
        return cls(ALL in patterns, frozenset(one for one in patterns if not one.endswith(ALL)), prefixes)

    def __contains__(self, name: str) -> bool:
        return self.all or name in self.exact or name.startswith(self.prefixes)


class AllowRule(NamedTuple):
    principals: Names
    roles: frozenset[AccessRole]
    names: Mapping[ResourceKind, Names]

    def allows(self, action: Action, resource: ResourceName) -> bool:
        if resource.kind is ResourceKind.SERVICE:
            operates = AccessRole.OPERATE in self.roles and self.names[ResourceKind.TOPIC].all
            return action is Action.OBSERVE or operates
        fits = any((action, resource.kind) in ALLOWED[role] for role in self.roles)
        return fits and resource.name in self.names[resource.kind]


class LimitRule(NamedTuple):
    principals: Names
    settings: Mapping[str, float]


@dataclass(frozen=True)
class Policy:
    rules: tuple[AllowRule, ...] = ()
    limit_rules: tuple[LimitRule, ...] = ()
    _of_principal: dict[str, tuple[AllowRule, ...]] = field(default_factory=dict, compare=False, repr=False)

    def allows(self, principal: str, action: Action, resource: ResourceName) -> bool:
        """Whether a principal may do something. The resource of a partition is its topic."""
        if resource.kind is ResourceKind.TOPIC:
            resource = ResourceName(ResourceKind.TOPIC, whole_name(resource.name))
        return any(rule.allows(action, resource) for rule in self.rules_of(principal))

    def rules_of(self, principal: str) -> tuple[AllowRule, ...]:
        """The rules that name a principal."""
        rules = self._of_principal.get(principal)
        if rules is None:
            rules = tuple(rule for rule in self.rules if principal in rule.principals)
            self._of_principal[principal] = rules
        return rules

    def limits(self, principal: str, defaults: PrincipalLimits) -> PrincipalLimits:
        """The limits of a principal: the defaults, and what the policy says otherwise."""
        changes: dict[str, Any] = {}
        for rule in self.limit_rules:
            if principal in rule.principals:
                changes = {**rule.settings, **changes}
        return defaults._replace(**changes)


EVERYTHING = Policy(
    (
        AllowRule(
            Names(all=True),
            frozenset(AccessRole),
            dict.fromkeys(NAMED, Names(all=True)),
        ),
    )
)
"""The policy of a service without authentication."""


def parse_policy(text: str, source: str) -> Policy:
    """Parse a policy; `source` names it in errors. Raises InvalidPolicy."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidPolicy(f"{source} is not valid TOML: {error}") from None
    _check_keys(source, tables, ("allow", "limit"))
    rules = [_rule(where, table) for where, table in _tables(source, tables, "allow")]
    limits = [_limit_rule(where, table) for where, table in _tables(source, tables, "limit")]
    if not rules:
        raise InvalidPolicy(f"{source} has no rule, so it denies everything: begin a rule with [[allow]]")
    return Policy(tuple(rules), tuple(limits))


def policy_of(data: bytes, source: str) -> Policy:
    """The policy in the bytes of a file. Raises InvalidPolicy."""
    try:
        return parse_policy(data.decode(), source)
    except UnicodeDecodeError:
        raise InvalidPolicy(f"{source} is not UTF-8: save it as UTF-8") from None


def _tables(source: str, tables: Mapping[str, Any], name: str) -> list[tuple[str, Mapping[str, Any]]]:
    found = tables.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise InvalidPolicy(f"{source}: {name!r} must be tables: begin each with [[{name}]]")
    return [(f"{source}: [[{name}]] number {number}", table) for number, table in enumerate(found, 1)]


def _rule(where: str, table: Mapping[str, Any]) -> AllowRule:
    _check_keys(where, table, ("principals", "roles", "topics", "producers", "groups"))
    roles = frozenset(_role(where, text) for text in _texts(where, table, "roles"))
    names = {kind: _names(where, table, f"{kind.value}s", needed=False) for kind in NAMED}
    rule = AllowRule(_names(where, table, "principals"), roles, names)
    for role in AccessRole:
        if role in roles:
            _check_effect(where, role, table)
    for kind in (ResourceKind.PRODUCER, ResourceKind.GROUP):
        key = f"{kind.value}s"
        if key in table and not any(kind is of for role in roles for _, of in ALLOWED[role]):
            needed = " or ".join(repr(role.value) for role in AccessRole if any(of is kind for _, of in ALLOWED[role]))
            raise InvalidPolicy(f"{where}: {key} have no effect without the role {needed}: add it, or remove {key}")
    return rule


def _check_effect(where: str, role: AccessRole, table: Mapping[str, Any]) -> None:
    """Raises InvalidPolicy for a role that allows nothing, because the rule names nothing that it is about."""
    needed = [f"{kind.value}s" for kind in NAMED
              if any(of is kind for _, of in ALLOWED[role])]  # fmt: skip
    if not any(table.get(key) for key in needed):
        raise InvalidPolicy(f"{where}: the role {role.value!r} allows nothing here: add {' or '.join(needed)}")


def _limit_rule(where: str, table: Mapping[str, Any]) -> LimitRule:
    _check_keys(where, table, ("principals", *PrincipalLimits._fields))
    settings = {}
    for key, value in table.items():
        if key == "principals":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise InvalidPolicy(f"{where}: {key} must be a number of 0 or more (0: no limit), got {value!r}")
        if key != "requests_per_second" and not isinstance(value, int):
            raise InvalidPolicy(f"{where}: {key} must be a whole number, got {value!r}")
        settings[key] = value
    if not settings:
        raise InvalidPolicy(f"{where} sets no limit: add one of {', '.join(PrincipalLimits._fields)}")
    return LimitRule(_names(where, table, "principals"), settings)


def _role(where: str, text: str) -> AccessRole:
    try:
        return AccessRole(text)
    except ValueError:
        known = [role.value for role in AccessRole]
        raise InvalidPolicy(f"{where}: {_unknown('role', text, known)}") from None


def _names(where: str, table: Mapping[str, Any], key: str, *, needed: bool = True) -> Names:
    if not needed and key not in table:
        return Names()
    patterns = _texts(where, table, key)
    for pattern in patterns:
        bad = not pattern or not pattern.isprintable() or ALL in pattern[:-1]
        if key == "topics" and "-partition-" in pattern:
            raise InvalidPolicy(f"{where}: topics: {pattern!r}: partitions have the rights of their topic: name that")
        if bad:
            raise InvalidPolicy(
                f"{where}: {key}: {pattern!r} is not a valid pattern: write a name, a prefix and *, or *"
            )
    return Names.of(patterns)


def _texts(where: str, table: Mapping[str, Any], key: str) -> list[str]:
    found = table.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        got = "it is missing" if found is None else f"got {found!r}"
        raise InvalidPolicy(f"{where}: {key} must be a list of at least one text, {got}")
    return found


def _check_keys(where: str, table: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in table:
        if key not in keys:
            raise InvalidPolicy(f"{where}: {_unknown('key', key, keys)}")


def _unknown(what: str, text: str, known: Iterable[str]) -> str:
    known = [*known]
    close = difflib.get_close_matches(text, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    return f"unknown {what} {text!r}; {hint}"


def check_principal(name: str) -> str:
    """The name of a principal. Raises ValueError for one that no policy could name."""
    if not name or not name.isprintable() or ALL in name or len(name.encode()) > MAX_NAME:
        raise ValueError(f"{name[:MAX_NAME]!r} can't name a principal: 1 to {MAX_NAME} printable bytes without *")
    return name
