"""The contract suite: what every backend of the broker port has to do, as tests.

A backend proves itself with a test class of its own:

    class TestMyBroker(BrokerContract):
        @pytest.fixture
        def broker(self):
            with MyBroker() as broker:
                yield broker

The class attributes of `Base` say how the backend differs where the port leaves a choice.
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
    """All of the contract; a subclass gives the fixture `broker`."""
