"""Whether a trace is one that Perfetto opens."""

from __future__ import annotations

from typing import Any


def check(trace: dict[str, Any]) -> None:
    """Whether an object is a trace in Chrome's JSON object format, of complete events, instants and metadata."""
    assert trace.keys() == {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    assert isinstance(events, list)
    named, rows = set(), {}
    for event in events:
        assert isinstance(event["name"], str) and event["name"]
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("pid", "tid"))
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            field = "sort_index" if event["name"] == "thread_sort_index" else "name"
            assert event["args"].keys() == {field}
            named.add((event["name"], event["pid"], event["tid"] if event["name"] != "process_name" else 0))
            continue
        assert isinstance(event["cat"], str) and isinstance(event["ts"], int | float) and event["ts"] >= 0
        assert all(isinstance(value, str) for value in event["args"].values())
        assert {("process_name", event["pid"], 0), ("thread_name", event["pid"], event["tid"])} <= named
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
            continue
        assert event["ph"] == "X" and event["dur"] >= 0
        row = event["pid"], event["tid"]
        assert event["ts"] >= rows.get(row, 0.0) - 0.2, "spans of one thread overlap, which the format would nest"
        rows[row] = event["ts"] + event["dur"]
