"""Whether the server takes new work; shared by the signal handler and the routes."""

from dataclasses import dataclass


@dataclass
class Lifecycle:
    """Starts out serving; the first SIGTERM or SIGINT sets `draining`, and it never goes back.

    While draining, new work is refused with 503 and work in flight goes on.
    """

    draining: bool = False
