"""Packages that export and engines need, which asrkit installs only where they are asked for."""

from importlib.util import find_spec


def require(*names: str, argument: str, extra: str) -> None:
    """ValueError unless these packages are installed.

    Args:
        names: As they are imported.
        argument: What asks for them: "format" or "engine".
        extra: The extra of asrkit that brings them.

    Raises:
        ValueError: Which package is missing, and how to install it.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        what = " and ".join(missing)
        raise ValueError(
            f"{argument}: expected one whose packages are installed, got one that needs {what}. "
            f"Install it: pip install 'asrkit[{extra}]'."
        )
