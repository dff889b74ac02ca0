"""PTX with the L2 policy of TMA loads; tests/ops/test_sm90_compile.py compiles such PTX."""

from finwhale.ops.launch.streamed_loads import MARK, streamed

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
