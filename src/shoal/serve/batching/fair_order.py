"""The order in which requests get places and are read: one with many answers or long prompts lets others through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal.serve.batching.generation_job import GenerationJob


class FairOrder:
    """The order in which requests get places and are read. One with many answers or long prompts lets others through.

    Holds: a request never has all places, if there are several; of waiting requests the one with the fewest places gets the next one; of
    prompts that are not read yet, that of the request of which the fewest tokens were read comes first, and every second time the oldest.
    """

    def __init__(self, most_running: int) -> None:
        self._most_of_one = max(1, most_running - 1)
        self._tokens: Counter[int] = Counter()
        self._is_oldest_first = False

    def next(self, waiting: Iterable[GenerationJob], running: Iterable[GenerationJob]) -> GenerationJob | None:
        """The job that gets the next place; None: none of them may have it."""
        places = Counter(job.request for job in running)
        allowed = [job for job in waiting if places[job.request] < self._most_of_one]
        return min(allowed, key=lambda job: places[job.request], default=None)

    def unread(self, running: Iterable[GenerationJob]) -> list[GenerationJob]:
        """The jobs whose prompts are not read yet, the next one first. `running`: the oldest first."""
        found = [job for job in running if job.read < len(job.prompt_ids)]
        self._tokens = Counter({job.request: self._tokens[job.request] for job in found})
        self._is_oldest_first = not self._is_oldest_first
        return found if self._is_oldest_first else sorted(found, key=lambda job: self._tokens[job.request])

    def add_read(self, job: GenerationJob, tokens: int) -> None:
        self._tokens[job.request] += tokens
