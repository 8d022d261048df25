"""Attacks, each against a coordinator that is alive. What they are made of lies with the parts that they attack."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("coordinator", "transports"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / room))
