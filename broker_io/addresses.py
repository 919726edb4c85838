"""Addresses of programs, HOST:PORT: their parts, whom they reach, and how errors show them"""

from __future__ import annotations

import re


def split_address(text: str) -> tuple[str, str]:
    """Return the host and the port of HOST:PORT; the host is empty for a text of another form.

    An IPv6 address is in brackets in the text, and without them in the result.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]") and ":" in host:
        return host[1:-1], port
    return ("" if any(char in host for char in ":[]") else host), port


def is_target(text: str) -> bool:
    """Return whether the text is HOST:PORT of a service."""
    host, port = split_address(text)
    return bool(host and port_of(port)) and not any(char in host for char in "/?#@ ")


def port_of(text: str) -> int | None:
    """Return the number of a port, 0 to 65535; None for any other text."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else 65536
    return number if number < 65536 else None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def shown_address(address: str) -> str:
    """An address as errors show it: without what may be a password, before an @ or in an option."""
    if address.startswith(("file:", "memory:")):
        return address
    place, mark, _ = address.partition("?")
    return re.sub(r"^([a-z+]+://)?.*@", r"\1…@", place, flags=re.DOTALL) + (mark and "?…")
