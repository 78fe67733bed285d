"""Packages that export and engines need, which asrkit installs only where they are asked for."""

from importlib.util import find_spec


def require(*names: str, extra: str, use: str) -> None:
    """ValueError unless these packages are installed.

    Args:
        names: As they are imported.
        extra: The extra of asrkit that brings them.
        use: What they are needed for: "to export".

    Raises:
        ValueError: Which package is missing, and how to install it.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        what = " and ".join(missing)
        raise ValueError(
            f"{extra}: expected {what} {use}, got an installation without. "
            f"Install it: pip install 'asrkit[{extra}]'."
        )
