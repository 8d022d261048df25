"""Rules of the settings of alerts."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from shoal.config.fields import Secret
from shoal.config.layers import Settings
from shoal.config.rules.rule import changed, rule
from shoal.config.schema.output import Alerts, Email

_ADDRESS = re.compile(r"[^@\s]+@[^@\s]+")
_TUNING = ("about", "no_progress_s", "loss_jump", "disk_gb", "link")


@rule("alerts.webhook")
def webhook_is_an_address(settings: Settings, webhook: Secret | None) -> None:
    if webhook is not None and not is_web_address(webhook.reveal()):
        message = "a webhook is an address such as https://example.org/hook, without spaces; a port in it is 1 to 65535"
        settings.report("alerts", message, "alerts.webhook")


@rule("alerts.link")
def link_is_an_address(settings: Settings, link: str | None) -> None:
    if link is not None and not is_web_address(link):
        settings.report("alerts", f"`{link}` is no address of a page", "alerts.link", help="it begins with http:// or https://")


@rule("alerts.email")
def email_can_be_sent(settings: Settings, email: Email) -> None:
    for name, addresses in (("to", email.to), ("sender", (email.sender,) if email.sender is not None else ())):
        for address in addresses:
            if not _ADDRESS.fullmatch(address):
                settings.report("alerts", f"`{address}` is no e-mail address", f"alerts.email.{name}")
    if email.user is not None and email.encryption == "none" and not _is_here(email.host):
        message = f"the password would go to {email.host} without encryption"
        settings.report("alerts", message, "alerts.email.encryption", "alerts.email.host", help="take starttls or tls")
    if email.to and (email.user is None) != (email.password is None or not email.password.reveal()):
        missing = "password (export SMTP_PASSWORD=…)" if email.user is not None else "user name (alerts.email.user)"
        settings.report(
            "alerts", f"the mail server is given one of user name and password, and the {missing} is missing", "alerts.email.to"
        )


@rule("alerts")
def alerts_have_a_way(settings: Settings, alerts: Alerts) -> None:
    if alerts.wanted and not alerts.about:
        settings.report("alerts", "this list is empty, so no alert would be sent", "alerts.about", help="leave it out for all kinds")
    if not alerts.wanted:
        for name in _TUNING:
            if changed(settings, f"alerts.{name}"):
                settings.warn_no_effect(f"alerts.{name}", "nothing sends alerts: set alerts.webhook, command, desktop or email")


def is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", text)
    except ValueError:
        return False


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
