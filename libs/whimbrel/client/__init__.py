"""What ops tooling imports: an admin client over HTTP and an async iterator over the public events."""

from whimbrel.client.admin import AdminClient, ApiError
from whimbrel.client.events import Received, events

__all__ = ["AdminClient", "ApiError", "Received", "events"]
