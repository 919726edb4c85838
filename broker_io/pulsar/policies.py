"""What could drop messages that are still needed, and what we hold against it.

Retention is none of our business: a durable subscription of ours at each topic, which nobody reads, keeps all that
stands behind it. Policies that go over the heads of subscriptions are refused, by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from broker_io.errors import ClusterRefused, UnsafePolicy
from broker_io.pulsar.admin import Admin
from broker_io.pulsar.state import COMPACTION, HOLD, TopicState

EARLIEST_ID = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1, "batchIndex": -1}


class Policies(NamedTuple):
    """The policies that are in force at one topic, in the words of the REST interface."""

    ttl: Any
    quotas: Any
    inactive: Any
    threshold: Any
    expiration: Any


NOT_SHOWN = Policies(None, None, None, None, None)


def hold(admin: Admin, path: str) -> None:
    """Keep every message that a topic still has, and all that come."""
    try:
        admin.ask("PUT", f"{path}/subscription/{HOLD}", EARLIEST_ID)
    except ClusterRefused as error:
        if error.status != 409:  # it is there already
            raise


def policies_of(admin: Admin, namespace: str, path: str) -> Policies:
    return Policies(
        admin.ask("GET", f"{path}/messageTTL?applied=true"),
        admin.ask("GET", f"{path}/backlogQuotaMap?applied=true"),
        admin.ask("GET", f"{path}/inactiveTopicPolicies?applied=true"),
        admin.ask("GET", f"{path}/compactionThreshold?applied=true"),
        admin.ask("GET", f"namespaces/{namespace}/subscriptionExpirationTime"),
    )


def check_policies(topic: str, namespace: str, policies: Policies, state: TopicState, *, compacted: bool) -> None:
    """Raises UnsafePolicy that names the policy and the command against it; `compacted`: the topic may be."""
    danger = _danger(namespace, policies, state, compacted=compacted)
    if danger is not None:
        what, command = danger
        raise UnsafePolicy(f"topic {topic!r} is not written to: {what}; run `pulsar-admin {command}` and open it again")


def _danger(namespace: str, policies: Policies, state: TopicState, *, compacted: bool) -> tuple[str, str] | None:
    if policies.ttl:
        return (
            f"a message TTL of {policies.ttl} s drops what is still needed",
            f"namespaces remove-message-ttl {namespace}",
        )
    for kind, quota in (policies.quotas or {}).items():
        if quota.get("policy") == "consumer_backlog_eviction":
            return (
                f"the {kind} backlog quota with consumer_backlog_eviction drops what is still needed",
                f"namespaces remove-backlog-quota {namespace} -t {kind}",
            )
    if policies.expiration:
        return (
            f"subscriptions that nobody reads expire after {policies.expiration} min, ours too",
            f"namespaces remove-subscription-expiration-time {namespace}",
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
            f"compaction from {policies.threshold} bytes on knows no transactions",
            f"namespaces set-compaction-threshold --threshold 0 {namespace}",
        )
    if not compacted and COMPACTION in state.cursors:
        return (
            "it was compacted, and compaction knows no transactions",
            "topics create for a topic that is not compacted",
        )
    return None
