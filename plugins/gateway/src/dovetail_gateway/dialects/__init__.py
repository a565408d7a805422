"""The APIs that the gateway serves: each reads a request into a `ModelCall`, and writes answers, events and errors in its format."""
