"""Error types, and the functions that build their messages."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = [
    "ArgumentError", "ArgumentTypeError", "FileFormatError", "MissingExtraError", "NotMeasuredError",
    "OutOfRangeWarning", "SharpmaxError", "UnsupportedError", "install_command", "packages_of", "reject",
    "reject_type",
]  # fmt: skip


class SharpmaxError(Exception):
    """Base of every error sharpmax raises on purpose."""


class ArgumentError(SharpmaxError, ValueError):
    """An argument has a value that is not allowed."""


class ArgumentTypeError(SharpmaxError, TypeError):
    """An argument has a type that is not allowed."""


class UnsupportedError(SharpmaxError, NotImplementedError):
    """The request makes sense but the chosen implementation cannot do it."""


class NotMeasuredError(SharpmaxError, AttributeError):
    """A row statistic was read that the chosen implementation did not measure."""


class MissingExtraError(SharpmaxError, ImportError):
    """An optional dependency is needed and not installed.

    `alone` is a package that the extra cannot declare, because it must be installed with `--no-deps`.
    """

    def __init__(self, package: str, extra: str, purpose: str, *, alone: str = "") -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f"install it with: {install_command(extra, package)}"
            + (f" && pip install --no-deps {alone}" if alone else "")
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return MissingExtraError.__new__, (MissingExtraError, str(self))  # a copy keeps only the message


class FileFormatError(SharpmaxError, ValueError):
    """A file does not have the expected format."""


class OutOfRangeWarning(UserWarning):
    """A policy was applied to rows outside the range it was fitted on."""


def packages_of(extra: str) -> list[str]:
    """Return the requirements of an extra; none if the package has no metadata, as in a copy of its source."""
    import re
    from importlib import metadata  # takes longer than all of `import sharpmax`

    try:
        declared = metadata.requires("sharpmax") or []
    except metadata.PackageNotFoundError:
        return []
    found: list[str] = []
    for requirement in declared:
        package, _, marker = (part.strip() for part in requirement.partition(";"))
        if re.search(rf"extra == ['\"]{extra}['\"]", marker):
            inner = re.fullmatch(r"sharpmax\[(.*)\]", package)
            found += [one for name in inner[1].split(",") for one in packages_of(name)] if inner else [package]
    return list(dict.fromkeys(found))


def install_command(extra: str, otherwise: str) -> str:
    """Return the command that installs the packages of an extra, or `otherwise` if they are unknown."""
    packages = packages_of(extra) or [otherwise]
    return " ".join(["pip install", *(f"'{package}'" if ">" in package else package for package in packages)])


def reject(argument: str, given: object, allowed: str, todo: str = "") -> NoReturn:
    """Raise an `ArgumentError` that names the argument, the value, what is allowed and what to do."""
    raise ArgumentError(f"{argument}: got {given}; allowed: {allowed}" + (f"; {todo}" if todo else ""))


def reject_type(argument: str, given: object, allowed: str, todo: str = "") -> NoReturn:
    """Raise an `ArgumentTypeError` with the message of `reject`."""
    raise ArgumentTypeError(f"{argument}: got {given}; allowed: {allowed}" + (f"; {todo}" if todo else ""))
