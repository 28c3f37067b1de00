"""Halt: signals, requests and the end of an allocation."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .controller import HaltController
    from .request_file import FILE_NAME, clear as clear_request, parse_time, read as read_request
    from .request_file import write as write_request
    from .signals import Signals

__getattr__ = lazy_exports(__name__)
