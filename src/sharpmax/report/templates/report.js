"use strict";
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("figures").textContent), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { specs, dark, library } = await new Response(unpacked).json();
  document.head.append(Object.assign(document.createElement("script"), { textContent: library }));
  const isDark = window.matchMedia("(prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")];
  const views = new Map();

  // Specs are in the colours of a light page; a dark page exchanges these.
  const coloured = (spec) =>
    JSON.parse(JSON.stringify(spec), (_, value) => (isDark.matches && typeof value === "string" && dark[value]) || value);

  // Panels share the width of the page; the legend gets as many columns as its longest entry allows.
  const fitted = (spec, width) => {
    const { columns, minimum, around, legend } = spec.usermeta;
    spec.columns = Math.max(1, Math.min(columns, Math.floor(width / minimum)));
    const panel = Math.floor((width - 8 * spec.columns) / spec.columns) - around;
    spec.concat.forEach((one) => { one.width = Math.max(80, panel); });
    spec.config.title.limit = panel + around;
    spec.config.legend.columns = Math.max(1, Math.floor(width / (7 * legend + 34)));
    return spec;
  };

  // A head that is clicked or chosen is shown in every figure of its part.
  const link = (plot, view) => {
    if (!view.getState().signals || !("head" in view.getState().signals)) return;
    const others = () => [...plot.closest(".part").querySelectorAll(".plot")].filter((one) => one !== plot);
    const share = (head) => others().forEach((one) => {
      const other = views.get(one);
      if (other && "head" in other.getState().signals && other.signal("head") !== head) other.signal("head", head).runAsync();
    });
    view.addSignalListener("head", (_, head) => share(head));
    view.addEventListener("click", (_, item) => {
      if (item && item.datum && item.datum.head) view.signal("head", item.datum.head).runAsync();
    });
  };

  const draw = async (plot) => {
    const width = plot.clientWidth;
    const spec = fitted(coloured(specs[plot.id]), width);
    const options = { mode: "vega-lite", actions: false, renderer: "svg", tooltip: { theme: isDark.matches ? "dark" : "light" } };
    if (views.has(plot)) views.get(plot).finalize();
    try {
      const { view } = await window.vegaEmbed(plot, spec, options);
      views.set(plot, view);
      link(plot, view);
      plot.dataset.drawn = width;
    } catch (problem) {
      plot.textContent = `This figure could not be drawn: ${problem.message}`;
    }
  };
  const drawAll = async () => { for (const plot of plots) await draw(plot); };

  let width = window.innerWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 150);
  });
  isDark.addEventListener("change", drawAll);
  drawAll();
})();
