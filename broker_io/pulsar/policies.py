"""Policies of a cluster that could drop messages that are still needed, and how they are overridden.

A durable subscription without consumers at each topic keeps all messages after its position, whatever the retention
is. Policies that overrule subscriptions are rejected by name.

The kept messages count as backlog, and a backlog quota would stop the topic one day; a message TTL acknowledges
messages for every subscription. The quotas and TTL of a topic overrule those of its namespace, and those overrule the
cluster's. So each topic gets quotas of its own that are unlimited, and a TTL of its own that is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from broker_io.errors import NotSupported, UnsafePolicy
from broker_io.partitions import partition_of, whole_name
from broker_io.pulsar.admin import AdminClient
from broker_io.pulsar.answers import integer, mapping, texts
from broker_io.pulsar.cluster import path_of, url_of
from broker_io.pulsar.ledgers import COMPACTION, LedgerState

UNLIMITED = {"limitSize": -1, "limitTime": -1, "policy": "producer_request_hold"}
DEFAULT_QUOTA_BYTES = 10 * 1024**3
"""The default quota, which a namespace reports as its own once it has a quota of the other kind."""
QUOTA_KINDS = ("destination_storage", "message_age")
SYSTEM_TOPICS = ("__change_events", "__transaction_")


class Policies(NamedTuple):
    """The effective policies of a topic, as the REST interface returns them."""

    ttl: Any
    quotas: Any
    inactive: Any
    threshold: Any
    expiration: Any
    own_quotas: Any = None
    """The entries of `quotas` that are set for the topic, not for its namespace."""
    own_ttl: Any = None
    """`ttl` if it is set for the topic, not for its namespace; 0 turns it off."""
    clusters: Any = None
    own_clusters: Any = None
    """`clusters` if they are set for the topic, not for its namespace; not looked up for a single cluster."""


NOT_SHOWN = Policies(None, None, None, None, None)


def policies_of(admin: AdminClient, namespace: str, path: str) -> Policies:
    own_ttl = admin.query(f"{path}/messageTTL", _number)
    clusters = admin.query(f"{path}/replication?applied=true", _names)
    return Policies(
        admin.query(f"{path}/messageTTL?applied=true", _number) if own_ttl is None else own_ttl,
        admin.query(f"{path}/backlogQuotaMap?applied=true", _quotas),
        admin.query(f"{path}/inactiveTopicPolicies?applied=true", mapping),
        admin.query(f"{path}/compactionThreshold?applied=true", _number),
        admin.query(f"namespaces/{namespace}/subscriptionExpirationTime", _number),
        admin.query(f"{path}/backlogQuotaMap", _quotas),
        own_ttl,
        clusters,
        admin.query(f"{path}/replication", _names) if len(clusters) > 1 else None,
    )


def _number(answer: Any) -> int | None:
    return None if answer is None else integer(answer)


def _names(answer: Any) -> list[str]:
    return [] if answer is None else texts(answer)


def _quotas(answer: Any) -> dict[str, Any]:
    """The backlog quota of each kind, without the fields that are null."""
    quotas = {}
    for kind, quota in mapping(answer).items():
        quotas[kind] = {name: value for name, value in mapping(quota).items() if value is not None}
        for limit in ("limitSize", "limitTime"):
            integer(quotas[kind].get(limit, -1))
    return quotas


def override_policies(admin: AdminClient, namespace: str, path: str, policies: Policies, *, ours: bool) -> Policies:
    """Give a topic harmless policies of its own, and return the effective policies.

    Policies that an operator set stay at topics that are not `ours`: `check_policies` decides whether they are safe.
    """
    if (policies.own_ttl is None and not policies.ttl) or (ours and policies.ttl):
        admin.ask("POST", f"{path}/messageTTL?messageTTL=0")
        policies = policies._replace(ttl=0, own_ttl=0)
    return _override_quotas(admin, namespace, path, policies, ours=ours)


def _override_quotas(admin: AdminClient, namespace: str, path: str, policies: Policies, *, ours: bool) -> Policies:
    """Give a topic unlimited backlog quotas."""
    own = dict(policies.own_quotas or {})
    quotas = dict(policies.quotas or {}) | own  # another service may have set them between the two requests
    missing = [kind for kind in QUOTA_KINDS if kind not in own or (ours and _is_limiting(kind, own[kind]))]
    if not missing:
        return policies._replace(quotas=quotas)
    wanted = {} if ours else admin.query(f"namespaces/{namespace}/backlogQuotaMap", _quotas)
    for kind in missing:
        if kind in wanted and _is_limiting(kind, wanted[kind]) and not _is_default(kind, wanted[kind]):
            continue
        admin.ask("POST", f"{path}/backlogQuota?backlogQuotaType={kind}", UNLIMITED)
        quotas[kind] = own[kind] = UNLIMITED
    return policies._replace(quotas=quotas, own_quotas=own)


def check_policies(topic: str, namespace: str, policies: Policies, state: LedgerState, *, compacted: bool) -> None:
    """Raises UnsafePolicy with the policy and the command that removes it; `compacted`: compaction is allowed."""
    violation = _violation(topic, namespace, policies, state, compacted=compacted)
    if violation is not None:
        what, command = violation
        raise UnsafePolicy(
            f"topic {topic!r} can't be written safely: {what}; run `pulsar-admin {command}` and open it again"
        )


def _is_limiting(kind: str, quota: Any) -> bool:
    """Whether a backlog quota can drop messages or stop the topic."""
    if quota.get("policy") not in (None, UNLIMITED["policy"], "producer_exception"):
        return True
    return bool(quota.get("limitTime", -1) > 0 if kind == "message_age" else quota.get("limitSize", -1) >= 0)


def _is_default(kind: str, quota: Any) -> bool:
    stock = {"limitSize": DEFAULT_QUOTA_BYTES, "limitTime": -1, "policy": UNLIMITED["policy"]}
    return kind == "destination_storage" and all(quota.get(word) == value for word, value in stock.items())


def _removal_command(kind: str, topic: str, namespace: str, policies: Policies) -> str:
    if kind in (policies.own_quotas or {}):
        return f"topicPolicies remove-backlog-quota {url_of(namespace, whole_name(topic))} -t {kind}"
    return f"namespaces remove-backlog-quota {namespace} -t {kind}"


def policies_path(namespace: str, topic: str) -> str:
    """The REST path of a topic's policies; a partition has those of its partitioned topic."""
    return path_of(namespace, whole_name(topic))


