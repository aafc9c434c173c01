"use strict";
(() => {
  const { figures, dark } = JSON.parse(document.getElementById("figures").textContent);
  const isNarrow = (element) => element.clientWidth < 620;
  const isDark = window.matchMedia("(prefers-color-scheme: dark)");
  const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  const recipes = all(".recipe").map((section) => section.dataset.recipe);
  const state = { recipe: recipes[0], hidden: new Set(), heat: null };

  // Figures are plain data in the colours of a light page, so that a dark one only has to exchange these.
  const coloured = (figure) =>
    JSON.parse(JSON.stringify(figure), (_, value) =>
      isDark.matches && typeof value === "string" && dark[value] ? dark[value] : value);

  const shown = (figure, trace) => {
    const arm = trace.meta && trace.meta.arm;
    if (!figure.one_at_a_time) return !state.hidden.has(arm);
    const arms = figure.data.map((other) => other.meta.arm);
    return arm === (arms.includes(state.heat) ? state.heat : arms[0]);
  };

  const paint = (element) => {
    element.dataset.narrow = isNarrow(element);
    const figure = coloured(figures[element.id]);
    const traces = figure.data.map((trace) => ({ ...trace, visible: shown(figure, trace) }));
    const layout = isNarrow(element) ? figure.narrow : figure.wide;
    Promise.resolve()
      .then(() => window.Plotly.react(element, traces, layout, config))
      .catch(() => element.closest("figure").classList.add("failed"));
  };

  const press = (buttons, isPressed) =>
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(isPressed(button))));

  const update = () => {
    all(".recipe").forEach((section) => section.classList.toggle("off", section.dataset.recipe !== state.recipe));
    press(all("button[data-show]"), (button) => button.dataset.show === state.recipe);
    press(all("button[data-arm]"), (button) => !state.hidden.has(button.dataset.arm));
    all(".choices").forEach((group) => {
      const buttons = all("button[data-heat]", group);
      const known = buttons.some((button) => button.dataset.heat === state.heat);
      press(buttons, (button) => (known ? button.dataset.heat === state.heat : button === buttons[0]));
    });
    // A figure that is not on the page has no width to be drawn in.
    all(".recipe:not(.off) .plot").forEach(paint);
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const { show, arm, heat } = button.dataset;
    if (show) state.recipe = show;
    else if (arm) state.hidden.has(arm) ? state.hidden.delete(arm) : state.hidden.add(arm);
    else if (heat) state.heat = heat;
    update();
  });
  window.addEventListener("resize", () =>
    all(".recipe:not(.off) .plot").filter((plot) => plot.dataset.narrow !== String(isNarrow(plot))).forEach(paint));
  isDark.addEventListener("change", update);
  update();

  // What the script of a story may use.
  window.report = { figures, state, update };
})();
