"""What workers and coordinator exchange: messages, identities, frames of bytes."""
