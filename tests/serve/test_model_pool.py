"""Several models behind one server: what is loaded, what waits, and what leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.models.generation.decoding import TokenDraws, Warp
from shoal.models.packed.layers import byte_count
from shoal.serve.batching.generation_job import GenerationJob
from shoal.serve.load_model import ServedModel
from shoal.serve.loaded_model import LoadedModel
from shoal.serve.model_pool import ModelPool, ModelSource
from shoal.web.auth import RefusedError
from tests.support.processes import HANG_S
from tests.support.small_service import small_model, small_served

SIZE = LoadedModel(small_served(), print).weight_bytes


class Models:
    """Models that can be loaded: who was, how often, and who may not yet."""

    def __init__(self, *names: str) -> None:
        self.loads: list[str] = []
        self.told: list[str] = []
        self.gates = {name: threading.Event() for name in names}
        self.faults: dict[str, str] = {}
        for gate in self.gates.values():
            gate.set()

    def load(self, name: str) -> ServedModel:
        self.loads.append(name)
        assert self.gates[name].wait(HANG_S)
        if name in self.faults:
            raise ShoalError(self.faults.pop(name))
        return small_served(small_model(), max_waiting=3)._replace(name=name)

    @contextmanager
    def pool(self, places: float) -> Iterator[ModelPool]:
        """A pool with memory for so many models."""
        sources = [ModelSource(name, lambda name=name: self.load(name), SIZE) for name in self.gates]
        tell, settings = self.told.append, small_served(max_waiting=3).settings
        made = ModelPool(sources, settings, tell, tell, 1.25 * places * SIZE).with_first()
        made.start()
        try:
            yield made
        finally:
            for gate in self.gates.values():
                gate.set()
            made.close()


def here(pool: ModelPool) -> set[str]:
    return {state.name for state in pool.states() if state.loaded is not None}


async def name_of(pool: ModelPool, name: str) -> str:
    async with pool.use(name) as used:
        return used.served.name


async def until(done: Callable[[], Any]) -> None:
    """Let others work until something is so."""
    async with asyncio.timeout(HANG_S):
        while not done():
            await asyncio.sleep(0.002)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_a_model_is_loaded_by_its_first_request_and_the_least_used_one_leaves() -> None:
    models = Models("a", "b", "c")

    async def ask() -> None:
        assert here(pool) == {"a"}
        for name in ("b", "a", "c"):
            assert await name_of(pool, name) == name
        assert here(pool) == {"a", "c"}
        assert await name_of(pool, "b") == "b"
        assert here(pool) == {"b", "c"}

    with models.pool(2) as pool:
        run(ask())
    assert models.loads == ["a", "b", "c", "b"]


def test_requests_that_come_together_load_once_and_others_are_answered_meanwhile() -> None:
    models = Models("a", "b")

    async def ask() -> None:
        models.gates["b"].clear()
        waiting = [asyncio.create_task(name_of(pool, "b")) for _ in range(4)]
        await until(lambda: models.loads == ["a", "b"])
        assert await name_of(pool, "a") == "a"
        assert not any(task.done() for task in waiting[:3])
        with pytest.raises(RefusedError, match="too many requests wait"):  # the server has three places for those who wait
            await waiting[3]
        waiting[0].cancel()
        models.gates["b"].set()
        assert await asyncio.gather(*waiting[1:3]) == ["b", "b"]

    with models.pool(2) as pool:
        run(ask())
        entry = pool._entry("b")[0]
        assert entry.users == 0
    assert models.loads == ["a", "b"]


def test_a_load_that_fails_says_why_and_the_next_request_tries_again() -> None:
    models = Models("a", "b")
    models.faults["b"] = "its file is damaged"

    async def ask() -> None:
        answers = await asyncio.gather(name_of(pool, "b"), name_of(pool, "b"), return_exceptions=True)
        assert [(one.status, one.code) for one in answers] == [(503, "model_not_loaded")] * 2
        assert all("'b' cannot be loaded: its file is damaged" in one.message for one in answers)
        assert await name_of(pool, "b") == "b"

    with models.pool(2) as pool:
        run(ask())
    assert models.loads == ["a", "b", "b"]


def test_a_request_waits_for_a_load_no_longer_than_its_deadline() -> None:
    models = Models("a", "b")

    async def ask() -> None:
        models.gates["b"].clear()
        pool.settings = pool.settings.replace(request_timeout_s=0.01)
        with pytest.raises(RefusedError) as refused:
            await name_of(pool, "b")
        assert (refused.value.status, refused.value.code) == (504, "timeout")

    with models.pool(2) as pool:
        run(ask())


def test_a_model_leaves_when_its_requests_have_ended_and_comes_again_for_later_ones() -> None:
    models = Models("a", "b")

    async def ask() -> None:
        ended: list[Any] = []
        async with pool.use("a") as used:
            used.engine.submit(GenerationJob([1, 2], 150, TokenDraws(1, [1]), lambda event: ended.append(event), Warp(1.0)))
            wants = asyncio.create_task(name_of(pool, "b"))
            await until(lambda: pool._entry("a")[0].leaving)
            late = asyncio.create_task(name_of(pool, "a"))
            await asyncio.sleep(0)
            assert here(pool) == {"a"}
        assert await wants == "b"
        assert len(ended) == 151
        assert ended[-1].reason == "length"
        assert await late == "a"
        assert pool.state("a").counts["written"] == 150

    with models.pool(1.5) as pool:
        run(ask())
    assert models.loads == ["a", "b", "a"]


def test_an_unknown_model_is_refused_with_the_names_there_are() -> None:
    models = Models("a", "b")

    async def ask() -> None:
        with pytest.raises(RefusedError, match=r"no model 'x' here; there are 'a', 'b'") as refused:
            await name_of(pool, "x")
        assert (refused.value.status, refused.value.code, refused.value.param) == (404, "model_not_found", "model")

    with models.pool(2) as pool:
        run(ask())


def test_a_model_that_left_leaves_no_weights_behind() -> None:
    import weakref

    models = Models("a", "b")

    async def ask() -> None:
        assert await name_of(pool, "b") == "b"

    with models.pool(1) as pool:
        left = weakref.ref(pool.first.served.model)
        assert byte_count(pool.first.served.model) <= SIZE
        run(ask())
        assert here(pool) == {"b"}
        assert left() is None
