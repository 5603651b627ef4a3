"""Log lines for people or for machines."""

import json
import logging
import time

from adaflash.server.settings import ServerSettings

ACCESS = "adaflash.access"
TEXT = "%(asctime)s %(levelname)-7s %(message)s"
FIELDS = "fields"  # attribute of a record that holds what JSON lines show beside the message


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(settings: ServerSettings) -> None:
    """Send everything to stderr in the chosen shape."""
    handler = logging.StreamHandler()
    formatter = JsonFormatter() if settings.log_format == "json" else logging.Formatter(TEXT)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper(), force=True)
    logging.getLogger(ACCESS).setLevel(logging.INFO if settings.access_log else logging.ERROR)
    for noisy in ("httpx", "httpcore", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
