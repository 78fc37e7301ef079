"""``python -m context_cache.coordinator.traces.schema``: the JSON Schema of a line of a trace, as docs/ shows it."""

from __future__ import annotations

import json

from context_cache.coordinator.traces.format import json_schema

if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
