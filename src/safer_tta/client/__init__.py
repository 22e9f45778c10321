"""Talk to a running service: `Client`, and `send_folder` for a folder of images."""

from ..errors import ServiceError
from .client import Client
from .send import send_folder

__all__ = ["Client", "ServiceError", "send_folder"]
