"""The contract suite: tests that every backend of the broker port must pass.

A backend runs them with a subclass:

    class TestMyBroker(BrokerContract):
        @pytest.fixture
        def broker(self):
            with MyBroker() as broker:
                yield broker

A backend that implements `AtomicBroker` has a subclass of `BrokerContract` and `AtomicContract`.

The class attributes of `Base` describe the backend where the port leaves a choice.
"""

from broker_io.testing.contract.base import Base
from broker_io.testing.contract.ledgers import CompactingContract, LedgersContract, TrimmingContract
from broker_io.testing.contract.messages import ContentsContract, FollowingContract, ReadingContract
from broker_io.testing.contract.together import AtomicContract
from broker_io.testing.contract.topics import OwningContract, TopicsContract

__all__ = ["AtomicContract", "BrokerContract", "DataTopicsContract"]


class DataTopicsContract(
    TopicsContract,
    ContentsContract,
    ReadingContract,
    FollowingContract,
    LedgersContract,
    TrimmingContract,
    OwningContract,
):
    """All but compaction, for topics that can't be compacted."""


class BrokerContract(DataTopicsContract, CompactingContract, Base):
    """The whole contract; a subclass provides the fixture `broker`."""
