"""The instructions that tests evaluate, as PTX's manual defines them."""

import torch
from tests.support.ptx import run_ptx


def evaluate(instruction: str, *words: int) -> int:
    (found,) = run_ptx(instruction, *(torch.tensor([word]) for word in words))
    return int(found)


def bits(x: float) -> int:
    return int(torch.tensor(x).view(torch.int32)) & 0xFFFFFFFF


def test_prmt_selects_bytes_or_their_signs() -> None:
    assert evaluate("prmt.b32 $0, $1, $2, 0x7410;", 0x44332211, 0x88776655) == 0x88552211
    assert evaluate("prmt.b32 $0, $1, 0, 0xb3a2;", 0x80FF7F01) == 0xFF80FFFF
    assert evaluate("prmt.b32 $0, $1, 0, 0x9180;", 0x80FF7F01) == 0x007F0001


def test_lop3_looks_its_result_up() -> None:
    x, y, z = 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA
    for table, wanted in ((0xEA, x & y | z), (0x96, x ^ y ^ z), (0x01, 0x01010101)):
        assert evaluate(f"lop3.b32 $0, $1, $2, $3, {table};", x, y, z) == wanted


def test_mad_keeps_the_lower_half() -> None:
    assert evaluate("mad.lo.s32 $0, $1, 0xF7F7F800, $2;", 3, 5) == (3 * 0xF7F7F800 + 5) % 2**32


def test_results_below_the_normal_numbers_are_0() -> None:
    exp2 = "ex2.approx.ftz.f32 $0, $1;"
    assert evaluate(exp2, bits(-126.0)) == bits(2.0**-126)
    assert evaluate(exp2, bits(-127.0)) == 0


def test_the_first_operand_is_the_upper_half() -> None:
    found = evaluate("cvt.rn.bf16x2.f32 $0, $1, $2;", bits(1.0), bits(-2.0))
    assert found == bits(1.0) | bits(-2.0) >> 16
    product = evaluate("mul.rn.bf16x2 $0, $1, $2;", found, found)
    assert product == bits(1.0) | bits(4.0) >> 16
