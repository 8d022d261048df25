"""Transports between workers and the coordinator: request and reply, with one interface for all networks and databases.

Security, in a few lines. Every client with the join token is a worker; no other client gets a message into the coordinator's memory: the
token is checked in the handshake (ZeroMQ) or before a body is read (HTTP). Beyond this machine everything is encrypted and the
coordinator proves who it is: its public key is in the join line, and a worker's own key is derived from the token, so the token itself
never travels. (XML-RPC, for debugging, encrypts nothing, and leaves this machine only where `insecure` says so.) Workers are not trusted
either: what they send is bounded in size, number and rate, decoded without executing anything, refused where it is not exactly a message
of ours, and counted in `traffic.refused`. All workers share one token: it proves that a worker may take part, not which one it is.
"""

from shoal.transports.interface import Client, Message, Poster, Refused, Request, Server, Traffic, Unreachable

__all__ = ["Client", "Message", "Poster", "Refused", "Request", "Server", "Traffic", "Unreachable"]
