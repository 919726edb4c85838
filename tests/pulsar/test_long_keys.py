"""Keys that count twice in batches of the client library."""

from __future__ import annotations

import pytest

from broker_io.batch import Batch, Message
from broker_io.errors import MessageTooLarge
from broker_io.port import MAX_MESSAGE_BYTES
from broker_io.pulsar.broker import OVERHEAD_BYTES
from broker_io.pulsar.messages import encode_messages

LIMIT = MAX_MESSAGE_BYTES - OVERHEAD_BYTES


@pytest.mark.parametrize(
    ("key", "value"), [(100_000, 5_070_000), (200_000, 4_900_000), (2_700_000, 10), (5_100_000, 1)]
)
def test_message_that_fits_only_without_a_second_key_is_rejected(key: int, value: int) -> None:
    batch = Batch.of([Message(b"a", b""), Message(b"k" * key, b"v" * value)])
    assert len(encode_messages(batch, LIMIT)) == 2
    with pytest.raises(MessageTooLarge, match=r"message 1 .* sent twice"):
        encode_messages(batch, LIMIT, batching=True)


@pytest.mark.parametrize(("key", "value"), [(2_500_000, 10), (8_000, LIMIT - 8_000), (30_000, LIMIT - 30_000)])
def test_a_message_that_fits_with_two_keys_is_sent(key: int, value: int) -> None:
    assert len(encode_messages(Batch.of([Message(b"k" * key, b"v" * value)]), LIMIT, batching=True)) == 1
