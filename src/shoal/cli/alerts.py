"""`shoal alerts`: sends a test message to every place that the settings name for alerts."""

from __future__ import annotations

import sys

from shoal.cli.options import load, make_parser, parse, require
from shoal.errors import ShoalError


def run(argv: list[str]) -> int:
    parser = make_parser("alerts", "Send a test message to every place where the alerts of a run go (settings `alerts`).")
    arguments, overrides = parse(parser, argv)
    run = require(load(arguments, overrides)).run
    if not run.alerts.wanted:
        raise ShoalError("nothing sends alerts: set alerts.webhook, alerts.command, alerts.desktop or alerts.email.to")
    from shoal.reporters.alert_channels import Alert, channels_of

    test = Alert("test", run.name or "a run", "this is a test: alerts of the run will come here", run.alerts.link or "shoal watch RUN")
    failed = 0
    for channel in channels_of(run.alerts):
        try:
            channel.send(test)
        except ShoalError as error:
            failed += 1
            print(f"error: {error}", file=sys.stderr)
        else:
            print(f"sent: {channel.name}")
    return 2 if failed else 0
