"""The certificate of a class's server: made once, signed by itself, and known to students by its digest."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

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
    if not (certificate.exists() and key.exists()):
        _make(certificate, key)
    try:
        loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise ShoalError(f"{certificate} cannot be read: {error}. Remove it and {key.name}, and tell students the new line") from None
    return Certificate(certificate, key, digest(loaded.public_bytes(Encoding.DER)))


def _make(certificate: Path, key: Path) -> None:
    secret = ec.generate_private_key(ec.SECP256R1())
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
    write_file(key, secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(), private=True)
    write_file(certificate, made.public_bytes(Encoding.PEM).decode(), private=True)
