"use strict";
// A method that is pointed at stands out among many lines that look alike.
(() => {
  const { figures } = window.report;
  const plots = () => [...document.querySelectorAll(".recipe:not(.off) .plot")];
  const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
  let pointed = null;

  const point = (arm) => {
    if (arm === pointed) return;
    pointed = arm;
    if (arm === null) return window.report.update();
    plots().forEach((plot) => {
      const arms = figures[plot.id].data.map((trace) => trace.meta && trace.meta.arm);
      if (!plot.data || !arms.includes(arm)) return;
      const mine = arms.flatMap((other, place) => (other === arm && plot.data[place].mode !== "lines+text" ? [place] : []));
      window.Plotly.restyle(plot, { opacity: arms.map((other) => (other === null || other === arm ? 1 : 0.3)) });
      if (mine.length) window.Plotly.restyle(plot, { "line.width": 3.5, ...(plain(plot, mine) ? { "line.color": ink() } : {}) }, mine);
    });
  };
  const plain = (plot, places) => places.every((place) => plot.data[place].mode === "lines");
  const armOf = (event) => {
    const button = event.target.closest && event.target.closest("button[data-arm]");
    return button ? button.dataset.arm : null;
  };
  if (window.matchMedia("(hover: hover)").matches) {
    document.addEventListener("mouseover", (event) => point(armOf(event)));
    // What is pressed is drawn anew, as it was before.
    document.addEventListener("click", () => { pointed = null; });
  }
})();
