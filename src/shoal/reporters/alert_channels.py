"""Ways in which an alert reaches a person: webhook, command, desktop notification, e-mail.

Each is a function that sends one alert, and raises ShoalError with the reason where that fails. Each takes at most half a minute.
"""

from __future__ import annotations

import json
import shutil
import smtplib
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import EmailMessage
from http.client import HTTPException
from typing import NamedTuple
from urllib.parse import urlsplit

from shoal.config.environment import has_screen, with_variables
from shoal.config.schema.output import Alerts, Email
from shoal.errors import ShoalError, printable

_TIMEOUT_S, _COMMAND_S = 10.0, 30.0
_LONGEST_REASON = 300
_POWERSHELL = (
    "[Windows.UI.Notifications.ToastNotificationManager,Windows.UI.Notifications,ContentType=WindowsRuntime]|Out-Null;"
    "$t=[Windows.UI.Notifications.ToastNotificationManager]::GetTemplateContent(1);$x=$t.GetElementsByTagName('text');"
    "$x[0].AppendChild($t.CreateTextNode($env:ALERT_TITLE))|Out-Null;$x[1].AppendChild($t.CreateTextNode($env:ALERT_TEXT))|Out-Null;"
    "[Windows.UI.Notifications.ToastNotificationManager]::CreateToastNotifier('Shoal').Show($t)"
)
"""The texts come from the environment, so that no text becomes a part of the program."""
_SCRIPT = 'display notification (system attribute "ALERT_TEXT") with title (system attribute "ALERT_TITLE")'


class Alert(NamedTuple):
    """What a person is told."""

    kind: str
    """What it is about: one of the settings' `alerts.about`, or `test`."""
    run: str
    text: str
    link: str
    """Address of a page with more, or the command that shows one."""

    @property
    def title(self) -> str:
        return f"Shoal: {self.run}: {self.kind}"

    @property
    def whole(self) -> str:
        return f"{self.run}: {self.text}\n{self.link}"


class Channel(NamedTuple):
    """A way to a person."""

    name: str
    """For the user; without secrets."""
    send: Callable[[Alert], None]


def channels_of(settings: Alerts) -> list[Channel]:
    """The ways that the settings name. Raises ShoalError where this machine cannot use one."""
    return list(_channels_of(settings))


def _channels_of(settings: Alerts) -> Iterator[Channel]:
    if (secret := settings.webhook) is not None:
        address = secret.reveal()
        yield Channel(f"a webhook at {urlsplit(address).hostname}", lambda alert: _post(address, alert))
    if settings.command:
        program = shutil.which(settings.command[0])
        if program is None:
            raise ShoalError(f"alerts.command: there is no program `{settings.command[0]}` on this machine")
        arguments = [program, *settings.command[1:]]
        yield Channel(f"the command {settings.command[0]}", lambda alert: _run("alerts.command", arguments, alert))
    if settings.desktop:
        yield _desktop()
    if settings.email.to:
        yield Channel(f"e-mail to {', '.join(settings.email.to)}", lambda alert: _mail(settings.email, alert))


# --- webhooks -----------------------------------------------------------------------------------------


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A webhook that points elsewhere is a mistake; the text goes to no other address than the one that was named."""

    def redirect_request(self, *arguments: object) -> None:
        return None


def _post(address: str, alert: Alert) -> None:
    body = {"text": alert.whole, "content": alert.whole, "alert": alert.kind, "run": alert.run, "message": alert.text, "link": alert.link}
    headers = {"Content-Type": "application/json", "User-Agent": "shoal"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    host = urlsplit(address).hostname
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_S) as response:
            response.read(1)
    except urllib.error.HTTPError as error:
        raise ShoalError(f"alerts.webhook: {host} answered with status {error.code}") from None
    except (OSError, ValueError, HTTPException) as error:
        raise ShoalError(f"alerts.webhook: {host} does not answer: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return printable(str(getattr(error, "reason", None) or error or type(error).__name__))[:_LONGEST_REASON]


# --- programs -----------------------------------------------------------------------------------------


def _run(setting: str, command: list[str], alert: Alert) -> None:
    told = {"": alert.kind, "_RUN": alert.run, "_TEXT": alert.text, "_LINK": alert.link, "_TITLE": alert.title}
    environ = with_variables({f"ALERT{name}": text.replace("\0", "") for name, text in told.items()})
    try:
        done = subprocess.run(command, input=f"{alert.whole}\n".encode(), capture_output=True, timeout=_COMMAND_S, check=False, env=environ)
    except subprocess.TimeoutExpired:
        raise ShoalError(f"{setting}: {command[0]} did not end within {_COMMAND_S:.0f} s, and was killed") from None
    except OSError as error:
        raise ShoalError(f"{setting}: {command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = printable(done.stderr[-_LONGEST_REASON:].decode(errors="replace").strip())
        raise ShoalError(f"{setting}: {command[0]} ended with exit code {done.returncode}{f': {said}' if said else ''}")


def _desktop() -> Channel:
    """Raises ShoalError on a machine that shows no notifications."""
    if sys.platform == "darwin":
        command = ["osascript", "-e", _SCRIPT]
    elif sys.platform == "win32":
        command = ["powershell", "-NoProfile", "-Command", _POWERSHELL]
    elif not has_screen():
        raise ShoalError(
            "alerts.desktop: this machine has no screen (DISPLAY and WAYLAND_DISPLAY are empty); take webhook, command or email"
        )
    else:
        command = ["notify-send", "--app-name=Shoal"]
    if (program := shutil.which(command[0])) is None:
        raise ShoalError(f"alerts.desktop: there is no {command[0]} on this machine; on Debian: apt install libnotify-bin")

    def send(alert: Alert) -> None:
        texts = ["--", alert.title, alert.whole] if command[0] == "notify-send" else []
        _run("alerts.desktop", [program, *command[1:], *texts], alert)

    return Channel("notifications on this machine's screen", send)


# --- e-mail -------------------------------------------------------------------------------------------


def _mail(settings: Email, alert: Alert) -> None:
    message = EmailMessage()
    user_address = settings.user if settings.user and "@" in settings.user else None
    message["From"] = settings.sender or user_address or settings.to[0]
    message["To"] = ", ".join(settings.to)
    message["Subject"] = " ".join(alert.title.split())
    message.set_content(alert.whole + "\n")
    try:
        with _connected(settings) as server:
            if settings.user is not None and settings.password is not None:
                server.login(settings.user, settings.password.reveal())
            server.send_message(message)
    except (OSError, smtplib.SMTPException, ValueError) as error:
        help = "" if settings.host != Email().host else "; alerts.email.host names the mail server, if it is another"
        raise ShoalError(f"alerts.email: {settings.host} did not take it: {_reason(error)}{help}") from None


def _connected(settings: Email) -> smtplib.SMTP:
    port = settings.port or {"tls": 465, "starttls": 587, "none": 25}[settings.encryption]
    if settings.encryption == "tls":
        return smtplib.SMTP_SSL(settings.host, port, timeout=_TIMEOUT_S, context=ssl.create_default_context())
    server = smtplib.SMTP(settings.host, port, timeout=_TIMEOUT_S)
    if settings.encryption == "starttls":
        server.starttls(context=ssl.create_default_context())
    return server
