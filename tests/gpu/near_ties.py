"""Greedy tokens of two runs whose sums are rounded otherwise."""

from finwhale import RequestOutput

# The difference of two logits of the embedded model moves by less than this. Between the CPU's
# float32 and bfloat16 it moved by up to 1.2 where greedy texts parted.
NEAR = 2.0


def assert_part_at_near_ties(found: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    """Two runs choose the same tokens until both are undecided between two.

    From there on the texts differ. The requests have log-probabilities of the most likely tokens.
    """
    same = 0
    for one, other in zip(found, wanted, strict=True):
        (a,), (b,) = one.outputs, other.outputs
        assert a.logprobs is not None and b.logprobs is not None
        assert len(a.token_ids) == len(b.token_ids)
        pairs = zip(a.token_ids, b.token_ids, strict=True)
        first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        same += len(a.token_ids) if first is None else first
        if first is None:
            continue
        x, y = a.token_ids[first], b.token_ids[first]
        tables = a.logprobs[first], b.logprobs[first]
        assert all({x, y} <= table.keys() for table in tables), (first, x, y, tables)
        leads = [abs(table[x].logprob - table[y].logprob) for table in tables]
        assert sum(leads) < NEAR, (first, x, y, tables)
    print(f"tokens before the first near tie: {same} of {32 * len(found)}")
