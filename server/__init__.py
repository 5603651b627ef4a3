"""Text and HTTP: the OpenAI-compatible front end. Never imports torch."""
