"""The committed page that shows every machine: pictures and tables, from the specs."""

from __future__ import annotations

from context_cache.diagrams.markdown import to_markdown
from context_cache.machines import ALL_MACHINES

__all__ = ["lifecycles_page"]

_HEAD = """# Lifecycles

Made from the tables in `machines/` by `./dev draw`; a test holds this page and the pictures to them.

How to read a picture:

* A box is a state, with what its owner holds in it. A yellow box has device work outstanding. A double border is final.
  What a state means is in the table below its picture.
* A solid arrow is an event: row numbers, event, guards, then the steps in order. The colour of the numbers says what
  the rows ask of the device at most: nothing, enqueued work, or waiting.
* A dashed red arrow is a way that only an error takes. A failure that several states of a phase share is drawn once,
  from a small dashed box, and said in the box of each state that has it.
* Rows that stay in their state are lines in its box. "also if" names failures that end where success does, and what is
  done after them.
* An arrow from a phase is for all its states; where they do not do the same, it has a line for each list of steps and
  says from which states.
* "runtime has synchronised" says why device work is over without a wait: the runtime waited for it before the call.
* In the picture of the request a letter stands for a list of steps; the key is below the picture.
* Purple is another machine: a step `machine.event` offers an event to it.

`context-cache draw request --around STATE` shows one state with its rows in full.

## All machines

![The machines and their couplings](../diagrams/rendered/overview.svg)

Three events of `coordinator` are offered by calls and not by rows, so no arrow has them: `clearing_failed` when the
upload of cleared rows raises at an end of life, `invariant_broken` when a call finds the bookkeeping contradicting
itself, and `shutdown`.

## The phases of a request

![The phases of a request](../diagrams/rendered/request-phases.svg)
"""


def lifecycles_page() -> str:
    """``docs/lifecycles.md``: every machine, picture and table."""
    parts = [_HEAD]
    for spec in ALL_MACHINES:
        title, rest = to_markdown(spec).split("\n", 1)
        picture = f"![The lifecycle of {spec.name}](../diagrams/rendered/{spec.name}.svg)"
        parts.append(f"\n{title}\n\n{picture}\n{rest}")
    return "".join(parts)


if __name__ == "__main__":
    print(lifecycles_page(), end="")
