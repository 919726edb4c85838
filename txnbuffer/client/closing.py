"""What is closed when its `async with` block ends."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class ClosedOnExit:
    """A base of classes with `close`."""

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
