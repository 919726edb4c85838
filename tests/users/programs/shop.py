"""A shop: a web service that takes orders into a database, and publishes them from there as JSON, each once."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from sqlalchemy import create_engine, delete, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from txnbuffer import Client, connect

engine = create_engine(f"sqlite:///{os.environ['DATABASE']}", connect_args={"timeout": 30})


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    count: Mapped[int]


class Message(Base):
    __tablename__ = "outbox"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012  # no id is used again
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str]
    value: Mapped[str]


def delete_and_read(published: int) -> Sequence[Message]:
    with Session(engine) as session:
        session.execute(delete(Message).where(Message.id <= published))
        session.commit()
        return session.scalars(select(Message).where(Message.id > published).order_by(Message.id).limit(100)).all()


async def publish(client: Client) -> None:
    published = await client.committed_number("shop")
    while True:
        if messages := await asyncio.to_thread(delete_and_read, published):
            published = messages[-1].id
            async with client.transaction(name="shop", number=published) as txn:
                await txn.send_many("orders", [each.value for each in messages], keys=[each.key for each in messages])
        else:
            await asyncio.sleep(0.05)


async def supervise(client: Client) -> None:
    while True:
        try:
            await publish(client)
        except Exception:
            logging.exception("the publisher failed, and starts again")
            await asyncio.sleep(1)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    Base.metadata.create_all(engine)
    async with connect(os.environ["TXNBUFFER_ADDRESS"]) as client:
        publishing = asyncio.create_task(supervise(client))
        yield
        publishing.cancel()


app = FastAPI(lifespan=lifespan)


@app.put("/orders/{number}")
def place(number: int, item: str, count: int) -> None:
    with Session(engine) as session, session.begin():
        if session.get(Order, number) is None:  # else the client repeats its request
            session.add(Order(id=number, item=item, count=count))
            session.add(Message(key=str(number), value=json.dumps({"item": item, "count": count})))
