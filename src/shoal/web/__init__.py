"""Shared by the chat server and the dashboard: authentication, connection limits, pages."""
