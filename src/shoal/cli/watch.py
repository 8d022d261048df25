"""`shoal watch`: shows runs in the browser, live or afterwards."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from shoal.cli.options import read_token_file
from shoal.cli.output import print_secret
from shoal.launch.side_processes import check_dashboard

PORT = 8650


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "shoal watch",
        description="Show runs in the browser, live or replayed. It only reads their folders; on this machine, the printed address also "
        "holds your password: with it the page pauses, resumes and stops the run, evicts workers, and shows how to join.",
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="runs' folders, to compare several (default: the newest in runs)")
    parser.add_argument("--host", metavar="ADDRESS", help="where to listen (default: this machine only; with --public everywhere)")
    parser.add_argument("--port", type=int, metavar="P", help=f"the port (default: {PORT}, or another if that is taken)")
    parser.add_argument(
        "--public", action="store_true", help="let other machines watch, with a token that is printed; it does not allow them to join"
    )
    parser.add_argument("--token-file", metavar="FILE", help="a file with your own token (at least 16 letters)")
    arguments = parser.parse_args(argv)
    check_dashboard()
    from shoal.dashboard.server import DashboardServer
    from shoal.runs.folder.run_reader import RunFolder, newest_run

    folders = [RunFolder(Path(name)) for name in arguments.runs] or [newest_run(Path("runs"))]
    host = arguments.host or ("0.0.0.0" if arguments.public else "127.0.0.1")
    token = _token(arguments)
    ports = [PORT, 0] if arguments.port is None else [arguments.port]
    server = DashboardServer(folders, host, ports, token, arguments.public)
    print_secret(f"watch {', '.join(str(one.path) for one in folders)} at {_address(host, server.port, token, server.owner_password)}")
    server.run()
    return 0


def _token(arguments: argparse.Namespace) -> str | None:
    if arguments.token_file:
        return read_token_file(arguments.token_file)
    return secrets.token_urlsafe(18) if arguments.public else None


def _address(host: str, port: int, token: str | None, owner_password: str) -> str:
    """The address to open. Browsers do not send the part after `#`, which holds the token and the owner's password."""
    from shoal.transports.addresses import to_tell

    known = to_tell(host)
    shown = f"[{known}]" if ":" in known else known
    secret = "&".join(f"{name}={value}" for name, value in (("token", token), ("owner", owner_password)) if value)
    return f"http://{shown}:{port}/" + (f"#{secret}" if secret else "")
