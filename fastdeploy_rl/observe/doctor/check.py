"""One finding of the doctor, as data. Owns the three statuses; knows nothing of what is checked.

Every `warn` and `fail` carries its mend: what to type, or which option to set.
"""

import enum

import msgspec


class Status(enum.Enum):
    """OK: nothing to do. WARN: works, but not for everybody or not for long. FAIL: something will not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, frozen=True):
    """`found` is what is the case, `mend` what to do about it. An OK check may carry a mend for a case that only the
    reader knows of, and then begins with "if"."""

    name: str
    status: Status
    found: str
    mend: str = ""


class Section(msgspec.Struct, frozen=True):
    """Checks that belong together."""

    title: str
    checks: list[Check]


def ok(name: str, found: str, mend: str = "") -> Check:
    return Check(name, Status.OK, found, mend)


def warn(name: str, found: str, mend: str) -> Check:
    return Check(name, Status.WARN, found, mend)


def fail(name: str, found: str, mend: str) -> Check:
    return Check(name, Status.FAIL, found, mend)


def worst(sections: list[Section]) -> Status:
    """FAIL over WARN over OK."""
    found = {check.status for section in sections for check in section.checks}
    return next(status for status in (Status.FAIL, Status.WARN, Status.OK) if status in found or status is Status.OK)
