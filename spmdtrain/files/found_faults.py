"""Faults of devices in `status.json`."""

from typing import TypedDict


class FoundFault(TypedDict):
    """A fault that the sentinel has found."""

    step: int
    kind: str
    devices: list[str]
    processes: list[str]
    hosts: list[str]
    parameter: str


class SentinelStatus(TypedDict):
    """Findings of the sentinel, in `status.json`.

    Attributes:
      passed: The last step whose check has passed; 0 before the first one.
      faults: The newest faults.
    """

    passed: int
    faults: list[FoundFault]
