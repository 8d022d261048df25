"""pgqueuer's and procrastinate's side of classroom_claims.py: claimers of jobs that do nothing. It runs in their environment.

`fill` makes the tables and puts jobs there; `claim` says that it is ready, waits for a line, claims until nothing is left, and tells how
many jobs it had, and when it asked for the first and was done with the last. So no start or end of a worker counts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import uvloop

NAME = "nothing"
_TABLES = ("TRUNCATE pgqueuer, pgqueuer_log", "TRUNCATE procrastinate_jobs CASCADE")


class Times:
    """When the first job was asked for, and the last one was done with."""

    def __init__(self) -> None:
        self.jobs, self.first, self.last = 0, 0.0, 0.0

    def around(self, owner: Any, ask: str, done: str) -> None:
        self._wrap(owner, ask, after=False)
        self._wrap(owner, done, after=True)

    def _wrap(self, owner: Any, method: str, after: bool) -> None:
        whole: Callable[..., Awaitable[Any]] = getattr(owner, method)

        async def timed(*args: Any, **kwargs: Any) -> Any:
            self.first = self.first or time.time()
            result = await whole(*args, **kwargs)
            if after:
                self.last = time.time()
            return result

        setattr(owner, method, timed)


def ready() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


# --- pgqueuer --------------------------------------------------------------------------------------------


async def pgqueuer(given: dict[str, Any], times: Times) -> None:
    import asyncpg
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.models import Job
    from pgqueuer.qm import QueueManager
    from pgqueuer.queries import Queries
    from pgqueuer.types import QueueExecutionMode

    connection = await asyncpg.connect(given["address"])
    queries = Queries(AsyncpgDriver(connection))
    if given["role"] == "fill":
        if not await queries.schema_is_installed():
            await queries.install()
        await connection.execute(_TABLES[0])
        await queries.enqueue([NAME] * given["jobs"], [None] * given["jobs"], [0] * given["jobs"])
        await connection.execute("ANALYZE pgqueuer")
        return await connection.close()
    manager = QueueManager(queries)

    @manager.entrypoint(NAME)
    async def nothing(job: Job) -> None:
        times.jobs += 1

    if given["complete"]:
        times.around(queries, "dequeue", "log_jobs")
        ready()
        return await manager.run(mode=QueueExecutionMode.drain, batch_size=given["batch"])
    from pgqueuer.ports.repository import EntrypointExecutionParameter

    times.around(queries, "dequeue", "dequeue")
    wanted = {NAME: EntrypointExecutionParameter(concurrency_limit=0)}
    ready()
    while jobs := await queries.dequeue(given["batch"], wanted, manager.queue_manager_id, None, timedelta(seconds=600)):
        times.jobs += len(jobs)
    return await connection.close()


# --- procrastinate ---------------------------------------------------------------------------------------


async def procrastinate(given: dict[str, Any], times: Times) -> None:
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=given["address"], min_size=given["connections"], max_size=given["connections"]))

    @app.task(name=NAME, queue=NAME)
    async def nothing() -> None:
        times.jobs += 1

    async with app.open_async():
        if given["role"] == "fill":
            if not await app.check_connection_async():
                await app.schema_manager.apply_schema_async()
            await app.connector.execute_query_async(_TABLES[1])
            await nothing.batch_defer_async(*[{}] * given["jobs"])
            return await app.connector.execute_query_async("ANALYZE procrastinate_jobs")
        manager = app.job_manager
        if given["complete"]:
            times.around(manager, "fetch_job", "finish_job")
            ready()
            options = {"wait": False, "listen_notify": False, "install_signal_handlers": False, "delete_jobs": "always"}
            return await app.run_worker_async(queues=[NAME], concurrency=given["batch"], **options)
        worker = await manager.register_worker()
        times.around(manager, "fetch_job", "fetch_job")
        ready()
        while await manager.fetch_job(queues=[NAME], worker_id=worker):
            times.jobs += 1


def main() -> None:
    given, times = json.loads(sys.argv[1]), Times()
    uvloop.run({"pgqueuer": pgqueuer, "procrastinate": procrastinate}[given["peer"]](given, times))
    print(json.dumps([times.jobs, times.first, times.last]), flush=True)
