// The numbers of a chart: which are drawn, which are too far from the others, and their moving average.
// `levels` are values in the scale of the axis: their logarithm of base 10, or themselves. NaN: it cannot be drawn there.

/** Where the middle 90 % of a series lie, how many times their spread a value may lie beyond them, and how many powers of ten. */
const TAIL = 0.05, SPREADS = 30, DECADES = 5;
/** Differences of larger numbers could be infinite. */
const LARGEST = Number.MAX_VALUE / 8;

/** A value in the scale of the axis. */
export function level(value, log) {
  if (log) return value > 0 ? Math.log10(value) : NaN;
  return Number.isFinite(value) ? Math.max(-LARGEST, Math.min(LARGEST, value)) : NaN;
}

/** The least and the most level that is drawn. What lies beyond is an outlier, beside which the other values would look like a line. */
export function limits(levels, log) {
  const sorted = Float64Array.from(levels.filter(Number.isFinite)).sort(), last = sorted.length - 1;
  if (last < 2) return [-Infinity, Infinity];
  const low = sorted[Math.ceil(TAIL * last)], high = sorted[Math.floor((1 - TAIL) * last)];
  const reach = log ? DECADES * Math.max(1, high - low) : SPREADS * (Math.max(high - low, Math.abs(low), Math.abs(high)) || 1);
  return [low - reach, high + reach];
}

/** The mean distance in x of a series' points. */
export function spacing(points) {
  return points.length > 1 ? (points.at(-1)[0] - points[0][0]) / (points.length - 1) || 1 : Infinity;
}

/**
 * The exponential moving average of levels: `share` is the weight that older ones keep over a distance of `unit` in x, so that a series of few points is not
 * smoothed over more steps than one of many. Levels outside the limits are left out.
 */
export function smoothed(points, levels, share, unit, [least, most]) {
  let sum = 0, weight = 0, before = null;
  return levels.map((one, at) => {
    const x = points[at][0];
    if (one >= least && one <= most) {
      const kept = share ** (before !== null && x > before ? (x - before) / unit : 1);
      [sum, weight, before] = [kept * sum + (1 - kept) * one, kept * weight + (1 - kept), x];
    }
    return one === one && weight ? sum / weight : NaN;
  });
}

/** The least and the most of some numbers, apart where they are the same. */
export function rangeOf(values) {
  let least = Infinity, most = -Infinity;
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  if (!(most >= least)) return [0, 1];
  return least === most ? [least - Math.abs(least || 1) * 0.1, most + Math.abs(most || 1) * 0.1] : [least, most];
}

/** The points in a range of x, and one more at each side, so that the curve reaches the edges. */
export function within(points, [x0, x1]) {
  const from = points.findIndex(([x]) => x >= x0), to = points.findLastIndex(([x]) => x <= x1);
  return from < 0 || to < 0 ? [] : points.slice(Math.max(0, from - 1), to + 2);
}

/** The stretches of points without NaN between them. */
export function stretches(points) {
  const found = [[]];
  for (const point of points) {
    if (point[1] === point[1]) found.at(-1).push(point);
    else if (found.at(-1).length) found.push([]);
  }
  return found.filter((one) => one.length);
}

/** At most two points for each pixel column: the lowest and the highest. */
export function thinned(points, most) {
  if (points.length <= 2 * most) return points;
  const each = Math.ceil(points.length / most), kept = [];
  for (let at = 0; at < points.length; at += each) {
    let low = points[at], high = points[at];
    for (let i = at; i < Math.min(at + each, points.length); i += 1) {
      if (points[i][1] < low[1]) low = points[i];
      if (points[i][1] > high[1]) high = points[i];
    }
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}
