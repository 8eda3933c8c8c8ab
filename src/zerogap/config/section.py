"""What every section of a recipe is: frozen, complete, and strict about unknown keys and about numbers."""

from typing import Annotated

import pydantic
from pydantic import Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction01 = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], pydantic.BeforeValidator(_as_tuple)]
"""One name or several."""


class Section(pydantic.BaseModel):
    """Base of all sections: frozen, unknown keys forbidden, defaults checked like given values."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )
