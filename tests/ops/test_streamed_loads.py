"""PTX with the L2 policy of TMA loads; tests/ops/test_sm90_compile.py compiles such PTX."""

from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
from triton import knobs

from finwhale.ops.launch.streamed_loads import KEY, MARK, install_hook, streamed

LOAD = (
    "@%p4 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%r21], [%rd10, {%r22, %r464}], [%r20];"
)
PTX = f"mov.u32 %r1, 0;\n{LOAD}\nst.global.b32 [%rd1], %r1;\n{LOAD.removeprefix('@%p4 ')}\n"


def test_loads_of_a_kernel_with_the_mark_get_the_policy() -> None:
    lines = streamed(f"{MARK}\n{PTX}").splitlines()
    for line, when in ((lines[2], "@%p4 "), (lines[4], "")):
        policy, load = line.split("policy, 1.0; ")
        assert policy == "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 "
        assert load.startswith(f"{when}cp.async.bulk.tensor.2d.")
        assert load.endswith(
            "complete_tx::bytes.L2::cache_hint [%r21], [%rd10, {%r22, %r464}], [%r20], policy; }"
        )
    assert [lines[1], lines[3]] == [PTX.splitlines()[0], PTX.splitlines()[2]]


def test_other_kernels_stay_as_they_are() -> None:
    assert streamed(PTX) == PTX


@pytest.mark.parametrize("has_other", [False, True])
def test_the_hook_of_the_host_program_still_runs(
    has_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*args: Any) -> tuple[str, str] | None:
        if not args:
            return "other", "other's"
        _, stages, *more = args
        assert more == ["options", "language", 90]
        make = stages["ptx"]
        stages["ptx"] = lambda *given: f"// other\n{make(*given)}"
        return None

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", other if has_other else None)
    install_hook()
    hook: Any = knobs.runtime.add_stages_inspection_hook
    install_hook()
    assert knobs.runtime.add_stages_inspection_hook is hook
    stages: dict[str, Any] = {"ptx": lambda source, metadata: f"{source}{PTX}"}
    assert hook("backend", stages, "options", "language", 90) is None
    first = "// other\n" if has_other else ""
    assert stages["ptx"](f"{MARK}\n", {}) == first + streamed(f"{MARK}\n{PTX}")
    assert stages["ptx"]("", {}) == first + PTX
    keys = ("other", "other's") if has_other else ("", "")
    assert hook() == tuple(key + KEY for key in keys)
