"""The thread in which the engine works."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal.serve.engine import Engine


class Driver:
    """Steps while there is something to do, and waits while there is not."""

    def __init__(self, engine: Engine, warn: Callable[[str], None]) -> None:
        self.engine, self.warn = engine, warn
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="shoal-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End every request and the thread."""
        with self.engine.arrived:
            self._ending = True
            self.engine.arrived.notify_all()
        self._thread.join()
        self.engine.cancel([job.number for job in (*self.engine.running, *self.engine.waiting)])
        self.engine.step()

    def _run(self) -> None:
        while self._wait():
            try:
                self.engine.step()
            except Exception as error:  # one request's fault must not end the service of the others
                self.warn(f"a step of the model failed, and the requests in it ended: {error}")
                self.engine.fail()

    def _wait(self) -> bool:
        with self.engine.arrived:
            self.engine.arrived.wait_for(lambda: self.engine.busy or self._ending)
            return not self._ending
