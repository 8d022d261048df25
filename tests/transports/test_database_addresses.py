"""Addresses of databases, and the one line for what stands in the way."""

from __future__ import annotations

import socket

import pytest

from shoal.errors import ShoalError
from shoal.transports.addresses import LASTING_PORTS, free_port
from shoal.transports.database_address import Access, is_address, parse


@pytest.mark.parametrize(
    ("address", "access"),
    [
        ("postgresql://ana:pw@host:5433/class", Access("host", 5433, "class", "ana", "pw")),
        ("postgres://ana@host/class", Access("host", 5432, "class", "ana", "from DB_PASSWORD")),
        ("postgresql://host", Access("host", 5432, "shoal", "shoal", "from DB_PASSWORD")),
        ("postgresql://a%40b:p%3A%2F%40%20%25@host/my%20class", Access("host", 5432, "my class", "a@b", "p:/@ %")),
        ("postgresql://ana:@[::1]:7/class?sslmode=require&a=b", Access("::1", 7, "class", "ana", "", "sslmode=require&a=b")),
        ("postgresql://ana@%2Fvar%2Frun%2FPG/class", Access("/var/run/PG", 5432, "class", "ana", "from DB_PASSWORD")),
    ],
)
def test_an_address_is_taken_apart_and_put_together(address: str, access: Access) -> None:
    assert is_address(address)
    assert parse(address, "from DB_PASSWORD") == access
    assert parse(access.address) == access
    if access.password:
        assert access.password not in access.shown


@pytest.mark.parametrize(
    "address", ["postgresql://", "postgresql:///db", "tcp://host:1", "postgresql://a:secret@h:0/d", "postgresql://a:secret@h:x/d"]
)
def test_what_is_no_address_is_refused_without_showing_a_password(address: str) -> None:
    with pytest.raises(ShoalError, match="not the address of a database") as told:
        parse(address)
    assert "secret" not in str(told.value)


def test_the_driver_reads_our_addresses_as_we_do() -> None:
    conninfo = pytest.importorskip("psycopg.conninfo", reason="needs shoal[classroom]")
    access = Access("::1", 7, "my class", "a@b/c", "p:/@ %?#", "sslmode=require")
    read = conninfo.conninfo_to_dict(access.address)
    assert (read["host"], read["port"], read["dbname"], read["user"], read["password"]) == ("::1", "7", "my class", "a@b/c", "p:/@ %?#")


def test_a_port_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        assert free_port("127.0.0.1", taken) is None
        assert free_port("127.0.0.1") in LASTING_PORTS
    assert free_port("127.0.0.1", taken) == taken
    with pytest.raises(ShoalError, match=r"cannot listen on 192\.0\.2\.1"):
        free_port("192.0.2.1")
