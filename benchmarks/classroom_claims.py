"""Units claimed and handed in per second, against pgqueuer and procrastinate on the same server: four processes, jobs that do nothing.

Each peer runs as its documentation says is fastest, with the best of several settings; their own workers claim and complete. What counts is
the time from the first claim to the last completion. A unit that is handed in is on the disk (`synchronous_commit` is on for all three).
`python benchmarks/classroom_claims.py` prints every single figure.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import peers
from processes import Helper

from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.transports import Message
from shoal.transports.database_address import Access
from shoal.transports.postgres import LeaseClient, PostgresServer, schema
from shoal.transports.postgres.access import connect, create_database

PEERS = "queues"
INSTALL = ["pgqueuer==1.6.0", "procrastinate==3.10.0", "asyncpg==0.32.0", "uvloop==0.23.0", "psycopg[binary,pool]==3.3.8"]
peers.INSTALL.setdefault(PEERS, [INSTALL])
CLAIMERS = 4
JOBS = 8_000


LEASE_S = 600.0


class Queue(Protocol):
    """Jobs in a database of their own, and claimers of them."""

    access: Access

    def fill(self, jobs: int) -> None: ...
    def claimer(self, batch: int, complete: bool) -> Claimer: ...


class Claimer(Protocol):
    def hear(self) -> Any: ...
    def say(self, what: Any) -> None: ...
    def close(self) -> None: ...


class Setting(NamedTuple):
    """How a queue is used: jobs for a claim (or at once, where a peer claims one by one), and whether they are completed."""

    batch: int
    complete: bool


def rate(queue: Queue, jobs: int, setting: Setting) -> float:
    """Jobs per second, through all claimers."""
    queue.fill(jobs)
    claimers = [queue.claimer(*setting) for _ in range(CLAIMERS)]
    try:
        for claimer in claimers:
            claimer.hear()
        for claimer in claimers:
            claimer.say("go")
        told = [claimer.hear() for claimer in claimers]
    finally:
        for claimer in claimers:
            claimer.close()
    counts, firsts, lasts = zip(*told, strict=True)
    if sum(counts) != jobs:
        raise RuntimeError(f"{sum(counts)} of {jobs} jobs were claimed")
    return jobs / (max(lasts) - min(firsts))


@contextmanager
def snapshot_held(access: Access) -> Iterator[None]:
    """A transaction that somebody forgot: no row that it could see goes away."""
    with connect(access) as connection:
        connection.execute("SET idle_in_transaction_session_timeout = 0")
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT count(*) FROM pg_class")
        yield
        connection.execute("ROLLBACK")


# --- ours ------------------------------------------------------------------------------------------------


class Units:
    """A board of units, and desks with a student's rights."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.student = access._replace(user="pupil", password="secret")
        create_database(access)
        with connect(access) as connection:
            schema.init(connection)
            schema.grant(connection, "pupil", "secret", "coordinator")  # a student may hold eight units, and here one desk holds hundreds
        self.server = PostgresServer(access.address, max_frame_bytes=1 << 20)
        self.server.open_run(Message({}), resume=False)
        self.iterations = itertools.count(1)
        self.starts = itertools.count()

    def fill(self, jobs: int) -> None:
        """The next iteration; the coordinator has taken in what was handed in for the last."""
        with connect(self.access) as connection:
            connection.execute("DELETE FROM shoal.contributions")
        units = [(0, start, 1) for start in itertools.islice(self.starts, jobs)]
        self.server.issue(next(self.iterations), units, LEASE_S, 3)

    def claimer(self, batch: int, complete: bool) -> Claimer:
        return Helper(__file__, "claim", 1, address=self.student.address, batch=batch, complete=complete)

    def close(self) -> None:
        self.server.close()


def claim(given: dict[str, Any]) -> None:
    desk = LeaseClient(given["address"], poll_interval_s=5.0)
    desk.join(None, {})
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    jobs, first = 0, time.time()
    while units := desk.claim(given["batch"], 0.0):
        last = time.time()
        if given["complete"]:
            for unit in units:
                desk.submit(unit, {}, ())
            last = time.time()
        jobs += len(units)
    print(json.dumps([jobs, first, last]), flush=True)


# --- peers -----------------------------------------------------------------------------------------------


class Peer:
    """pgqueuer or procrastinate."""

    def __init__(self, name: str, access: Access, connections: int = 1) -> None:
        self.name, self.access, self.connections = name, access, connections
        create_database(access)

    def fill(self, jobs: int) -> None:
        filling = PeerProcess(self, role="fill", jobs=jobs)
        filling.hear()
        filling.close()

    def claimer(self, batch: int, complete: bool) -> Claimer:
        return PeerProcess(self, role="claim", batch=batch, complete=complete)


class PeerProcess:
    """One of its processes; it tells and is told in lines."""

    def __init__(self, peer: Peer, **given: Any) -> None:
        given |= {"peer": peer.name, "address": peer.access.address, "connections": peer.connections}
        command = [str(peers.python(PEERS)), "-c", "import queue_app; queue_app.main()", json.dumps(given)]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "peer_apps")}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        return line if line == "ready\n" else json.loads(line)

    def say(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"claim": claim}[sys.argv[1]](json.loads(sys.argv[2]))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder, EmbeddedPostgres(Path(folder)) as server:
        queues = {
            "ours": Units(server.access._replace(database="units")),
            "pgqueuer": Peer("pgqueuer", server.access._replace(database="pgqueuer")),
            "procrastinate": Peer("procrastinate", server.access._replace(database="procrastinate"), connections=2),
        }
        for complete in (True, False):
            for batch in (1, 10, 100):
                for name, queue in queues.items():
                    print(name, Setting(batch, complete), f"{rate(queue, 3000, Setting(batch, complete)):.0f}/s", flush=True)
