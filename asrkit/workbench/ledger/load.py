"""Read and check data/claims.yaml."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from asrkit.files import shipped
from asrkit.shapes import expect
from asrkit.workbench.ledger.claims import Claim
from asrkit.workbench.ledger.computed import verdict_by_formula
from asrkit.workbench.schemas import CLAIM, Mismatch, validator


def load_claims(path: str | Path | None = None) -> list[Claim]:
    """The claims of a YAML file.

    Args:
        path: The file; by default the one that asrkit ships.

    Raises:
        ValueError: The file is not YAML, or a claim breaks the schema, repeats an id or has a
            formula that cannot be computed. The message names the claim.
    """
    if path is None:
        return list(_shipped_claims())
    return _read(Path(path))


@functools.cache
def _shipped_claims() -> tuple[Claim, ...]:
    """The shipped claims; one set of objects, so that each formula is computed once."""
    return tuple(_read(Path(shipped("claims.yaml"))))


def _read(path: Path) -> list[Claim]:
    try:
        entries = yaml.safe_load(path.read_text("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected YAML, got {' '.join(str(error).split())}.") from error
    expect(isinstance(entries, list), str(path), "a list of claims", type(entries).__name__)
    claims = dict[str, Claim]()
    for entry in entries:
        name = entry
        if isinstance(entry, dict):
            name = entry.get("id")
        try:
            claim = _claim(entry)
            if claim.id in claims:
                raise ValueError(f"duplicate id {claim.id}.")
        except Exception as error:  # a formula may fail in any way
            raise ValueError(f"claim {name!r}: {error}") from error
        claims[claim.id] = claim
    return list(claims.values())


def _claim(entry: Any) -> Claim:
    mismatch = _claim_validator()(entry)
    if mismatch is not None:
        raise ValueError(f"{mismatch.message}.")
    claim = Claim(**entry)
    if claim.formula and claim.quoted is not None:
        verdict_by_formula(claim)  # raises where the formula cannot be computed
    return claim


@functools.cache
def _claim_validator() -> Callable[[Any], Mismatch | None]:
    return validator(CLAIM)
