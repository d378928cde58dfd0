"""Survivors that are explained: data beside this module, `survivors.toml`. Pure.

An explanation names a mutant by its module, function and change, so that it stays right when other lines are added. One that
holds for many mutants alike names what they have in common: their function, or a part of the line that they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from epd_conformance.errors import UsageError
from epd_conformance.power.mutants import Mutant
from epd_conformance.toml_file import read_toml

PATH = Path(__file__).with_name("survivors.toml")


class Explanation(BaseModel):
    """Why a mutant survives.

    Attributes:
        module: the last part of its name.
        function: qualified; empty for what runs on import, `*` for any.
        before, after: the changed lines, as `bench power --survivors` prints them; empty where `part` is given.
        part: what stands in the lines before the change.
        kind: `equivalent`: no behaviour differs that anybody could see; `accepted`: some does, no test sees it, and `why` says why
            that may stay so.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    module: str
    function: str
    before: str = ""
    after: str = ""
    part: str = ""
    kind: Literal["equivalent", "accepted"]
    why: str

    @model_validator(mode="after")
    def _both(self) -> Explanation:
        if bool(self.before) is not bool(self.after):
            raise ValueError(f"{self.module}.{self.function}: give before and after, or neither")
        if not self.before and not self.part:
            raise ValueError(
                f"{self.module}.{self.function}: give a change (before and after), or a part of the lines meant"
            )
        return self

    def fits(self, mutant: Mutant) -> bool:
        return (
            mutant.module.rpartition(".")[2] == self.module
            and self.function in ("*", mutant.function)
            and self.part in mutant.before
            and (not self.before or (mutant.before, mutant.after) == (self.before, self.after))
        )


def read(path: Path = PATH) -> list[Explanation]:
    """Raises UsageError for what is no such file."""
    try:
        return [Explanation(**one) for one in read_toml(path, f"{path.name}", "docs/power.md").get("survivor", [])]
    except ValidationError as error:
        raise UsageError(f"{path.name} holds no explanation: {error}") from error


def explanation_of(mutant: Mutant, explanations: Iterable[Explanation]) -> Explanation | None:
    return next((one for one in explanations if one.fits(mutant)), None)


def stale(explanations: Sequence[Explanation], survivors: Sequence[Mutant]) -> list[Explanation]:
    """Those that explain none of the survivors of a whole run."""
    return [one for one in explanations if not any(one.fits(mutant) for mutant in survivors)]
