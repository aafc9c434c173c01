"use strict";
(() => {
  const { figures, state, update } = window.report;
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const sections = all(".recipe").map((element) => ({
    element,
    task: element.dataset.recipe,
    heads: JSON.parse(element.querySelector(".heads-data").textContent),
    plot: element.querySelector(".curves .plot"),
  }));
  const shown = () => sections.find(({ task }) => task === state.recipe);
  let picked = shown().element.querySelector(".spot[aria-pressed='true']").dataset.spot;

  const cell = (tag, text) => {
    const made = document.createElement(tag);
    if (tag === "th") made.scope = "row";
    made.textContent = text;
    return made;
  };

  // A head that only one task knows leaves the others as they are.
  const fill = ({ element, heads, plot }) => {
    const about = heads[picked];
    if (!about) return;
    figures[plot.id].data.forEach((trace, place) => ([trace.x, trace.y] = about.lines[place]));
    plot.setAttribute("aria-label", `Entropy and top weight against the number of keys: ${about.called}`);
    element.querySelector(".picked strong").textContent = about.called;
    element.querySelector(".about tbody").replaceChildren(...about.facts.map(([label, ...values]) => {
      const row = document.createElement("tr");
      row.append(cell("th", label), ...values.map((value) => cell("td", value)));
      return row;
    }));
    all(".spot", element).forEach((spot) => {
      const isPicked = spot.dataset.spot === picked;
      spot.setAttribute("aria-pressed", String(isPicked));
      spot.tabIndex = isPicked ? 0 : -1;
    });
  };

  const remember = () => {
    const words = new URLSearchParams({ head: picked, task: state.recipe });
    window.history.replaceState(null, "", `#${words}`);
  };

  const pick = (head) => {
    picked = head;
    sections.forEach(fill);
    update();
  };

  const reveal = () => {
    const figure = shown().plot.closest("figure");
    const { top, bottom } = figure.getBoundingClientRect();
    const seen = Math.min(bottom, window.innerHeight) - Math.max(top, 0);
    if (seen < 0.5 * Math.min(bottom - top, window.innerHeight)) figure.scrollIntoView({ block: "start" });
  };

  // A link such as #head=12.3&task=kv leads to the curves of that head; every other one is the browser's.
  const follow = () => {
    const words = new URLSearchParams(window.location.hash.slice(1));
    const section = sections.find(({ task }) => task === words.get("task")) || shown();
    if (!section.heads[words.get("head")]) return;
    state.recipe = section.task;
    pick(words.get("head"));
    reveal();
  };

  const only = (button) => {
    const kind = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.only;
    all("[data-only]").forEach((other) => other.setAttribute("aria-pressed", String(other.dataset.only === kind)));
    all(".spot").forEach((spot) => spot.classList.toggle("dim", kind !== null && spot.dataset.kind !== kind));
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.only) only(button);
    if (button.dataset.spot) {
      pick(button.dataset.spot);
      reveal();
    }
    if (button.dataset.spot || button.dataset.show) remember();
  });

  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const target = (spot, key) => {
    const row = spot.closest("tr");
    const cells = [...row.cells];
    if (key === "Home") return cells[1];
    if (key === "End") return cells.at(-1);
    const [down, right] = STEPS[key];
    const line = down < 0 ? row.previousElementSibling : down > 0 ? row.nextElementSibling : row;
    return line && line.cells[cells.indexOf(spot.parentElement) + right];
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
    const spot = event.target.closest && event.target.closest(".spot");
    if (!spot || !(event.key in STEPS || event.key === "Home" || event.key === "End")) return;
    event.preventDefault();
    const next = target(spot, event.key);
    const button = next && next.querySelector(".spot");
    if (!button) return;
    spot.tabIndex = -1;
    button.tabIndex = 0;
    button.focus();
  });

  const hideTip = () => all(".tip").forEach((tip) => (tip.hidden = true));
  const showTip = (event) => {
    const spot = event.target.closest && event.target.closest(".spot");
    hideTip();
    if (!spot) return;
    const tip = spot.closest(".board").querySelector(".tip");
    tip.textContent = spot.getAttribute("aria-label");
    tip.hidden = false;
    const at = spot.getBoundingClientRect();
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.min(Math.max(at.left + at.width / 2 - width / 2, 8), document.documentElement.clientWidth - width - 8);
    tip.style.left = `${left}px`;
    tip.style.top = `${at.top - height - 8 > 0 ? at.top - height - 8 : at.bottom + 8}px`;
  };
  document.addEventListener("mouseover", showTip);
  document.addEventListener("focusin", showTip);
  document.addEventListener("focusout", hideTip);
  window.addEventListener("scroll", hideTip, { passive: true });
  window.addEventListener("hashchange", follow);

  sections.forEach(fill);
  follow();
})();
