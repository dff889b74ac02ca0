/* The engine: plots and numbers from /metrics, while they are looked at. */

import {$, element} from "./dom.js";
import {ask} from "./api.js";
import {server} from "./server.js";
import {growth, parse, quantiles, value} from "./metrics.js";
import {Plot} from "./plots.js";

const MAX_POINTS = 600;
// Quantiles are those of the last half minute.
const WINDOW_S = 30;
const QUANTILES = [0.5, 0.9, 0.99];
const QUANTILE_LINES = [{label: "p50"}, {label: "p90"}, {label: "p99"}];

/* Each plot: its options, and from (metrics now, before, seconds between) the values of its lines. */
const PLOTS = [
  {
    title: "Tokens per second", lines: [{label: "output"}, {label: "prefill"}],
    values: (now, before, seconds) => [
      growth(now, before, "finwhale_output_tokens_total") / seconds,
      // Without the tokens that the prefix cache had.
      (growth(now, before, "finwhale_prefill_tokens_total") -
        growth(now, before, "finwhale_prefix_hit_tokens_total")) / seconds,
    ],
  },
  {
    title: "Sequences in the batch", lines: [{label: "running"}, {label: "waiting"}],
    values: now => [value(now, "finwhale_running"), value(now, "finwhale_waiting")],
  },
  {
    title: "Time to first token", unit: " ms", lines: QUANTILE_LINES, window: true,
    values: (now, before) => milliseconds(quantiles(now, before, "finwhale_time_to_first_token_seconds", QUANTILES)),
  },
  {
    title: "Time per output token", unit: " ms", lines: QUANTILE_LINES, window: true,
    values: (now, before) => milliseconds(quantiles(now, before, "finwhale_time_per_output_token_seconds", QUANTILES)),
  },
  {
    title: "Prompt tokens found in the prefix cache", unit: "%", highest: 100, lines: [{label: "found"}], window: true,
    values: (now, before) => {
      const prefill = growth(now, before, "finwhale_prefill_tokens_total");
      return [prefill ? 100 * growth(now, before, "finwhale_prefix_hit_tokens_total") / prefill : null];
    },
  },
];

function milliseconds(times) {
  return times.map(time => (time === null ? null : 1000 * time));
}

export class EngineView {
  constructor() {
    this.shown = false;
    this.history = [];
    this.plots = PLOTS.map(options =>
      ({...options, plot: new Plot(options), columns: [[], ...options.lines.map(() => [])]}));
    this.cache = null;
    this.acceptance = new Plot({
      title: "Accepted drafts by position", unit: "%", highest: 100, positions: true, lines: [{label: "accepted"}],
    });
    $("plots").append(...this.plots.map(one => one.plot.figure), this.acceptance.figure);
    document.addEventListener("theme", () => this.#restyle());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#restyle());
    addEventListener("resize", () => this.#draw());
    server.addEventListener("change", () => this.#update());
  }

  show(shown) {
    this.shown = shown;
    if (shown) this.#update();
  }

  /* Without a server, there is nothing to show; the notice says why. Its counters may begin anew. */
  async #update() {
    if (!server.ready) {
      this.history = [];
      this.metrics = null;
    } else if (this.shown && !this.asking) {
      this.asking = true;
      try {
        this.#take(parse(await (await ask("metrics")).text()));
      } catch { /* the next answer of /live says what is wrong */ }
      this.asking = false;
    }
    $("engine-cards").hidden = !this.metrics;
  }

  #take(metrics) {
    const time = Date.now() / 1000, before = this.history.at(-1);
    this.history.push({time, metrics});
    while (this.history[0].time < time - WINDOW_S) this.history.shift();
    if (before) {
      for (const {values, window, columns} of this.plots) {
        const from = window ? this.history[0] : before;
        push(columns, time, values(metrics, from.metrics, time - from.time));
      }
      this.#takeCache(metrics, time);
    }
    this.metrics = metrics;
    $("engine-cards").hidden = false;
    this.#draw();
  }

  /* Kinds of pages are known from the first answer. */
  #takeCache(metrics, time) {
    const kinds = [...new Set((metrics.finwhale_pages || []).map(({labels}) => labels.kind))];
    if (!this.cache && kinds.length) {
      const lines = kinds.map(label => ({label}));
      const options = {title: "Used cache by kind of state", unit: "%", highest: 100, lines};
      this.cache = {plot: new Plot(options), columns: [[], ...kinds.map(() => [])]};
      this.acceptance.figure.before(this.cache.plot.figure);
    }
    if (this.cache) push(this.cache.columns, time, kinds.map(kind => {
      const used = value(metrics, "finwhale_pages", {kind, state: "used"});
      return 100 * used / (used + value(metrics, "finwhale_pages", {kind, state: "free"}) || 1);
    }));
  }

