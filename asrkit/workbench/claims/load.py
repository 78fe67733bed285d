"""Read data/claims.yaml."""

import functools

import yaml

from asrkit.files import shipped
from asrkit.workbench.claims.claims import Claim


def load_claims() -> list[Claim]:
    """The claims that asrkit ships."""
    return list(_claims())


@functools.cache
def _claims() -> tuple[Claim, ...]:
    """One set of objects, so that each formula is computed once."""
    entries = yaml.safe_load(shipped("claims.yaml").read_text("utf-8"))
    return tuple(Claim(**entry) for entry in entries)
