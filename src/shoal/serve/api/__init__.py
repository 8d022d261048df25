"""The HTTP API in OpenAI's form."""
