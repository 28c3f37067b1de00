"""Goodput: the time of a job over all its runs, by category.

`heartbeat` writes the records of one rank among its events, and `records` reads the files.
`account` groups them into runs of the job, divides their time, writes it for people and as JSON,
and names what would help.

The categories and the three goodputs are those of Google's ML Productivity Goodput (A. Wongpanich
et al., 2025) and of its library ML Goodput Measurement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .account import CATEGORIES, Account, Ending, account as account_of, advice, document
    from .heartbeat import Heartbeat
    from .records import read as read_records

__getattr__ = lazy_exports(__name__)
