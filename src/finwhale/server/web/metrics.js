/* Prometheus' text format, and what it says of the time between two answers. */

/* {name: [{labels, value}]} */
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    (found[match[1]] ??= []).push({labels, value: match[3] === "+Inf" ? Infinity : Number(match[3])});
  }
  return found;
}

export function value(metrics, name, labels = {}) {
  const same = sample => Object.entries(labels).every(([key, wanted]) => sample.labels[key] === wanted);
  return metrics[name]?.find(same)?.value ?? 0;
}

/* How much a counter grew. */
export function growth(now, before, name, labels = {}) {
  return Math.max(0, value(now, name, labels) - value(before, name, labels));
}

/* Quantiles of what a histogram observed since `before`, each interpolated in its bucket; null without any. */
export function quantiles(now, before, name, wanted) {
  const buckets = (now[`${name}_bucket`] || []).map(({labels}) =>
    [labels.le === "+Inf" ? Infinity : Number(labels.le), growth(now, before, `${name}_bucket`, {le: labels.le})]);
  const total = buckets.at(-1)?.[1] || 0;
  return wanted.map(share => {
    if (!total) return null;
    const at = buckets.findIndex(([, count]) => count >= share * total);
    const [high, count] = buckets[at], [low, below] = at ? buckets[at - 1] : [0, 0];
    return high === Infinity ? low : low + (high - low) * (share * total - below) / (count - below || 1);
  });
}
