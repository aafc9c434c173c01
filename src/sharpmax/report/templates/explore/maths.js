"use strict";
/* The arithmetic of the page: pure functions of numbers, the same as in sharpmax (rows, policies, theory) in closed form.

A row is { items, spread, lead }. Its best logit is 0. The other m = items − 1 lie at −lead·spread − step·k for k = 1 … m,
evenly down to −spread; lead is a share, 0 … 1. Sharpness is what multiplies the logits, β/θ. */
const maths = (() => {
  // x/(eˣ − 1), and 1 at 0.
  const decay = (x) => (x === 0 ? 1 : x / Math.expm1(x));

  // Σ e^(−step·k) over k = 1 … count.
  const series = (step, count) => (step === 0 ? count : -Math.expm1(-step * count) / Math.expm1(step));

  const levels = ({ items, spread, lead }, sharpness) => ({
    others: items - 1,
    gap: sharpness * lead * spread,
    step: (sharpness * (1 - lead) * spread) / (items - 1),
  });

  // The weight of the best item and the entropy in nats, exact for any number of items.
  const measure = (row, sharpness) => {
    const { others, gap, step } = levels(row, sharpness);
    const rest = Math.exp(-gap) * series(step, others);
    // How far the others lie below the best one, in the mean of their weights.
    const depth = gap + step + decay(step) - decay(step * others);
    return { top: 1 / (1 + rest), entropy: Math.log1p(rest) + (rest / (1 + rest)) * depth };
  };

  // The weights of the first `count` items, largest first, and of all others together.
  const weights = (row, sharpness, count) => {
    const { others, gap, step } = levels(row, sharpness);
    const { top } = measure(row, sharpness);
    const shown = Math.min(count, row.items);
    const first = Array.from({ length: shown }, (_, k) => (k === 0 ? top : top * Math.exp(-gap - step * k)));
    const below = shown - 1;
    return { first, rest: top * Math.exp(-gap - step * below) * series(step, others - below) };
  };

  const polynomial = ({ coefficients, threshold }, entropy) =>
    entropy > threshold ? Math.max(1, coefficients.reduce((sum, c) => sum * entropy + c, 0)) : 1;

  // H(β) falls, so halving finds where it meets the target.
  const targeted = ({ target, floor, ceiling }, row, sharpness) => {
    const above = (u) => measure(row, sharpness * Math.exp(u)).entropy > target;
    let [low, high] = [Math.log(floor), Math.log(ceiling)];
    if (!above(low)) return floor;
    if (above(high)) return ceiling;
    for (let i = 0; i < 60; i += 1) {
      const middle = (low + high) / 2;
      if (above(middle)) low = middle;
      else high = middle;
    }
    return Math.exp((low + high) / 2);
  };

  // The β of a policy, given as its JSON form or null for none, for a row at a temperature.
  const beta = (policy, row, temperature) => {
    switch (policy && policy.kind) {
      case "polynomial":
        return polynomial(policy, measure(row, 1 / temperature).entropy);
      case "log-length":
        return Math.max(policy.floor, Math.log(row.items) / Math.log(policy.reference));
      case "entropy-target":
        return targeted(policy, row, 1 / temperature);
      default:
        return 1;
    }
  };

  // The lemma, tight and as the paper states it: what one of n items can weigh within a spread in nats.
  const bounds = (spread, items) => ({
    low: 1 / (1 + (items - 1) * Math.exp(spread)),
    high: 1 / (1 + (items - 1) * Math.exp(-spread)),
    looseLow: Math.exp(-spread) / items,
    looseHigh: Math.exp(spread) / items,
  });

  // Up to how many items one of them can hold a mass.
  const horizon = (spread, mass = 0.5) => 1 + (Math.exp(spread) * (1 - mass)) / mass;

  // Entropy of `count` logits at the top and the rest at the bottom.
  const twoLevels = (spread, items, count) => {
    const odds = ((items - count) / count) * Math.exp(-spread);
    return Math.log(count) + Math.log1p(odds) + (spread * odds) / (1 + odds);
  };

  // The least entropy of n items within a spread; the best number of items at the top is next to a real minimum.
  const entropyFloor = (spread, items) => {
    if (spread === 0) return Math.log(items);
    const u = -Math.expm1(-spread);
    const best = Math.min((items * Math.exp(-spread) * (spread - u)) / u / u, items / 2);
    const below = Math.max(1, Math.floor(best));
    const least = Math.min(...[below, Math.min(items, below + 1)].map((count) => twoLevels(spread, items, count)));
    return Math.min(least, Math.log(items));
  };

  // Everything about a row at a temperature, without and with a policy.
  const look = (row, temperature, policy) => {
    const factor = beta(policy, row, temperature);
    const spread = (factor / temperature) * row.spread;
    return {
      beta: factor,
      spread,
      plain: measure(row, 1 / temperature),
      sharp: measure(row, factor / temperature),
      bounds: bounds(spread, row.items),
      floor: entropyFloor(spread, row.items),
      ceiling: Math.log(row.items),
      horizon: horizon(spread),
    };
  };

  return { measure, weights, beta, bounds, horizon, entropyFloor, look };
})();
