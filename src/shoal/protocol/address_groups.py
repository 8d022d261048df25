"""What counts as one address where something is bounded by address."""

from __future__ import annotations

import ipaddress


def household(address: str) -> str:
    """With IPv6 anybody has as many addresses as they like, of one network: that counts. What is no number stays as it is."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
