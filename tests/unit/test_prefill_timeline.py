"""What `tools/prefill_timeline.py` reads from a profile."""

import json
from pathlib import Path

from tools.prefill_timeline import by_kernel, launches, of_layer


def test_kernels_of_a_trace(tmp_path: Path) -> None:
    def event(ts: float, dur: float, stream: int, name: str, cat: str = "kernel") -> object:
        return {"ts": ts, "dur": dur, "name": name, "cat": cat, "args": {"stream": stream}}

    events = [
        event(12, 3, 7, "gemm"),
        event(0, 9, 0, "cudaLaunchKernel", "cuda_runtime"),
        event(13, 5, 9, "Memcpy PtoP", "gpu_memcpy"),
        event(10, 2, 7, "_attend_kernel"),
        event(30, 2, 7, "_attend_kernel"),
        event(33, 1, 7, "gemm"),
        {"name": "process_name", "args": {}},
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    found = launches(trace)
    assert [launch.start for launch in found] == [10, 12, 13, 30, 33]
    assert [line.split() for line in by_kernel(found, 2)] == [
        ["2.5", "us", "0.50", "times", "Memcpy", "PtoP"],
        ["2.0", "us", "1.00", "times", "_attend_kernel"],
        ["2.0", "us", "1.00", "times", "gemm"],
    ]
    lines = list(of_layer(found, 0))
    assert [line.split()[:2] for line in lines] == [
        ["0.0", "2.0"],
        ["2.0", "3.0"],
        ["3.0", "5.0"],
        ["20.0", "2.0"],
    ]
    assert lines[2].index("Memcpy") == lines[1].index("gemm") + 4
