"""Bad networks on demand: a proxy between a worker and its coordinator that delays, caps, stalls and falls silent.

It works on TCP streams, without any privilege, so what it does is what an application sees of a bad link: bytes come late, never out of
order. A lost packet is a stall of one retransmission time-out, a few of them end in a reset, an outage is silence. Losses
and delays are drawn from a seed, so the same sequence of packets gets the same ones.
"""

from shoal.transports.netem.profiles import PROFILES, LinkProfile, profile
from shoal.transports.netem.proxy import NetemProxy

__all__ = ["PROFILES", "LinkProfile", "NetemProxy", "profile"]
