"""Settings that another machine sent: what they may make this machine do.

`limits.py` is the table of all settings, `permissions.py` holds what the user of this machine allowed, `settings.py` reads a received
configuration and applies both, and `redaction.py` keeps this machine's secrets out of what is answered.
"""

from shoal.config.received.permissions import Permissions
from shoal.config.received.redaction import Redactor
from shoal.config.received.settings import Sent, arguments_for, hub_names, limit_run, permissions_for, read_received

__all__ = ["Permissions", "Redactor", "Sent", "arguments_for", "hub_names", "limit_run", "permissions_for", "read_received"]
