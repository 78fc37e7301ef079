"""A machine's table as a drawing reads it: values without callables, from a spec or from a committed JSON document.

Pictures, pages and diffs are made from this, so a table of an old revision is drawn without running its code, and
nothing of a running machine can get into a picture.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from attrs import Attribute, fields, frozen

from context_cache.machines import MachineSpec, document
from context_cache.machines.document import FORMAT

__all__ = ["KINDS", "Step", "Table", "TableError", "TableRow", "TableState", "as_table", "parse_table", "read_table"]

KINDS: Final = ("host", "publish", "enqueue", "clear", "wait", "couple")
"""What a step can be, as ``machines.document`` spells it."""


class TableError(ValueError):
    """A document that is no machine's table. The message says where and what to do."""


@frozen
class Step:
    """One step: ``kind`` is one of ``KINDS``, a coupling's ``name`` is ``machine.event``."""

    kind: str
    name: str


@frozen
class TableState:
    """A state; the fields are those of ``machines.State``."""

    name: str
    phase: str
    region: str
    meaning: str
    holds: str
    outstanding: bool
    final: bool
    on_enter: tuple[Step, ...]


@frozen
class TableRow:
    """A row; the fields are those of ``machines.Transition``, ``row`` is its number and guards are spelled out."""

    row: int
    event: str
    source: str
    target: str
    guards: tuple[str, ...]
    steps: tuple[Step, ...]
    failure_steps: tuple[Step, ...]
    publish_failure_steps: tuple[Step, ...]
    on_failure: str | None
    on_drain_failure: str | None
    on_publish_failure: str | None
    work_ended: str | None
    hot: bool

    @property
    def failures(self) -> tuple[tuple[str, str], ...]:
        """(cause, state) of every failure that the row names."""
        named = (
            ("device error", self.on_failure),
            ("drain failed", self.on_drain_failure),
            ("publish failed", self.on_publish_failure),
        )
        return tuple((cause, state) for cause, state in named if state is not None)

    @property
    def every_step(self) -> tuple[Step, ...]:
        """What the row does, and what it does after a failure."""
        return (*self.steps, *self.failure_steps, *self.publish_failure_steps)

    def failure_steps_of(self, cause: str) -> tuple[Step, ...]:
        """What the row does after a failure of that cause."""
        return {"device error": self.failure_steps, "publish failed": self.publish_failure_steps}.get(cause, ())


@frozen
class Table:
    """A machine, in table order."""

    name: str
    initial: str
    follows: str | None
    states: tuple[TableState, ...]
    rows: tuple[TableRow, ...]

    @property
    def couplings(self) -> tuple[str, ...]:
        """Every ``machine.event`` that a row or the entry of a state offers, in order of first appearance."""
        found: dict[str, None] = {}
        for row in self.rows:
            for step in row.every_step:
                if step.kind == "couple":
                    found.setdefault(step.name)
        for state in self.states:
            found.update((step.name, None) for step in state.on_enter if step.kind == "couple")
        return tuple(found)


def as_table(source: MachineSpec | Table) -> Table:
    """The table of a spec; a table is returned as it is."""
    return source if isinstance(source, Table) else read_table(document(source), source.name)


def parse_table(text: str, where: str) -> Table:
    """Read a document from JSON text; ``where`` names it in a :class:`TableError`."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise TableError(f"{where} is nested too deeply to be a table; {_REDRAW}") from None
    except ValueError as error:
        raise TableError(f"{where} is not JSON ({error}); {_REDRAW}") from None
    return read_table(value, where)


def read_table(value: Any, where: str) -> Table:
    """Read a document as ``machines.document`` makes it. Raises :class:`TableError` for whatever is none."""
    found = _mapping(value, where)
    version = found.get("format")
    if type(version) is not int or version != FORMAT:
        raise TableError(
            f"{where} has table format {version!r} and this version reads {FORMAT}; use the version of context-cache "
            "that wrote it, or write it again"
        )
    states = tuple(
        TableState(**_read(item, f"{where}: states[{at}]", TableState))
        for at, item in enumerate(_list(found.get("states"), f"{where}: states"))
    )
    rows = tuple(
        TableRow(**_read(item, f"{where}: rows[{at}]", TableRow))
        for at, item in enumerate(_list(found.get("rows"), f"{where}: rows"))
    )
    plain = {
        name: _CHECKS[kind](found.get(name), f"{where}: {name}")
        for name, kind in (("name", "str"), ("initial", "str"), ("follows", "str | None"))
    }
    table = Table(states=states, rows=rows, **plain)
    _check_names(table, where)
    return table


_REDRAW: Final = "write it again with `context-cache draw --format json`"


def _check_names(table: Table, where: str) -> None:
    known = [state.name for state in table.states]
    names = [(f"states[{at}].name", name) for at, name in enumerate(known)]
    for place, name in (*names, *((f"rows[{row.row}].event", row.event) for row in table.rows)):
        if not name.strip():
            raise TableError(f"{where}: {place} is blank; {_REDRAW}")
    for name in known:
        if known.count(name) > 1:
            raise TableError(f"{where}: state {name!r} is there twice; {_REDRAW}")
    ends = [("initial", table.initial)]
    for row in table.rows:
        ends += [(f"rows[{row.row}]", end) for end in (row.source, row.target, *(end for _, end in row.failures))]
    for place, end in ends:
        if end not in known:
            raise TableError(f"{where}: {place} names state {end!r}, which is not among the states; {_REDRAW}")
    if [row.row for row in table.rows] != list(range(len(table.rows))):
        raise TableError(f"{where}: the rows are not numbered 0, 1, 2 and so on; {_REDRAW}")


def _read(item: Any, where: str, kind: type) -> dict[str, Any]:
    """The fields of an attrs class out of a mapping, each checked against the field's annotation."""
    found = _mapping(item, where)
    values = {}
    for field in _fields(kind):
        if field.name not in found:
            raise TableError(f"{where} has no {field.name!r}; {_REDRAW}")
        values[field.name] = _CHECKS[str(field.type)](found[field.name], f"{where}.{field.name}")
    return values


def _fields(kind: type) -> tuple[Attribute[Any], ...]:
    return tuple(fields(kind))


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TableError(f"{where} is no JSON object; {_REDRAW}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise TableError(f"{where} is no list; {_REDRAW}")
    return value


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise TableError(f"{where} is no text; {_REDRAW}")
    return value


def _string_or_none(value: Any, where: str) -> str | None:
    return None if value is None else _string(value, where)


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise TableError(f"{where} is neither true nor false; {_REDRAW}")
    return value


def _integer(value: Any, where: str) -> int:
    if type(value) is not int:
        raise TableError(f"{where} is no whole number; {_REDRAW}")
    return value


def _strings(value: Any, where: str) -> tuple[str, ...]:
    return tuple(_string(item, f"{where}[{at}]") for at, item in enumerate(_list(value, where)))


def _steps(value: Any, where: str) -> tuple[Step, ...]:
    steps = []
    for at, item in enumerate(_list(value, where)):
        step = Step(**_read(item, f"{where}[{at}]", Step))
        if step.kind not in KINDS:
            raise TableError(f"{where}[{at}] has kind {step.kind!r}; it can be {', '.join(KINDS)}")
        steps.append(step)
    return tuple(steps)


_Check: TypeAlias = Callable[[Any, str], Any]
_CHECKS: Final[dict[str, _Check]] = {
    "str": _string,
    "str | None": _string_or_none,
    "bool": _boolean,
    "int": _integer,
    "tuple[str, ...]": _strings,
    "tuple[Step, ...]": _steps,
}
