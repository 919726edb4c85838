"""An enrichment loop: each order gets an invoice, once; the prices are read when the program starts."""

from __future__ import annotations

import os

from txnbuffer import JsonDeserializer, JsonSerializer, Record, SyncTransaction, connect, dead_letter


def main() -> None:
    json = JsonSerializer(), JsonDeserializer()
    with connect(os.environ["TXNBUFFER_ADDRESS"], serializer=json[0], deserializers=json[1]) as client:
        with client.reader("prices", until="now") as reader:
            prices = {(record.key or b"").decode(): int(record.value) for record in reader.records()}

        def invoice(txn: SyncTransaction, order: Record) -> None:
            cents = prices[order.value["item"]] * order.value["count"]
            txn.send("invoices", {**order.value, "cents": cents}, key=order.key)
            txn.send("stock", -order.value["count"], key=order.value["item"])

        client.process("orders", "invoicing", invoice, on_error=dead_letter("failed"), wait=True)


if __name__ == "__main__":
    main()
