"""What the chat server and the dashboard share: authentication, connection limits, pages."""
