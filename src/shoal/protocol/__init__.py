"""The protocol between workers and coordinator: messages, identities, frames of bytes."""
