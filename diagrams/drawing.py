"""From a machine's table to a picture, without a picture yet: nodes, edges, labels.

Everything is drawn from the spec, never from a running machine, in table order, so that two processes draw the same
bytes. Rows between the same two states are folded into one edge; an edge that every state of a phase has is drawn once,
from the phase.
"""

from __future__ import annotations

from attrs import frozen

from context_cache.machines import MachineSpec, Transition

__all__ = ["Drawing", "Edge", "Node", "draw"]


@frozen
class Node:
    """A state. ``phase`` is the group it stands in; empty: none."""

    name: str
    phase: str
    initial: bool
    final: bool


@frozen
class Edge:
    """One arrow, from a state, or from a phase when ``from_phase`` is set. ``failure``: only an error goes this way."""

    source: str
    target: str
    labels: tuple[str, ...]
    failure: bool
    from_phase: bool = False


@frozen
class Drawing:
    """What a renderer needs, in table order."""

    name: str
    phases: tuple[str, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def draw(spec: MachineSpec) -> Drawing:
    """The drawing of a machine. Loops that change nothing but stay in a state are left to the table."""
    nodes = tuple(Node(state.name, state.phase, state.name == spec.initial, state.final) for state in spec.states)
    phase_of = {node.name: node.phase for node in nodes}
    members: dict[str, list[str]] = {}
    for node in nodes:
        members.setdefault(node.phase, []).append(node.name)
    # (source, target, failure) -> labels, in order of first appearance.
    folded: dict[tuple[str, str, bool], dict[str, None]] = {}
    for row in spec.transitions:
        if row.target != row.source:
            folded.setdefault((row.source, row.target, False), {}).setdefault(row.event)
        for end, cause in _failures(row):
            if end != row.source and end != row.target:
                folded.setdefault((row.source, end, True), {}).setdefault(cause)
    edges: list[Edge] = []
    for (source, target, failure), labels in folded.items():
        shared = _shared_labels(folded, members[phase_of[source]], target, failure)
        own = tuple(label for label in labels if label not in shared)
        if shared and source == members[phase_of[source]][0]:
            edges.append(Edge(phase_of[source], target, shared, failure, from_phase=True))
        if own:
            edges.append(Edge(source, target, own, failure))
    phases = tuple(phase for phase in members if phase and len(members[phase]) > 1)
    return Drawing(spec.name, phases, nodes, tuple(edges))


def _failures(row: Transition) -> list[tuple[str, str]]:
    causes = (
        (row.on_failure, "device error"),
        (row.on_drain_failure, "drain failed"),
        (row.on_publish_failure, "publish failed"),
    )
    return [(end, cause) for end, cause in causes if end is not None]


def _shared_labels(
    folded: dict[tuple[str, str, bool], dict[str, None]], group: list[str], target: str, failure: bool
) -> tuple[str, ...]:
    """Labels that every state of a phase has on its way to ``target``."""
    if len(group) < 2 or target in group:
        return ()
    first = folded.get((group[0], target, failure), {})
    return tuple(
        label for label in first if all(label in folded.get((member, target, failure), {}) for member in group)
    )
