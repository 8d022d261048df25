"""The certificate of a class's server: made once, signed by itself, and known to students by its digest."""

from __future__ import annotations

import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ShoalError
from shoal.files import write_file

_YEARS = 20


class Certificate(NamedTuple):
    """Two files in the run's folder, and the pin that invitations name."""

    certificate: Path
    key: Path
    pin: str


def certificate_of(folder: Path) -> Certificate:
    """The certificate in a run's folder; made where there is none. Raises ShoalError."""
    from shoal.transports.postgres.certificate_pin import digest  # asks for a driver that others do without

    certificate, key = folder / "postgres.crt", folder / "postgres.key"
    try:
        x509: Any = import_module("cryptography.x509")
        serialization: Any = import_module("cryptography.hazmat.primitives.serialization")
    except ImportError:
        raise ShoalError(
            "a class's server makes a certificate with the Python package cryptography: pip install 'shoal[classroom]'"
        ) from None
    if not (certificate.exists() and key.exists()):
        _make(x509, serialization, certificate, key)
    try:
        loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise ShoalError(f"{certificate} cannot be read: {error}. Remove it and {key.name}, and tell students the new line") from None
    return Certificate(certificate, key, digest(loaded.public_bytes(serialization.Encoding.DER)))


def _make(x509: Any, serialization: Any, certificate: Path, key: Path) -> None:
    curves: Any = import_module("cryptography.hazmat.primitives.asymmetric.ec")
    hashes: Any = import_module("cryptography.hazmat.primitives.hashes")
    secret = curves.generate_private_key(curves.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Shoal class")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=365))  # a laptop's clock may be wrong
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(secret, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = secret.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_file(key, private.decode(), private=True)
    write_file(certificate, made.public_bytes(encoding).decode(), private=True)
