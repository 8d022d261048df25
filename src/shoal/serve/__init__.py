"""A trained model that answers: batches of requests, an API in OpenAI's form, a chat page."""