  #draw() {
    if (!this.shown || !this.metrics) return;
    for (const {plot, columns} of [...this.plots, ...(this.cache ? [this.cache] : [])]) plot.show(columns);
    this.#drawAcceptance();
    this.#drawPages();
    this.#drawRanks();
    this.#drawCounts();
  }

  #drawAcceptance() {
    const proposed = this.metrics.finwhale_spec_decode_num_draft_tokens_per_pos_total || [];
    const accepted = "finwhale_spec_decode_num_accepted_tokens_per_pos_total";
    const any = proposed.some(sample => sample.value);
    this.acceptance.figure.hidden = !any;
    if (!any) return;
    const positions = proposed.map(sample => Number(sample.labels.position));
    const shares = proposed.map(({labels, value: count}) =>
      (count ? 100 * value(this.metrics, accepted, labels) / count : null));
    const length = value(this.metrics, "finwhale_draft_mean_accepted_length");
    this.acceptance.show([positions, shares], `${length.toFixed(2)} tokens per verification`);
  }

  #drawPages() {
    const pages = {};
    for (const {labels, value: count} of this.metrics.finwhale_pages || [])
      (pages[labels.kind] ??= {})[labels.state] = count;
    $("pages").replaceChildren(...Object.entries(pages).map(([kind, {used, free}]) => {
      const meter = element("meter", {max: used + free || 1, value: used, "aria-label": kind});
      return element("div", {className: "bar"}, element("span", {textContent: kind}),
        element("span", {textContent: `${used} / ${used + free}`}), meter);
    }));
  }

  /* Meters are relative to the rank that holds most. */
  #drawRanks() {
    const ranks = {};
    for (const {labels, value: bytes} of this.metrics.finwhale_rank_memory_bytes || []) {
      const rank = ranks[labels.rank] ??= {device: labels.device, total: 0, kinds: [], times: []};
      rank.total += bytes;
      if (bytes) rank.kinds.push(`${labels.kind} ${size(bytes)}`);
    }
    for (const [name, metric] of [["step", "finwhale_rank_step_seconds"], ["LM head", "finwhale_rank_lm_head_seconds"]]) {
      for (const {labels, value: seconds} of this.metrics[metric] || []) {
        ranks[labels.rank]?.times.push(`${name} ${Number((1000 * seconds).toPrecision(3))} ms`);
      }
    }
    const most = Math.max(...Object.values(ranks).map(({total}) => total), 1);
    $("ranks").replaceChildren(...Object.entries(ranks).map(([number, {device, total, kinds, times}]) => {
      const name = `rank ${number}, ${device}`;
      const meter = element("meter", {max: most, value: total, "aria-label": name});
      return element("div", {className: "bar"}, element("span", {textContent: name}),
        element("span", {textContent: kinds.join(", ")}), meter,
        element("span", {className: "times", textContent: times.join(", ")}));
    }));
  }

  #drawCounts() {
    const now = this.metrics, rows = [
      ["Steps", value(now, "finwhale_steps_total")],
      ["Prefill tokens", value(now, "finwhale_prefill_tokens_total")],
      ["of them found in the cache", value(now, "finwhale_prefix_hit_tokens_total")],
      ["Output tokens", value(now, "finwhale_output_tokens_total")],
      ...(now.finwhale_prefix_store_up ? [
        ["of these, loaded from the prefix store", value(now, "finwhale_prefix_tier_tokens_total", {tier: "store"})],
        ["Bytes read from the prefix store", value(now, "finwhale_prefix_store_read_bytes_total")],
        ["Bytes written to the prefix store", value(now, "finwhale_prefix_store_written_bytes_total")],
        ["Saves skipped by the prefix store", value(now, "finwhale_prefix_store_skipped_saves_total")],
      ] : []),
      ["Preemptions", value(now, "finwhale_preemptions_total")],
      ["Late compilations", (now.finwhale_late_compilations_total || []).reduce((sum, one) => sum + one.value, 0)],
      ...(now.finwhale_endings_total || []).map(({labels, value: count}) => [`Sequences that ended: ${labels.how}`, count]),
    ];
    $("counts").replaceChildren(...rows.map(([name, count]) => element("tr", {},
      element("th", {scope: "row", textContent: name}), element("td", {textContent: count.toLocaleString("en")}))));
  }

  #restyle() {
    for (const {plot} of [...this.plots, ...(this.cache ? [this.cache] : [])]) plot.restyle();
    this.acceptance.restyle();
    this.#draw();
  }
}

function size(bytes) {
  const gib = bytes / 2 ** 30;
  return gib >= 1 ? `${gib.toFixed(1)} GiB` : `${(1024 * gib).toFixed(0)} MiB`;
}

function push(columns, time, values) {
  [time, ...values].forEach((found, i) => {
    columns[i].push(found);
    if (columns[i].length > MAX_POINTS) columns[i].shift();
  });
}
