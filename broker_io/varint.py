"""Numbers of variable length, as protobuf writes them: 7 bits in a byte, the lowest ones first."""

from __future__ import annotations


def encode_varint(number: int) -> bytes:
    """Encode a number of 0 or more."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of at most 70 bits and the offset after it. Raises ValueError."""
    if at < len(data) and data[at] < 0x80:  # most numbers in messages
        return data[at], at + 1
    value = 0
    for shift, byte in zip(range(0, 70, 7), data[at : at + 10], strict=False):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + shift // 7 + 1
    raise ValueError("a number in a message is cut off")
