"""The declaration of cached state against what the model's formulas need, and its sizes."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiny import tiny_config

from finwhale.engine.start.kv_cache import CachePlan, allocate_cache, plan_cache
from finwhale.errors import ResourceError
from finwhale.models.cache import CacheGroup
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.presets import published


def tiny(seed: int) -> DeepseekV4Config:
    return config_of(tiny_config(seed))


def group(config: DeepseekV4Config, name: str) -> CacheGroup:
    return next(g for g in cache_spec(config) if g.name == name)


def window_only() -> DeepseekV4Config:
    raw = tiny_config(0)
    return config_of(
        raw | {"compress_ratios": [0] * (raw["num_hidden_layers"] + 1), "num_hash_layers": 1}
    )


@pytest.mark.parametrize(("preset", "bytes_per_token"), [("flash", 3514), ("pro", 5031)])
def test_what_the_published_models_keep(preset: str, bytes_per_token: int) -> None:
    """Packed: 584 bytes an entry, 68 an index key in FP4 (figures of the model's facts)."""
    config = published(preset)
    stored = {"c4": 584, "c128": 584, "index_keys": 68}
    total = declared = 0.0
    for g in cache_spec(config):
        if g.keep is None:
            total += sum(stored[f.name] * len(f.layers) for f in g.fields) / g.tokens_per_row
            declared += g.page_bytes(2, packed=True) / g.tokens_per_page
    assert int(total) == bytes_per_token
    # A page of two C128 entries ends at a multiple of 16 bytes.
    assert 0 <= declared - total < len(config.layer_ratios) * 16 / 256
    window = group(config, "window")
    # Every layer and the MTP layer; 127 positions behind the next token, and its own.
    assert len(window.fields[0].layers) == config.num_hidden_layers + 1
    assert window.keep == (1, 127)


@pytest.mark.parametrize("seed", range(8))
def test_fields_lie_with_their_layers(seed: int) -> None:
    config = tiny(seed)
    kept = {f.name: f for g in cache_spec(config) for f in g.fields}
    ratios = config.compress_ratios
    assert kept["window"].layers == tuple(range(config.num_hidden_layers + 1))
    c4 = tuple(i for i, r in enumerate(ratios) if r == 4)
    c128 = tuple(i for i, r in enumerate(ratios) if r == 128)
    for name, layers, width, full in (
        ("window", kept["window"].layers, config.head_dim, False),
        ("c4", c4, config.head_dim, False),
        ("index_keys", c4, config.index_head_dim, False),
        # Two halves of keys and values, two of gates.
        ("c4_state", c4, 4 * config.head_dim, True),
        ("index_state", c4, 4 * config.index_head_dim, True),
        ("c128", c128, config.head_dim, False),
        ("c128_state", c128, 2 * config.head_dim, True),
    ):
        assert (kept[name].layers, kept[name].width, kept[name].full_precision) == (
            layers,
            width,
            full,
        )


def test_a_model_of_window_layers_keeps_nothing_else() -> None:
    assert [g.name for g in cache_spec(window_only())] == ["window"]


def mixed_from(name: str, window: int, position: int) -> int:
    """The first token that the token at `position` reads state of, by the formulas."""
    if name == "window":
        return max(0, position - window + 1)
    if name in ("c4", "c128"):
        return 0
    if name == "c4_state":  # its entry mixes its own four tokens and the four before them
        return max(0, 4 * (position // 4) - 4)
    return 128 * (position // 128)


@pytest.mark.parametrize("seed", range(4))
def test_what_later_tokens_need_is_kept(seed: int) -> None:
    """And nothing more: first_needed is the least that any later token reads."""
    config = tiny(seed)
    for g in cache_spec(config):
        for read in range(600):
            later = range(read, read + 130)
            wanted = min(mixed_from(g.name, config.sliding_window, p) for p in later)
            assert g.first_needed(read) == wanted, (g.name, read)


@given(start=st.integers(0, 700), count=st.integers(1, 400))
def test_a_step_writes_what_it_leaves(start: int, count: int) -> None:
    end = start + count
    for g in cache_spec(tiny(1)):
        first = g.first_written(start, end)
        assert start <= first
        if g.name.endswith("_state"):
            settled = end if count > 4 else start + 1  # a short step may be undone
            assert first == max(start, mixed_from(g.name, 1, settled))
        else:
            assert first == start


# --- Sizes ----------------------------------------------------------------------------------------


def make_plan(config: DeepseekV4Config, budget: int, **more: Any) -> CachePlan:
    sizes = {"max_num_seqs": 3, "max_step_tokens": 50, "wanted_tokens": 4000, "itemsize": 4} | more
    return plan_cache(cache_spec(config), budget_bytes=budget, **sizes)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 30),
    seqs=st.integers(1, 9),
    step=st.integers(1, 700),
    wanted=st.integers(1, 5000),
    spare=st.integers(0, 3_000_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    prefix_caching=st.booleans(),
)
def test_the_plan_s_bytes_are_the_tensors_bytes(
    seed: int,
    seqs: int,
    step: int,
    wanted: int,
    spare: int,
    dtype: torch.dtype,
    prefix_caching: bool,
) -> None:
    config = tiny(seed)
    sizes = {"max_num_seqs": seqs, "max_step_tokens": step, "itemsize": dtype.itemsize}
    sizes["prefix_caching"] = prefix_caching
    least = make_plan(config, 10**12, wanted_tokens=1, **sizes).total_bytes
    budget = least + spare
    plan = make_plan(config, budget, wanted_tokens=wanted, **sizes)
    cache = allocate_cache(cache_spec(config), plan, dtype, torch.device("meta"))
    assert sum(pages.nbytes for pages in cache.pages.values()) == plan.total_bytes <= budget
    assert plan.capacity_tokens % 256 == 0 and plan.capacity_tokens >= 256
    for g in cache_spec(config):
        if g.keep is None:
            assert (plan.num_pages[g.name] - 1) * g.tokens_per_page == plan.capacity_tokens
    # No more than was wanted, and as much of it as the budget holds.
    assert plan.capacity_tokens < wanted + 256
    assert plan.num_states <= (plan.capacity_tokens // 256 if prefix_caching else 0)
    if plan.capacity_tokens < wanted and not plan.num_states:
        more = make_plan(config, 10**12, wanted_tokens=plan.capacity_tokens + 1, **sizes)
        assert more.total_bytes > budget


def test_states_have_their_part_of_the_memory() -> None:
    """An eighth of what is left, but no more than blocks, and not before least_tokens have room."""
    config = published("flash")
    sizes = {"itemsize": 2, "packed": True, "max_num_seqs": 64, "max_step_tokens": 2048}
    budget, plenty = 40 * 2**30, {"wanted_tokens": 10**9}
    plain = make_plan(config, budget, **sizes, **plenty)
    plan = make_plan(config, budget, **sizes, **plenty, prefix_caching=True)
    assert plain.num_states == 0 and budget - plan.total_bytes < 10 * 2**20
    # 584 bytes a row of the window in 44 layers, two pages of it; one page of C4 state in 21.
    state_bytes = 2 * 64 * 584 * 44 + 8 * 4 * (4 * 512 + 4 * 128) * 21
    assert plan.num_states * state_bytes == pytest.approx(budget / 8, rel=0.1)
    assert plan.capacity_tokens == pytest.approx(0.875 * plain.capacity_tokens, rel=0.05)
    least = make_plan(config, budget, **sizes, **plenty, prefix_caching=True, least_tokens=10**9)
    assert least.num_states == 0
    small = make_plan(config, budget, **sizes, wanted_tokens=256 * 100, prefix_caching=True)
    assert (small.num_states, small.capacity_tokens) == (100, 256 * 100)


@pytest.mark.parametrize("config", [tiny(0), tiny(5), window_only()], ids=["a", "b", "window"])
def test_a_budget_that_is_too_small(config: DeepseekV4Config) -> None:
    """The error names what is needed; with exactly that much there is a plan, with less none."""
    with pytest.raises(ResourceError) as error:
        make_plan(config, 10)
    text = str(error.value)
    assert "\n" not in text and "10 are available" in text
    assert "max_num_seqs" in text and "cache_memory_bytes" in text
    needed = int(text.split("at least ")[1].split(" bytes")[0].replace(",", ""))
    assert make_plan(config, needed).total_bytes == needed
    with pytest.raises(ResourceError):
        make_plan(config, needed - 1)


def test_page_zero_holds_numbers() -> None:
    """Masked slots read it: a NaN there would poison what multiplies it by zero."""
    config = tiny(2)
    plan = make_plan(config, 10**8)
    cache = allocate_cache(cache_spec(config), plan, torch.float32, torch.device("cpu"))
    for g in cache_spec(config):
        for f in g.fields:
            assert tuple(cache.pools[f.name]) == f.layers
            for layer in f.layers:
                rows = cache.pools[f.name][layer]
                assert rows.shape == (plan.num_pages[g.name] * g.rows_per_page, f.width)
                assert rows[: g.rows_per_page].eq(0).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["flash", "pro", "tiny"])
def test_parts_of_a_page_lie_apart_and_aligned(name: str, packed: bool) -> None:
    """Each field and layer has bytes of its own, where 16 bytes can be loaded at once."""
    config = tiny(2) if name == "tiny" else published(name)
    for g in cache_spec(config):
        if packed and name == "tiny" and not g.name.endswith("_state"):
            continue  # its rows are too narrow to be packed
        layout = g.layout(2, packed)
        whole = layout.row_bytes or layout.page_bytes
        ends = 0
        for f in g.fields:
            size = f.width * (4 if f.full_precision else 2)
            if not layout.row_bytes:
                size = f.record.page_bytes(g.rows_per_page)
            for layer in f.layers:
                offset = layout.offsets[f.name, layer]
                assert offset >= ends and offset % 16 == 0
                ends = offset + size
        assert ends <= whole <= 1.03 * ends + 128
        assert layout.page_bytes == g.page_bytes(2, packed)
        assert layout.page_bytes % (128 if not layout.row_bytes else 16) == 0
        if layout.row_bytes:
            assert layout.page_bytes == g.rows_per_page * layout.row_bytes
            assert all(f.full_precision or layout.row_bytes % (2 * f.width) == 0 for f in g.fields)


@pytest.mark.parametrize("packed", [False, True])
def test_pools_are_views_of_their_pages(packed: bool) -> None:
    config = published("flash").with_layers(8)
    groups = cache_spec(config)
    plan = CachePlan({g.name: 3 for g in groups}, 0, 0, 0)
    cache = allocate_cache(groups, plan, torch.bfloat16, torch.device("cpu"), packed)
    for g in groups:
        cache.pages[g.name].zero_()
        for f in g.fields:
            for layer in f.layers:
                pool = cache.pools[f.name][layer]
                rows = 1 if pool.dtype == torch.uint8 else g.rows_per_page
                assert len(pool) == 3 * rows
                assert not pool.view(torch.uint8).any(), "another layer's bytes"
                pool[2 * rows :].view(torch.uint8).fill_(1)
        assert not cache.pages[g.name][:2].any() and cache.pages[g.name][2].any()


def test_pages_of_groups_that_keep_everything_fit_each_other() -> None:
    """Reservations are counted in tokens once for all of them."""
    sizes = sorted({g.tokens_per_page for g in cache_spec(tiny(0)) if g.keep is None})
    assert all(b % a == 0 for a, b in pairwise(sizes))
