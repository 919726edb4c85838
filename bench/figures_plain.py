"""Plain consumers with the broker plug-in, compared with the unmodified broker: CPU of the broker, rate and memory.

A round writes messages of 100 bytes to a new topic, then a plain consumer with an exclusive subscription reads them;
rounds on the two brokers alternate. CPU is that of the broker for writing and reading, per message that the consumer
should get. Transactions are written concurrently, so that batches have messages of several; 2 % of them abort.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from bench.brokers import Brokers
from bench.harness import Pair, figure
from bench.pulsar_broker import home, memory
from bench.service_process import started
from broker_io.standalone import ENVIRONMENT, StandaloneProcess, ask
from broker_plugin.build import build

WARM_UP, ROUNDS = 3, 5
IN_TRANSACTIONS, ORDINARY = 50_000, 300_000
"""Messages of a round."""
TXN_RECORDS, IN_FLIGHT = 50, 32
ABORTED = 50
"""One of so many transactions aborts."""
VALUE, GONE = b"v" * 100, b"g" * 100
SETTINGS = ["topicFactoryClassName=txnbuffer.broker.TxnTopicFactory", "allowOverrideEntryFilters=true"]
TOPICS = 200
MAX_WAIT = 300.0
PEER = "the unmodified broker"


class Round(NamedTuple):
    cpu_us: float
    per_second: float


@functools.cache
def side(*, plug_in: bool) -> Brokers:
    """The broker with the plug-in, or the unmodified one, which end with the process."""

    def make(directory: Path) -> StandaloneProcess:
        megabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
        environment = {**ENVIRONMENT, "PULSAR_MEM": memory(megabytes)}
        if plug_in:
            environment["PULSAR_EXTRA_CLASSPATH"] = str(build(directory / "txnbuffer-broker.jar"))
        return StandaloneProcess(home(), directory, SETTINGS if plug_in else [], environment)

    made = Brokers(make)
    atexit.register(made.end)
    return made


def cpu_seconds(broker: StandaloneProcess) -> float:
    fields = Path(f"/proc/{broker.handle['pid']}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def write_transactions(address: str, admin: str, topic: str, messages: int) -> int:
    """Write committed and some aborted transactions; the number of messages that committed."""
    from txnbuffer import connect

    numbers = iter(range(1, messages // TXN_RECORDS + 1))
    committed = 0
    async with connect(address, broker_options={"admin_url": admin}) as client:

        async def work() -> None:
            nonlocal committed
            for number in numbers:
                txn = await client.transaction(timeout=MAX_WAIT).begin()
                gone = number % ABORTED == 0
                await asyncio.gather(*(txn.send(topic, GONE if gone else VALUE) for _ in range(TXN_RECORDS)))
                await (txn.abort() if gone else txn.commit())
                committed += 0 if gone else TXN_RECORDS

        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    return committed


def write_ordinary(url: str, topic: str, messages: int) -> None:
    """Write with Pulsar's own client."""
    import pulsar

    client = pulsar.Client(url, logger=quiet())
    producer = client.create_producer(topic, batching_enabled=True, block_if_queue_full=True)
    for _ in range(messages):
        producer.send_async(VALUE, None)
    producer.flush()
    client.close()


def quiet() -> object:
    import pulsar

    return pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)


def consume(url: str, topic: str, messages: int) -> float:
    """Read and acknowledge so many messages with a plain consumer; messages per second."""
    import pulsar

    client = pulsar.Client(url, logger=quiet())
    consumer = client.subscribe(topic, "plain", initial_position=pulsar.InitialPosition.Earliest)
    got, began = 0, time.perf_counter()
    for number in itertools.count(1):
        message = consumer.receive(round(1000 * MAX_WAIT))
        got += message.data() == VALUE  # the unmodified broker delivers markers and aborted messages too
        if got == messages or number % 1000 == 0:
            consumer.acknowledge_cumulative(message)
        if got == messages:
            break
    elapsed = time.perf_counter() - began
    client.close()
    return messages / elapsed


def run_round(*, plug_in: bool, transactions: bool) -> Round:
    broker = side(plug_in=plug_in).current()
    namespace = broker.namespace()
    address, topic = f"{broker.url}/{namespace}", f"persistent://{namespace}/plain"
    if not transactions:
        before = cpu_seconds(broker)
        write_ordinary(broker.url, topic, ORDINARY)
        rate = consume(broker.url, topic, ORDINARY)
        return Round(1e6 * (cpu_seconds(broker) - before) / ORDINARY, rate)
    command = [sys.executable, "-m", "txnbuffer", "serve", address, "--listen", "127.0.0.1:0"]
    with started([*command, "--http", "", "--admin-url", broker.admin], "serving"):
        before = cpu_seconds(broker)
        committed = asyncio.run(write_transactions(address, broker.admin, "plain", IN_TRANSACTIONS))
        rate = consume(broker.url, topic, committed)
        return Round(1e6 * (cpu_seconds(broker) - before) / committed, rate)


@functools.cache
def measured(*, transactions: bool) -> tuple[Round, Round]:
    """The medians of alternating rounds with the plug-in and without, after some to warm up."""
    rounds: dict[bool, list[Round]] = {True: [], False: []}
    for number in range(WARM_UP + ROUNDS):
        for plug_in in sorted(rounds, reverse=number % 2 == 0):
            rounds[plug_in].append(run_round(plug_in=plug_in, transactions=transactions))
            which = "with" if plug_in else "without"
            print(f"  {which} the plug-in: {rounds[plug_in][-1]}", file=sys.stderr, flush=True)
    first, second = (Round(*map(statistics.median, zip(*rounds[plug_in][WARM_UP:], strict=True))) for plug_in in rounds)
    return first, second


def idle_topic_bytes(*, plug_in: bool) -> float:
    """Bytes of the broker's heap that are in use for each idle topic with transactions."""
    broker = side(plug_in=plug_in).current()
    namespace = broker.namespace()
    before = heap_bytes(broker)
    for number in range(TOPICS):
        path = f"persistent/{namespace}/idle-{number}"
        ask(broker.admin, path, "PUT")
        ask(broker.admin, f"{path}/subscription/__txnbuffer", "PUT")
    return (heap_bytes(broker) - before) / TOPICS


def heap_bytes(broker: StandaloneProcess) -> int:
    """Bytes of all objects that are in use, after a garbage collection."""
    command = ["jcmd", str(broker.handle["pid"]), "GC.class_histogram"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=MAX_WAIT)
    return int(done.stdout.splitlines()[-1].split()[2])


@figure("plain.cpu_us.transactions", unit="µs/message", goal="<= 1.1 times the peer", peer=PEER)
def cpu_of_transactions() -> Pair:
    return Pair(*(each.cpu_us for each in measured(transactions=True)))


@figure("plain.cpu_us.ordinary", unit="µs/message", goal="<= 1.02 times the peer", peer=PEER)
def cpu_of_ordinary_messages() -> Pair:
    return Pair(*(each.cpu_us for each in measured(transactions=False)))


@figure("plain.messages_per_s.transactions", unit="messages/s", peer=PEER)
def rate_of_transactions() -> Pair:
    return Pair(*(each.per_second for each in measured(transactions=True)))


@figure("plain.messages_per_s.ordinary", unit="messages/s", peer=PEER)
def rate_of_ordinary_messages() -> Pair:
    return Pair(*(each.per_second for each in measured(transactions=False)))


@figure("plain.idle_topic_bytes", unit="bytes", peer=PEER)
def memory_of_an_idle_topic() -> Pair:
    return Pair(idle_topic_bytes(plug_in=True), idle_topic_bytes(plug_in=False))
