"""The contract suite: tests that every backend of the broker port must pass.

A backend runs them with a subclass:

    class TestMyBroker(BrokerContract):
        @pytest.fixture
        def broker(self):
            with MyBroker() as broker:
                yield broker

The class attributes of `Base` describe the backend where the port leaves a choice.
"""

from broker_io.testing.contract.base import Base
from broker_io.testing.contract.compacting import CompactingContract
from broker_io.testing.contract.contents import ContentsContract
from broker_io.testing.contract.owning import OwningContract
from broker_io.testing.contract.reading import FollowingContract, ReadingContract
from broker_io.testing.contract.topics import TopicsContract
from broker_io.testing.contract.trimming import LedgersContract, TrimmingContract

__all__ = ["BrokerContract"]


class BrokerContract(
    TopicsContract,
    ContentsContract,
    ReadingContract,
    FollowingContract,
    LedgersContract,
    TrimmingContract,
    OwningContract,
    CompactingContract,
    Base,
):
    """The whole contract; a subclass provides the fixture `broker`."""
