"use strict";
(() => {
  const all = (selector) => Array.from(document.querySelectorAll(selector));
  const one = (id) => document.getElementById(id);
  document.documentElement.classList.add("scripted");
  const cells = all("details.cell");
  const squares = all(".square");
  const toggles = all(".toggles button");
  const search = one("search"), owner = one("owner"), topology = one("topology");
  let current = null;

  const shown = () => cells.filter((cell) => !cell.hidden);

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = toggles.filter((button) => button.getAttribute("aria-pressed") === "true").map((button) => button.dataset.verdict);
    const kept = new Set();
    for (const cell of cells) {
      const data = cell.dataset;
      const fits = (!wanted.length || wanted.includes(data.verdict)) && (!owner.value || owner.value === data.owner)
        && (!topology.value || topology.value === data.topology) && words.every((word) => data.words.includes(word));
      cell.hidden = !fits;
      if (fits) kept.add(data.cell);
    }
    for (const square of squares) square.classList.toggle("aside", !kept.has(square.dataset.cell));
    one("found").textContent = kept.size === cells.length ? `${kept.size} cells` : `${kept.size} of ${cells.length} cells`;
    one("nothing").hidden = kept.size > 0;
  }

  function clear() {
    search.value = owner.value = topology.value = "";
    for (const button of toggles) button.setAttribute("aria-pressed", "false");
    filter();
  }

  function open(anchor) {
    const body = anchor && document.getElementById(anchor);
    const details = body && body.closest("details");
    if (!details) return;
    if (details.hidden) clear();
    details.open = true;
    const summary = details.querySelector("summary");
    summary.focus({ preventScroll: true });
    details.scrollIntoView({ block: "start" });
  }

  function step(by) {
    const list = shown();
    if (!list.length) return;
    const focused = document.activeElement && document.activeElement.closest("details.cell");
    const from = list.indexOf(focused || current);
    current = list[from < 0 ? (by > 0 ? 0 : list.length - 1) : Math.min(list.length - 1, Math.max(0, from + by))];
    current.querySelector("summary").focus();
  }

  for (const button of toggles) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      filter();
    });
  }
  search.addEventListener("input", filter);
  owner.addEventListener("change", filter);
  topology.addEventListener("change", filter);
  document.querySelector("form.filter").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    // A second click on the same square must open it again: the address does not change then.
    if (link && link.hash === location.hash) open(link.hash.slice(1));
  });
  window.addEventListener("hashchange", () => open(location.hash.slice(1)));

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = event.target;
    if (event.key === "Escape") {
      clear();
      search.blur();
      return;
    }
    if (target.closest("input, select, textarea")) {
      // From the search down into what it found.
      if (target === search && (event.key === "ArrowDown" || event.key === "Enter")) {
        event.preventDefault();
        search.blur();
        current = null;
        step(1);
      }
      return;
    }
    const inList = target.matches("details.cell > summary");
    if (event.key === "/") {
      event.preventDefault();
      search.focus();
      search.select();
    } else if (event.key === "j" || (inList && event.key === "ArrowDown")) {
      event.preventDefault();
      step(1);
    } else if (event.key === "k" || (inList && event.key === "ArrowUp")) {
      event.preventDefault();
      step(-1);
    }
  });

  filter();
  open(location.hash.slice(1));
})();
