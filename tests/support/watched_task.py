"""A plugin of the tests: a task that counts its steps in a file for each process, and stops at one of them where a file says so.

The file says `die 3` or `wait 3`; with `hold 3` the process goes on when there is a file called `go`.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from torch import nn

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.plugins import Model, Task, builds
from shoal.tasks import Batch, Loss
from shoal.tasks.classification import Classification


class Watched(Task):
    """Classification, watched."""

    kind: Literal["watched"] = "watched"
    needs = "labels"


@builds(Watched)
class WatchedTask(Classification):
    def __init__(self, settings: Watched, run: Run, players: dict[str, nn.Module], shapes: DataShapes) -> None:
        super().__init__(players)

    def losses(self, batch: Batch) -> Iterator[Loss]:
        name = (sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else "alone") + os.environ.get("RANK", "")
        steps, wish = Path(f"{name}.steps"), Path(f"{name}.wish")
        with steps.open("a") as file:
            file.write(".")
        if wish.exists():
            what, step = wish.read_text().split()
            if steps.stat().st_size == int(step):
                wish.unlink()
                self._stop(what, step)
        yield from super().losses(batch)

    def _stop(self, what: str, step: str) -> None:
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"waiting at step {step}", flush=True)
        if what == "wait":
            signal.pause()
        while not Path("go").exists():
            time.sleep(0.01)


class Forgetful(Model):
    """A hidden layer with dropout: its numbers hang on the random ones."""

    kind: Literal["forgetful"] = "forgetful"
    learns = ("watched",)


@builds(Forgetful)
def forgetful(settings: Forgetful, run: Run, shapes: DataShapes) -> dict[str, nn.Module]:
    pixels = int(np.prod(shapes.image_shape))
    return {"model": nn.Sequential(nn.Flatten(), nn.Linear(pixels, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, shapes.num_classes))}
