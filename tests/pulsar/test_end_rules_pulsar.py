"""The rules for the end of a log, on a Pulsar cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from end_rules import CompactedEnds, LogEnds

from broker_io import compacted
from broker_io.port import Broker


class OnPulsar:
    @pytest.fixture
    def broker(self, opening: Callable[..., Broker]) -> Broker:
        return opening()


class TestCompactedOnPulsar(OnPulsar, CompactedEnds):
    end_timeout = compacted.END_TIMEOUT


class TestLogOnPulsar(OnPulsar, LogEnds):
    pass
