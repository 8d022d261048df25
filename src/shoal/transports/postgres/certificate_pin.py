"""Certificate pinning: connect only to a server that shows the certificate which an invitation names.

A class's server signs its certificate itself. The invitation names the certificate's digest; the certificate that the server shows is
compared with it, and libpq then trusts this certificate and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import socket
import ssl
import struct
import tempfile
from pathlib import Path

from shoal.transports.interface import Refused, Unreachable

_SSL_REQUEST = struct.pack("!ii", 8, 80877103)
_PIN_DIGITS = 32
"""128 bits of the digest: no other certificate with the same can be found, and people can still read it."""
_TIMEOUT_S = 10.0


def digest(certificate: bytes) -> str:
    """The pin of a certificate (DER)."""
    return hashlib.sha256(certificate).hexdigest()[:_PIN_DIGITS]


@functools.lru_cache(maxsize=16)
def pinned_certificate(host: str, port: int, pin: str) -> str:
    """The path of a file with the certificate of the server at this place. Raises Refused where it is not the pinned one, Unreachable."""
    try:
        shown = _shown(host, port)
    except (OSError, ssl.SSLError) as problem:
        raise Unreachable(
            f"no PostgreSQL with TLS answers at {host}:{port}: is it running, and can this machine reach it? ({problem})"
        ) from None
    if not hmac.compare_digest(digest(shown), pin):
        raise Refused(
            f"the server at {host}:{port} shows another certificate than the invitation names: the connection may be intercepted."
            " Ask for the line that `shoal coordinate` prints now",
            "unauthorised",
        )
    file = Path(_folder().name) / f"{pin}.pem"
    file.write_text(ssl.DER_cert_to_PEM_cert(shown), encoding="ascii")
    return str(file)


def _shown(host: str, port: int) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the pin is the check
    with socket.create_connection((host, port), _TIMEOUT_S) as plain:
        plain.sendall(_SSL_REQUEST)
        if plain.recv(1) != b"S":
            raise OSError("it does not speak TLS")
        with context.wrap_socket(plain) as encrypted:
            shown = encrypted.getpeercert(binary_form=True)
    if not shown:
        raise OSError("it showed no certificate")
    return shown


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where libpq reads certificates; it is removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="shoal-pin-")
