"""Groups of network addresses that limits per address apply to."""

from __future__ import annotations

import ipaddress


def address_group(address: str) -> str:
    """The group of an address. IPv6 clients own a whole /64, so limits apply per /64. A name stays as it is."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
