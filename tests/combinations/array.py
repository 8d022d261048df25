"""The covering array: rows in which every pair of values occurs that `shoal config check` accepts without saying that one has no effect.

`python -m tests.combinations.array` computes `rows.json` anew, after a change of the factors or of the rules between settings.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from shoal.config.load import resolve_data
from tests.combinations.factors import DEFAULTS, FACTORS, Row, pairs_of, settings_of

ROWS = Path(__file__).with_name("rows.json")
Pair = tuple[str, str, str, str]


def objection(row: Row) -> str | None:
    """What `shoal config check` has against a row: an error, or a setting without effect. Dropout that has no effect is kept: a model with
    dropout is learned further without it."""
    loaded = resolve_data(settings_of(row), name="row", dialect="shoal", environ={})
    problems = [problem for problem in loaded.problems if problem.severity == "error" or problem.code == "no-effect"]
    return next((problem.message for problem in problems if not problem.message.startswith("`model.dropout`")), None)


STRUCTURE = ("model", "layers", "task", "prompts", "strategy", "engine")
"""Factors on whose values it depends whether the values of the others can be chosen at all, in an order in which each depends on earlier
ones only."""
_TRIES = 120


class Search:
    """Finds accepted rows that hold given values."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.known: dict[tuple[str, ...], str | None] = {}
        self.structures: list[dict[str, str]] = [dict(DEFAULTS)]
        for factor in STRUCTURE:
            rows = [{**row, factor: value} for row in self.structures for value in FACTORS[factor]]
            self.structures = [row for row in rows if self.accepts(row)]

    def accepts(self, row: Row) -> bool:
        key = tuple(row[factor] for factor in FACTORS)
        if key not in self.known:
            self.known[key] = objection(row)
        return self.known[key] is None

    def holding(self, pair: Pair) -> dict[str, str] | None:
        """An accepted row with this pair of values; None: there is none."""
        one, value, other, another = pair
        fixed = {one: value, other: another}
        structural = {factor: wanted for factor, wanted in fixed.items() if factor in STRUCTURE}
        fitting = [row for row in self.structures if all(row[factor] == wanted for factor, wanted in structural.items())]
        rows = ({**row, **fixed} for row in self.random.sample(fitting, min(_TRIES, len(fitting))))
        return next((row for row in rows if self.accepts(row)), None)

    def filled(self, row: dict[str, str], pair: Pair, missing: set[Pair]) -> dict[str, str]:
        """The row with those values of its other factors that bring the most missing pairs."""
        factors = [factor for factor in FACTORS if factor not in (pair[0], pair[2])]
        self.random.shuffle(factors)
        for factor in factors:
            trials = [{**row, factor: value} for value in FACTORS[factor]]
            trials.sort(key=lambda trial: -sum(pair in missing for pair in pairs_of(trial)))
            row = next((trial for trial in trials if self.accepts(trial)), row)
        return row


def all_pairs() -> list[Pair]:
    rows = itertools.combinations(FACTORS, 2)
    return [(one, value, other, another) for one, other in rows for value in FACTORS[one] for another in FACTORS[other]]


def kept_rows(search: Search) -> list[Row]:
    """The present rows that are still accepted: a new value adds few rows to them."""
    rows = [{**DEFAULTS, **row} for row in json.loads(ROWS.read_text())["rows"]] if ROWS.exists() else []
    return [row for row in rows if all(row[factor] in FACTORS[factor] for factor in FACTORS) and search.accepts(row)]


def covering_array(search: Search) -> tuple[list[Row], list[Pair]]:
    """The rows, and the pairs that no accepted row holds."""
    missing, rows, refused = set(all_pairs()), kept_rows(search), list[Pair]()
    missing.difference_update(*map(pairs_of, rows))
    for pair in all_pairs():
        if pair not in missing:
            continue
        start = search.holding(pair)
        if start is None:
            refused.append(pair)
            missing.discard(pair)
            print("refused:", *pair, flush=True)
            continue
        row = search.filled(start, pair, missing)
        rows.append(row)
        missing.difference_update(pairs_of(row))
        print(f"row {len(rows)}; {len(missing)} pairs are missing", flush=True)
    return rows, refused


def main() -> None:
    rows, refused = covering_array(Search())
    written = {"rows": [{factor: value for factor, value in row.items() if value != DEFAULTS[factor]} for row in rows], "refused": refused}
    ROWS.write_text(
        "{\n" + ",\n".join(f'"{name}": [\n' + ",\n".join(map(json.dumps, items)) + "\n]" for name, items in written.items()) + "\n}\n"
    )
    print(f"{len(rows)} rows hold {len(all_pairs()) - len(refused)} pairs; {len(refused)} pairs are refused")


if __name__ == "__main__":
    main()
