"""Errors a user can cause, and can mend.

ShoalError             exit code 2, no traceback
└── ConfigError        one or more problems in the configuration
"""

from __future__ import annotations


class ShoalError(Exception):
    """Something the user can put right: the message says what, where, and what to do."""