def check_usable(topic: str, partitions: Callable[[str], int]) -> None:
    """Raises NotSupported for a name that can't be used; `partitions` returns the number of partitions of a topic."""
    partition = partition_of(topic)
    if partition is not None and partition.number >= partitions(partition.topic):
        raise NotSupported(
            f"topic {topic!r} has the name of a partition that topic {partition.topic!r} does not have: use another "
            "name, or create that topic with partitions"
        )
    if topic.startswith(SYSTEM_TOPICS):
        raise NotSupported(f"topic {topic!r} is a system topic of the cluster: use another name")


def _violation(
    topic: str, namespace: str, policies: Policies, state: LedgerState, *, compacted: bool
) -> tuple[str, str] | None:
    if policies.ttl:
        return (
            f"a message TTL of {policies.ttl} s drops messages that are still needed",
            f"namespaces remove-message-ttl {namespace}"
            if policies.own_ttl is None
            else f"topicPolicies remove-message-ttl {url_of(namespace, whole_name(topic))}",
        )
    for kind, quota in (policies.quotas or {}).items():
        if quota.get("policy") == "consumer_backlog_eviction":
            return (
                f"the {kind} backlog quota with consumer_backlog_eviction drops messages that are still needed",
                _removal_command(kind, topic, namespace, policies),
            )
        if _is_limiting(kind, quota):
            return (
                f"the {kind} backlog quota with {quota.get('policy')} counts kept messages and would stop the topic",
                _removal_command(kind, topic, namespace, policies),
            )
    if policies.expiration:
        return (
            f"idle subscriptions expire after {policies.expiration} min, and with them that of this service",
            f"namespaces remove-subscription-expiration-time {namespace}",
        )
    if len(policies.clusters or ()) > 1:
        return (
            f"it is replicated to {', '.join(sorted(policies.clusters))}, which have transactions of their own",
            f"topics set-replication-clusters {url_of(namespace, whole_name(topic))} --clusters ONE"
            if policies.own_clusters
            else f"namespaces set-clusters {namespace} --clusters ONE",
        )
    inactive = policies.inactive or {}
    if (
        inactive.get("deleteWhileInactive")
        and inactive.get("inactiveTopicDeleteMode") != "delete_when_no_subscriptions"
    ):
        return (
            f"inactive topics are deleted with {inactive.get('inactiveTopicDeleteMode')}",
            f"namespaces remove-inactive-topic-policies {namespace}",
        )
    if not compacted and policies.threshold:
        return (
            f"compaction from {policies.threshold} bytes on ignores transactions",
            f"namespaces set-compaction-threshold --threshold 0 {namespace}",
        )
    if not compacted and COMPACTION in state.cursors:
        return (
            "it was compacted, and compaction ignores transactions",
            f"topics create persistent://{namespace}/ANOTHER-NAME",
        )
    return None
