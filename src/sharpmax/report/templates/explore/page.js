"use strict";
/* The page: reads its sliders, asks `maths`, updates the charts, the numbers and the sentence. */
(() => {
  const { policies, start } = JSON.parse(document.getElementById("explore").textContent);
  const find = (id) => document.getElementById(id);

  // A slider moves over a list of values, so that each key press goes on to another one.
  const SIZES = [...new Set(Array.from({ length: 152 }, (_, k) => Math.round(2 ** (1 + k / 8)))), 1e6];
  const steps = (from, to, by) => Array.from({ length: Math.round((to - from) / by) }, (_, k) => from + k * by);
  const tidy = (values) => values.map((value) => Number(value.toFixed(3)));
  const KNOBS = {
    items: { values: SIZES, text: (n) => `${whole(n)} items` },
    spread: {
      values: tidy([...steps(0, 10, 0.1), ...steps(10, 50, 1), ...steps(50, 400, 5), 400]),
      text: (nats) => `${plainly(nats)} nats`,
    },
    lead: { values: tidy(steps(0, 101, 1).map((per) => per / 100)), text: (share) => percent(share) },
    temperature: { values: tidy(Array.from({ length: 81 }, (_, k) => 10 ** (-1 + k / 40))), text: (t) => plainly(t) },
  };
  const LINES = SIZES.filter((_, k) => k < 24 || k % 2 === 0 || k === SIZES.length - 1);

  const whole = (n) => Math.floor(n).toLocaleString("en-GB");
  const plainly = (value) => String(Number(value.toPrecision(3)));
  const percent = (share) => {
    if (share === 0 || share === 1) return `${100 * share}%`;
    if (share > 0.9995) return "over 99.9%";
    return share < 1e-6 ? "under 0.0001%" : `${plainly(100 * share)}%`;
  };
  const nats = (entropy) => entropy.toFixed(2);
  const raised = (power) => [...String(power)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");
  const large = (n) => {
    if (n < 1e7) return whole(n);
    return Number.isFinite(n) ? `10${raised(Math.floor(Math.log10(n)))}` : `over 10${raised(308)}`;
  };

  const nearest = (values, wanted) =>
    values.reduce((best, value, k) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? k : best), 0);

  const state = { ...start };

  const views = {
    weights: charts.weightsChart(find("weights")),
    entropy: charts.entropyChart(find("entropy"), LINES),
    top: charts.topChart(find("top"), LINES),
  };

  const showKnobs = () => {
    for (const [name, { values, text }] of Object.entries(KNOBS)) {
      const slider = find(name);
      slider.value = nearest(values, state[name]);
      slider.setAttribute("aria-valuetext", text(state[name]));
      find(`${name}-value`).value = text(state[name]);
    }
    for (const radio of document.querySelectorAll("input[name=policy]")) radio.checked = radio.value === state.policy;
    for (const rule of document.querySelectorAll("[data-rule]")) rule.hidden = rule.dataset.rule !== state.policy;
  };

  const say = (seen) => {
    const { label } = policies[state.policy];
    const { plain, sharp } = seen;
    const among = `Among ${whole(state.items)} items within ${plainly(state.spread)} nats`;
    const alone = `${among} the best one has ${percent(plain.top)} of the weight and the entropy is ${nats(plain.entropy)} nats`;
    const both = `; with ${label} (β = ${plainly(seen.beta)}) it has ${percent(sharp.top)} and the entropy is ${nats(sharp.entropy)} nats`;
    const change = state.policy === "none" ? "" : seen.beta === 1 ? `; ${label} does not act (β = 1)` : both;
    const limit = `A spread of ${plainly(seen.spread)} nats lets one item hold half of the weight among up to ${large(seen.horizon)} items.`;
    find("summary").textContent = `${alone}${change}. ${limit}`;
  };

  const showNumbers = (seen) => {
    const { bounds, plain, sharp } = seen;
    const shared = Math.exp(sharp.entropy);
    const texts = {
      "top-number": percent(sharp.top),
      "top-detail": `softmax alone: ${percent(plain.top)}`,
      "entropy-number": `${nats(sharp.entropy)} nats`,
      "entropy-detail": `effective items: ${shared < 100 ? plainly(shared) : large(shared)}; possible: ${nats(seen.floor)} … ${nats(seen.ceiling)}`,
      "beta-number": plainly(seen.beta),
      "beta-detail": `spread with β and θ: ${plainly(seen.spread)} nats`,
      "bounds-number": percent(bounds.high),
      "bounds-detail": `smallest: ${percent(bounds.low)}; the paper's bounds: ${percent(bounds.looseLow)} … ${percent(Math.min(1, bounds.looseHigh))}`,
      "horizon-number": `${large(seen.horizon)} items`,
      "horizon-detail": "beyond it no item can hold half of the weight",
    };
    for (const [id, text] of Object.entries(texts)) find(id).textContent = text;
  };

  const showCharts = (row, seen) => {
    const policy = policies[state.policy].policy;
    const here = { plain: 1 / state.temperature, sharp: seen.beta / state.temperature };
    views.weights.show(
      maths.weights(row, here.plain, charts.ITEMS),
      maths.weights(row, here.sharp, charts.ITEMS),
    );
    const along = LINES.map((items) => maths.look({ ...row, items }, state.temperature, policy));
    const column = (read) => along.map(read);
    const dots = (read) => [["plain", read(seen.plain)], ["sharp", read(seen.sharp)]];
    views.entropy.show(
      [column((at) => at.ceiling), column((at) => at.floor), column((at) => at.plain.entropy), column((at) => at.sharp.entropy)],
      state.items,
      dots((at) => at.entropy),
    );
    // Beyond the chart a bound says nothing, and e^spread may leave the numbers there are.
    const loose = column((at) => Math.min(10, at.bounds.looseHigh));
    views.top.show(
      [loose, column((at) => at.bounds.high), column((at) => at.plain.top), column((at) => at.sharp.top)],
      state.items,
      dots((at) => at.top),
    );
    const drawn = {
      weights: `Bars: weights of the ${Math.min(charts.ITEMS, state.items)} largest of ${whole(state.items)} items`,
      entropy: `Curves: entropy against the number of items; ${nats(seen.sharp.entropy)} nats at ${whole(state.items)}`,
      top: `Curves: weight of the best item against the number of items; ${percent(seen.sharp.top)} at ${whole(state.items)}`,
    };
    for (const [id, text] of Object.entries(drawn)) find(id).setAttribute("aria-label", text);
  };

  const update = () => {
    const row = { items: state.items, spread: state.spread, lead: state.lead };
    const seen = maths.look(row, state.temperature, policies[state.policy].policy);
    showKnobs();
    showNumbers(seen);
    showCharts(row, seen);
    say(seen);
  };

  const go = (place) => {
    for (const [name, { values }] of Object.entries(KNOBS)) {
      const wanted = Number(place[name] ?? start[name]);
      state[name] = values[nearest(values, Number.isFinite(wanted) ? wanted : start[name])];
    }
    state.policy = Object.hasOwn(policies, place.policy) ? place.policy : start.policy;
    update();
  };

  // An address such as explore.html#items=64&spread=4 opens the page there.
  const fromAddress = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const toAddress = () => history.replaceState(null, "", `#${new URLSearchParams(state)}`);

  for (const [name, { values }] of Object.entries(KNOBS)) {
    const slider = find(name);
    slider.max = values.length - 1;
    slider.addEventListener("input", () => {
      state[name] = values[Number(slider.value)];
      update();
    });
    slider.addEventListener("change", toAddress);
  }
  for (const radio of document.querySelectorAll("input[name=policy]")) {
    radio.addEventListener("change", () => {
      state.policy = radio.value;
      update();
      toAddress();
    });
  }
  for (const button of document.querySelectorAll("button[data-go]")) {
    button.addEventListener("click", () => {
      go(JSON.parse(button.dataset.go));
      toAddress();
      document.querySelector(".bench").scrollIntoView();
    });
  }
  window.addEventListener("hashchange", () => go(fromAddress()));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const { chart } of Object.values(views)) chart.redraw(false, true);
  });
  go(fromAddress());
  for (const [name, view] of Object.entries(views)) charts.fitted(find(name), view);
})();
